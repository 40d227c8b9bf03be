"""Evaluate tasks: compare the final world with the task's goal, and aggregate over tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from roost.app_world.changes import Change, changes_between
from roost.app_world.state import Json, Snapshot
from roost.app_world.tasks.task import AppTask
from roost.app_world.world import World

MOST_SHOWN = 3  # changes


@dataclass(frozen=True)
class Check:
    """One check of an outcome."""

    name: str
    failure: str = ""  # why it failed; empty if it passed
    is_guard: bool = False  # passed even by an agent that does nothing

    @property
    def is_passed(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class Report:
    """Result of a task."""

    task_id: str
    checks: tuple[Check, ...]

    @property
    def passes(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.is_passed)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.is_passed)

    @property
    def success(self) -> bool:
        return not self.failures

    @property
    def score(self) -> float:
        return float(self.success)

    @property
    def share(self) -> float:
        """Share of passed checks; 0 if only guards passed, so that doing nothing gets no reward."""
        if all(check.is_guard for check in self.passes):
            return 0.0
        return len(self.passes) / len(self.checks)

    def describe(self) -> str:
        """The report as readable text."""
        return "\n".join(
            f"{'pass' if one.is_passed else 'FAIL'}  {one.name}  {one.failure}".rstrip() for one in self.checks
        )


def evaluate(task: AppTask, world: World) -> Report:
    """Score the world that an agent left."""
    return judge(task, world.snapshot())


def judge(task: AppTask, snapshot: Snapshot) -> Report:
    """Score the final snapshot of a world."""
    unmatched = changes_between(task.initial, snapshot)
    checks = [_completed(snapshot)]
    missed = []
    for wanted in task.wanted:
        found = next((change for change in unmatched if change.matches(wanted)), None)
        if found is None:
            missed.append(wanted)
        else:
            unmatched.remove(found)
        checks.append(Check(wanted.describe(), "" if found else _instead(wanted, unmatched)))
    half_done = {(wanted.table, wanted.key) for wanted in missed if wanted.before is not None}
    extra = [change for change in unmatched if (change.table, change.key) not in half_done]
    checks.append(Check("nothing else changed", _described(extra), is_guard=True))
    checks.append(_answered(task, snapshot))
    return Report(task.id, tuple(checks))


def task_goal_completion(reports: Sequence[Report]) -> float:
    """Share of solved tasks (TGC).

    >>> done, missed = Report("3f2a91c_1", ()), Report("3f2a91c_2", (Check("it is there", "it is not"),))
    >>> task_goal_completion([done, missed]), scenario_goal_completion([done, missed])
    (0.5, 0.0)
    """
    return sum(report.success for report in reports) / len(reports) if reports else 0.0


def scenario_goal_completion(reports: Sequence[Report]) -> float:
    """Share of scenarios whose attempted tasks were all solved, every time (SGC)."""
    solved: dict[str, bool] = defaultdict(lambda: True)
    for report in reports:
        solved[report.task_id.partition("_")[0]] &= report.success
    return sum(solved.values()) / len(solved) if solved else 0.0


def is_same_answer(answer: Json, wanted: Json) -> bool:
    """Return True if an answer is correct: numbers may be strings, case and outer whitespace are ignored.

    >>> is_same_answer(" $1,042 ", 1042), is_same_answer("ada berg", "Ada Berg"), is_same_answer("", 0)
    (True, True, False)
    """
    if isinstance(answer, bool) or answer is None or not isinstance(answer, str | int | float):
        return False
    if isinstance(wanted, str):
        return str(answer).strip().casefold() == wanted.strip().casefold()
    try:
        return float(str(answer).strip().removeprefix("$").replace(",", "")) == float(wanted)
    except ValueError:
        return False


def _completed(snapshot: Snapshot) -> Check:
    completion = snapshot["completion"]
    failure = "complete_task was not called" if completion is None else ""
    if completion and completion["status"] != "success":
        failure = f"its status is {completion['status']}"
    return Check("the task is completed", failure, is_guard=True)


def _answered(task: AppTask, snapshot: Snapshot) -> Check:
    answer = (snapshot["completion"] or {}).get("answer")
    if task.answer is None:
        failure = "" if answer in (None, "") else f"the task asks for none, but {str(answer)[:80]!r} was given"
        return Check("there is no answer", failure, is_guard=True)
    failure = "" if is_same_answer(answer, task.answer) else f"expected {task.answer!r}, got {str(answer)[:80]!r}"
    return Check("the answer is right", failure)


def _instead(wanted: Change, others: Sequence[Change]) -> str:
    """Describe the change that was made in place of a wanted one."""
    near = [change for change in others if (change.table, change.key) == (wanted.table, wanted.key)]
    if wanted.before is not None and near:
        return f"instead {near[0].describe()}"
    return "it did not happen"


def _described(changes: Sequence[Change]) -> str:
    more = f" and {len(changes) - MOST_SHOWN} more" if len(changes) > MOST_SHOWN else ""
    return "; ".join(change.describe() for change in changes[:MOST_SHOWN]) + more
