"""Requests of `roost scale` as files in the folder of a run: the command writes one, the driver takes and answers it.

Files work on a shared file system from any host, need no port, and are taken by a rename: once, or not at all.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from roost.trainer.records.run_folder import write_whole

REQUEST, TAKEN, ANSWER = ".request.json", ".taken.json", ".answer.json"
_CHANGE = re.compile(r"([^=\s]+)=([+-]?)(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a component's number of processes, by an amount or to a total.

    >>> Change.parse("rollout=+2"), Change.parse("rollout=3").amount(of=5)
    (Change(component='rollout', number=2, is_total=False), -2)
    """

    component: str
    number: int
    is_total: bool

    @classmethod
    def parse(cls, text: str) -> Change:
        found = _CHANGE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text} is not a change; write rollout=+2, rollout=-1 or rollout=4")
        component, sign, digits = found.groups()
        return cls(component, -int(digits) if sign == "-" else int(digits), not sign)

    def amount(self, of: int) -> int:
        """Processes to add to `of`, or to remove if negative."""
        return self.number - of if self.is_total else self.number


class ScaleState(StrEnum):
    WAITING = "waiting"  # the run has not taken it yet
    WORKING = "working"
    APPLIED = "applied"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """State of a request, and the messages about it so far."""

    state: ScaleState
    lines: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        return self.state in (ScaleState.APPLIED, ScaleState.REFUSED)


class ScaleRequests:
    """The requests in a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     requests = ScaleRequests(Path(folder))
    ...     name = requests.ask([Change("rollout", 2, is_total=False)], wait=60)
    ...     before, taken = requests.answer_to(name).state.value, requests.take()
    ...     requests.answer(name, ScaleAnswer(ScaleState.APPLIED, ("done",)))
    ...     before, taken[1], requests.answer_to(name).lines, requests.take()
    ('waiting', (Change(component='rollout', number=2, is_total=False),), ('done',), None)
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "scale"

    # The command --------------------------------------------------------------------------------------------------

    def ask(self, changes: Sequence[Change], wait: float) -> str:
        """Write a request, to be taken within `wait` seconds, and return its name; names sort by time."""
        self._folder.mkdir(mode=0o700, exist_ok=True)  # as all folders of a run
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex}"
        request = {"until": time.time() + wait, "changes": [asdict(change) for change in changes]}
        write_whole(self._folder / f"{name}{REQUEST}", [json.dumps(request).encode()])
        return name

    def answer_to(self, name: str) -> ScaleAnswer:
        found = _read(self._folder / f"{name}{ANSWER}")
        if not isinstance(found, Mapping):
            is_taken = (self._folder / f"{name}{TAKEN}").exists()
            return ScaleAnswer(ScaleState.WORKING if is_taken else ScaleState.WAITING)
        return ScaleAnswer(ScaleState(found["state"]), tuple(found["lines"]))

    def withdraw(self, name: str) -> bool:
        """Remove a request that has not been taken; return True if that was in time."""
        try:
            (self._folder / f"{name}{REQUEST}").unlink()
        except FileNotFoundError:
            return False
        return True

    def forget(self, name: str) -> None:
        """Remove what is left of an answered request."""
        for suffix in (REQUEST, TAKEN, ANSWER):
            (self._folder / f"{name}{suffix}").unlink(missing_ok=True)

    # The driver ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Refuse requests that an earlier process of the run took but did not answer, and remove answers not read."""
        taken = [path.name.removesuffix(TAKEN) for path in self._files(TAKEN)]
        for path in self._files(ANSWER):
            if path.name.removesuffix(ANSWER) not in taken:
                path.unlink(missing_ok=True)
        for name in taken:
            if not self.answer_to(name).is_final:
                self.answer(name, ScaleAnswer(ScaleState.REFUSED, ("the run was started again",)))
            (self._folder / f"{name}{TAKEN}").unlink(missing_ok=True)

    def take(self) -> tuple[str, tuple[Change, ...]] | None:
        """Take the oldest request; None if there is none. Requests after their deadline are refused."""
        for path in self._files(REQUEST):
            name = path.name.removesuffix(REQUEST)
            taken = path.with_name(f"{name}{TAKEN}")
            try:
                path.rename(taken)
                until, changes = _request(_read(taken))
            except FileNotFoundError:
                continue  # withdrawn
            except (KeyError, TypeError, ValueError):
                self._refuse(name, "the request cannot be read")
                continue
            if time.time() <= until:
                return name, changes
            self._refuse(name, "the run was not there while the request was waited for; ask again")
        return None

    def _refuse(self, name: str, why: str) -> None:
        self.answer(name, ScaleAnswer(ScaleState.REFUSED, (why,)))
        (self._folder / f"{name}{TAKEN}").unlink(missing_ok=True)

    def answer(self, name: str, answer: ScaleAnswer) -> None:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed: nobody waits for the answer
            write_whole(self._folder / f"{name}{ANSWER}", [json.dumps(asdict(answer)).encode()])

    def _files(self, suffix: str) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.name.endswith(suffix))
        except FileNotFoundError:
            return []


def _request(found: Any) -> tuple[float, tuple[Change, ...]]:
    """The deadline of a request, and its changes; raises KeyError, TypeError or ValueError if it is malformed."""
    return float(found["until"]), tuple(Change(**change) for change in found["changes"])


def _read(path: Path) -> object:
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found
