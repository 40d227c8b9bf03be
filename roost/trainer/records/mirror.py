"""Keep a run on object storage while it trains in a local folder, and bring it to a machine that continues it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from roost.learner.checksums import Damaged
from roost.procs.files import LOCK_FILE, disk_full, is_disk_full, put_in_place, unfinished
from roost.trainer.records.checkpoints import (
    ABOUT,
    Checkpoint,
    Checkpoints,
    best_of,
    kept_steps,
    name_aside,
)
from roost.trainer.records.remote import (
    CHECKPOINTS,
    FIX,
    LOGS,
    POLICY,
    RETRY_S,
    SCALE,
    TRIES,
    WRITER,
    Missing,
    RemoteRun,
    StorageError,
    Taken,
    checkpoint_name,
    one_line,
)
from roost.trainer.records.resuming import RunInUse, Say, locked, was_restarted
from roost.trainer.records.run_folder import RunFolder, write_whole

LINK = ".remote.json"  # in the local folder: which remote run it belongs to
LOOK_EVERY = 1.0  # seconds
RECORDS_EVERY = 30.0  # seconds between uploads of metrics and samples, without a checkpoint
LONGEST_WAIT = 120.0  # seconds between tries after failures

LIVE = ("status.json", "prometheus.json")  # mean something on this machine alone
AT_END = (LOGS, "trace.json")  # change all the time
TEMPORARY = (".part", ".unfinished", ".replaced")
UPLOADING = ".uploading"


@dataclass(frozen=True, slots=True)
class Link:
    """Remote run that a local folder belongs to."""

    url: str
    writer: str  # the name under which it writes there
    based_on: str = ""  # the writer that it was downloaded from
    is_continued: bool = False  # a run began in it: it may be ahead of the remote, even if no upload succeeded

    @classmethod
    def read(cls, folder: Path) -> Link | None:
        try:
            return cls(**json.loads((folder / LINK).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_whole(folder / LINK, [json.dumps(asdict(self)).encode()])


def new_writer() -> str:
    return secrets.token_hex(8)


def _fetch(
    remote: RemoteRun,
    folder: Path,
    resumes: bool,
    auto_resumes: bool,
    from_step: int | None,
    environ: Mapping[str, str],
    say: Say,
) -> str:
    """As `Mirror.fetch`; return the last writer before anything was downloaded."""
    if not remote.exists():
        return _check_writable(remote)
    is_wanted = auto_resumes or was_restarted(environ) or remote.has(RunFolder(folder).preempted_file.name)
    if not (resumes or from_step is not None or is_wanted):
        steps = remote.complete_steps()
        if steps or remote.has("metrics.jsonl"):
            done = f"a checkpoint of step {steps[-1]}" if steps else "no checkpoint yet"
            raise FileExistsError(
                f"{remote.url} holds a run already, with {done}; give this one another name, or continue that one: "
                "--resume"
            )
        return _check_writable(remote)
    link, writer = Link.read(folder), _check_writable(remote)
    if link is None or link.url != remote.url or writer not in (link.writer, link.based_on):
        _replace(remote, folder, writer, from_step, say)
        return writer
    if writer == link.based_on and not link.is_continued:  # downloaded earlier, and never continued here
        remote.download_records(folder)
        _drop_outdated(remote, folder)
    if from_step != 0:
        _fetch_checkpoint(remote, folder, from_step, say)
    return writer


def _check_writable(remote: RemoteRun) -> str:
    """Return the last writer. Write it back unchanged: a missing permission must show before anything is launched."""
    last = remote.writer()
    remote.write(WRITER, last or {"writer": ""})
    return str(last.get("writer", ""))


def _drop_outdated(remote: RemoteRun, folder: Path) -> None:
    """Remove downloaded checkpoints that the remote run has discarded or written again since."""
    newest = max(remote.complete_steps(), default=0)
    for one in Checkpoints(RunFolder(folder).checkpoints, 1).found():
        there = remote.manifest(checkpoint_name(one.step))
        if one.step > newest or (there is not None and there.stamp != one.stamp()):
            shutil.rmtree(one.folder)


def _replace(remote: RemoteRun, folder: Path, writer: str, from_step: int | None, say: Say) -> None:
    """Download the run. A local folder of the same name that is not its last writer is renamed."""
    say(f"downloading {remote.url}")
    if folder.exists():
        with locked(folder, say):
            pass
    draft = unfinished(folder)
    draft.mkdir(parents=True, exist_ok=True)
    with locked(draft, say):
        for left in draft.iterdir():  # of a download that was killed
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != LOCK_FILE:
                left.unlink()
        remote.download_records(draft)
        if from_step != 0:
            _fetch_checkpoint(remote, draft, from_step, say)
        if folder.exists():
            aside = folder.rename(name_aside(folder))
            say(f"{folder} belongs to another state of the run; renamed to {aside.name}")
        Link(remote.url, new_writer(), writer).write(draft)
        put_in_place(folder)


def _fetch_checkpoint(remote: RemoteRun, folder: Path, from_step: int | None, say: Say) -> None:
    """Download the checkpoint to continue from, unless the folder has it or a newer one."""
    local = Checkpoints(RunFolder(folder).checkpoints, 1)
    here, there = [one.step for one in local.found()], remote.complete_steps()
    if from_step is not None:
        if from_step not in here:
            if from_step not in there:
                steps = ", ".join(map(str, there)) or "none"
                raise FileNotFoundError(
                    f"{remote.url} has no complete checkpoint of step {from_step}; there are: {steps}"
                )
            _download(remote, local.at(from_step), say)
        return
    for step in reversed(there):
        if here and here[-1] >= step:
            return
        try:
            _download(remote, local.at(step), say)
            return
        except (Damaged, Missing) as problem:
            say(f"{problem}; using an earlier checkpoint")
            shutil.rmtree(local.at(step).folder, ignore_errors=True)


def _download(remote: RemoteRun, checkpoint: Checkpoint, say: Say) -> None:
    say(f"downloading the checkpoint of step {checkpoint.step}")
    checkpoint.folder.parent.mkdir(parents=True, exist_ok=True)
    remote.download_whole(checkpoint_name(checkpoint.step), checkpoint.folder)
    checkpoint.verify(checkpoint.others)


def is_uploaded(name: str, is_last: bool) -> bool:
    """Return True for a file of a run folder that is uploaded by itself: not part of a whole folder, not temporary.

    >>> [is_uploaded(name, False) for name in ("failures/a.txt", "logs/rank_0.log", "scale/a.request.json", ".lock")]
    [True, False, False, False]
    """
    parts = Path(name).parts
    if parts[0] in (CHECKPOINTS, POLICY, SCALE, "adapters", *LIVE) or parts[0].startswith("roost-fleet-"):
        return False
    if any(part.startswith(".") or part.endswith(TEMPORARY) for part in parts):
        return False
    return is_last or parts[0] not in AT_END


class Mirror:
    """Uploads a run's folder in a thread: records now and then, complete checkpoints, and the rest at the end.

    A failed upload is noted and tried again; only `finish` raises.
    """

    def __init__(self, remote: RemoteRun, folder: Path, keep: int) -> None:
        self._remote, self._run, self._keep = remote, RunFolder(folder), keep
        self._checkpoints = Checkpoints(self._run.checkpoints, keep)
        self._note: Callable[[str], None] = lambda _: None
        self._first = sys.maxsize  # step that this attempt continues from; nothing was trained yet
        self._seen: str | None = None  # the last writer when the run was fetched
        self._writer: str | None = None
        self._has_claimed = False
        self._steps: set[int] = set()  # complete checkpoints at the remote
        self._begun = 1  # attempts; one runs without `begin` if all is done already
        self._looked = 0  # the attempt for which `_steps` is known
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of uploaded files
        self._records_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken: Taken | None = None

    @property
    def url(self) -> str:
        return self._remote.url

    def fetch(
        self, resumes: bool, auto_resumes: bool, from_step: int | None, environ: Mapping[str, str], say: Say
    ) -> None:
        """Bring the local folder up to date with the remote run, if it is to be continued.

        The folder that wrote the remote run last is used as it is: it may be ahead of it. Raise FileExistsError for a
        new run of a name that is taken.
        """
        try:
            self._seen = _fetch(self._remote, self._run.path, resumes, auto_resumes, from_step, environ, say)
        except (StorageError, RunInUse, FileExistsError, FileNotFoundError, Damaged):
            raise
        except Exception as error:  # of the store; see `RemoteRun`
            if is_disk_full(error, self._run.path):
                raise disk_full(self._run.path, "the downloaded run") from error
            raise StorageError(f"{self.url} cannot be used: {one_line(error)}; {FIX}") from error

    def begin(self, first: int, note: Callable[[str], None]) -> None:
        """Start uploading: the folder is locked, and cut back to step `first`. Call it for each attempt."""
        self._first, self._note = first, note
        self._begun += 1
        link = Link.read(self._run.path)
        if link is not None and not link.is_continued:
            replace(link, is_continued=True).write(self._run.path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="roost-mirror", daemon=True)
            self._thread.start()

    def finish(self, has_failed: bool = False) -> None:
        """Upload everything that is not uploaded yet, if the run began; raise StorageError if that fails.

        After a run that failed there is only one try.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        elif has_failed:
            return  # before it began
        self._note = lambda _: None
        for attempt in range(1 if has_failed else TRIES):
            try:
                if self._taken is not None:
                    raise self._taken
                self.sync(is_last=True)
                return
            except Exception as error:  # of the store; see `RemoteRun`
                if isinstance(error, Taken) or attempt == TRIES - 1 or has_failed:
                    raise StorageError(self._upload_failed(error)) from error
                time.sleep(RETRY_S * 2**attempt)

    def _upload_failed(self, error: BaseException) -> str:
        if isinstance(error, Taken):
            return f"{error}; the files of this process are in {self._run.path}"
        return (
            f"the last state of the run is not in {self.url}: {one_line(error)}; it is in {self._run.path}: "
            "start the command again with --resume on this machine to upload it"
        )

    def _loop(self) -> None:
        failures, wait = 0, 0.0
        while not self._stopping.wait(wait):
            try:
                if self._is_due():
                    self.sync()
                    if failures:
                        self._note(f"uploads to {self.url} succeed again")
                    failures = 0
                wait = LOOK_EVERY
            except Taken as error:
                self._taken = error
                self._note(f"{error}; this one ends after its step")
                os.kill(os.getpid(), signal.SIGINT)  # as `roost stop` does
                return
            except Exception as error:  # of the store; see `RemoteRun`
                failures += 1
                wait = min(LONGEST_WAIT, 5 * LOOK_EVERY * 2 ** (failures - 1))
                self._note(f"upload to {self.url} failed: {one_line(error)}; next try in {wait:.0f} s")

    def _is_due(self) -> bool:
        has_waited = time.monotonic() - self._records_at >= RECORDS_EVERY
        return self._looked != self._begun or has_waited or bool(self._missing())

    def sync(self, is_last: bool = False) -> None:
        """Make the remote run equal to the folder."""
        self._claim()
        while (missing := self._newest_missing()) is not None:
            self._upload_records()  # of all steps up to the checkpoint, before it counts
            self._upload_checkpoint(missing)
        self._upload_records(is_last)
        if is_last:
            self._upload_policy()
        self._upload_marks(is_last)
        self._prune()

    def _claim(self) -> None:
        """Make this folder the remote's last writer; raise Taken if another became it since it was fetched."""
        there = self._remote.writer()
        last = there.get("writer", "")
        if self._writer is None:
            link = Link.read(self._run.path)
            is_own = link is not None and link.url == self.url and last in (link.writer, link.based_on)
            self._writer = link.writer if link is not None and is_own else new_writer()
        # A claim that failed may have reached the store.
        if last != self._writer and (self._has_claimed or self._seen not in (None, last)):
            raise Taken(f"{self.url} is continued by a process on {there.get('host', 'another machine')}")
        if not self._has_claimed:
            self._remote.write(WRITER, {"writer": self._writer, "host": socket.gethostname(), "process": os.getpid()})
            Link(self.url, self._writer, is_continued=True).write(self._run.path)
            self._has_claimed = True

    def _look(self) -> None:
        """Read which checkpoints the remote has; remove incomplete ones, and set aside those of other branches.

        `_looked` is set last: if anything fails, all of it is tried again.
        """
        begun = self._begun  # another attempt may begin meanwhile
        for left in self._run.checkpoints.glob(f"{UPLOADING}-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        here = {one.step: one for one in self._checkpoints.found()}
        known = set()
        for step, is_complete in self._remote.steps().items():
            if not is_complete:
                self._remote.remove_folder(checkpoint_name(step))
            elif not self._is_same(here[step]) if step in here else step > self._first:
                self._remote.set_aside(step)
            else:
                known.add(step)
        self._steps, self._looked = known, begun

    def _is_same(self, checkpoint: Checkpoint) -> bool:
        """Return False if the remote's checkpoint of this step is of another branch of the run."""
        there = self._remote.manifest(checkpoint_name(checkpoint.step))
        try:
            return there is not None and there.stamp == checkpoint.stamp()
        except FileNotFoundError:  # pruned just now
            return True

    def _newest_missing(self) -> Checkpoint | None:
        """The newest checkpoint that the remote lacks; for a new attempt, its checkpoints are read first."""
        if self._looked != self._begun:
            self._look()
        return next(reversed(self._missing()), None)

    def _missing(self) -> list[Checkpoint]:
        return [one for one in self._checkpoints.found() if one.step not in self._steps]

    def _upload_records(self, is_last: bool = False) -> None:
        marks = [file.name for file in self._run.marks]
        files: dict[str, tuple[int, int]] = {}
        for file in self._run.path.rglob("*"):
            name = file.relative_to(self._run.path).as_posix()
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if name not in marks and is_uploaded(name, is_last) and file.is_file():
                    files[name] = (file.stat().st_size, file.stat().st_mtime_ns)
        changed = [name for name, now in files.items() if self._sent.get(name) != now]
        self._remote.upload(self._run.path, changed, may_vanish=True)
        self._sent |= {name: files[name] for name in changed}
        self._records_at = time.monotonic()

    def _upload_checkpoint(self, checkpoint: Checkpoint) -> None:
        with _held(checkpoint.folder) as folder:
            if folder is not None:
                stamp = Checkpoint(folder).stamp()
                self._remote.upload_whole(folder, checkpoint_name(checkpoint.step), stamp, self._claim)
                self._steps.add(checkpoint.step)

    def _upload_policy(self) -> None:
        """Upload the policy, unless the remote has this one."""
        about = self._run.policy / ABOUT
        if about.exists():
            stamp, there = str(about.stat().st_mtime_ns), self._remote.manifest(POLICY)
            if there is None or there.stamp != stamp:
                self._remote.upload_whole(self._run.policy, POLICY, stamp, self._claim)

    def _upload_marks(self, is_last: bool) -> None:
        """Upload or remove the files that say how the run ended, after the files that they imply."""
        for file in self._run.marks:
            if file == self._run.finished_file and file.exists() and not is_last:
                continue  # it implies the policy, which is uploaded last
            now = (file.stat().st_size, file.stat().st_mtime_ns) if file.exists() else (-1, -1)
            if self._sent.get(file.name) != now:
                if file.exists():
                    self._remote.upload(self._run.path, [file.name])
                else:
                    self._remote.remove(file.name)
                self._sent[file.name] = now

    def _prune(self) -> None:
        """Remove checkpoints that the folder no longer has, unless its own rule would keep them."""
        here = {one.step for one in self._checkpoints.found()}
        there = sorted(self._steps)
        best = best_of(self._run.steps(), self._run.evaluations(), there) if there else None
        kept = kept_steps(there, self._keep, best=None if best is None else best.step)
        for step in there:
            if step not in here | kept:
                self._remote.remove_folder(checkpoint_name(step))
                self._steps.discard(step)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[Path | None]:
    """Yield hard links to the files of a checkpoint, as it may be pruned while it is uploaded; None if it is gone."""
    links = folder.with_name(f"{UPLOADING}-{folder.name}")
    shutil.rmtree(links, ignore_errors=True)
    try:
        try:
            shutil.copytree(folder, links, copy_function=os.link)
        except OSError:  # pruned just now, or a file system without links
            yield folder if Checkpoint(folder).is_complete() else None
        else:
            yield links
    finally:
        shutil.rmtree(links, ignore_errors=True)
