"""Checkpoints of a run on disk: written atomically, verified before use, pruned to the newest few."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from roost.config.train import AdvantageEstimator, TrainSettings
from roost.learner.checksums import SUMS, Damaged, check_sums, write_sums
from roost.procs.files import DiskFull, check_room, put_in_place, unfinished
from roost.trace.spans import SpanRecorder
from roost.trainer.feed import Position
from roost.trainer.guards import SkippedSteps
from roost.trainer.learners import Learners
from roost.trainer.records.run_folder import ASIDE, NAME, Record, RunFolder, number_of, write_whole

STATE = "trainer.json"
LEARNER, CRITIC, REFERENCE = "learner", "critic", "reference"
START_OVER = "train under another --name, or start this run over with --resume 0"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of a run, apart from the learner's state."""

    step: int = 0  # steps done
    version: int = 0
    position: Position = field(default_factory=Position)
    kl_coef: float | None = None  # of the KL penalty in the rewards, where it adapts


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with the states of learners and trainer. A learner's folder is renamed into place when complete."""

    folder: Path

    @property
    def learner(self) -> Path:
        return self.folder / LEARNER

    @property
    def critic(self) -> Path:
        return self.folder / CRITIC

    @property
    def reference(self) -> Path:
        return self.folder / REFERENCE

    @property
    def others(self) -> tuple[str, ...]:
        """Learners besides the policy that have a folder."""
        return tuple(name for name in (CRITIC, REFERENCE) if (self.folder / name).is_dir())

    @property
    def step(self) -> int:
        found = NAME.fullmatch(self.folder.name)
        return int(found[1]) if found else -1

    def is_complete(self, others: Sequence[str] = ()) -> bool:
        """Return True if all parts exist, including those of `others` and of the learners it was written with.

        A reference may be absent if none was written: before it follows the policy, it is the initial model.
        """
        if not ((self.folder / STATE).exists() and self.learner.is_dir()):
            return False
        required = {*(name for name in others if name != REFERENCE), *self._written_with()}
        return required <= {*self.others}

    def _written_with(self) -> tuple[str, ...]:
        try:
            found = json.loads((self.folder / STATE).read_text())
            flags = {CRITIC: found.get("has_critic"), REFERENCE: found.get("has_reference")}
        except (ValueError, AttributeError):  # damaged, as `verify` reports
            return ()
        return tuple(name for name, was_written in flags.items() if was_written is True)

    def begin(self) -> None:
        """Create the folder empty: files of an interrupted attempt could not be told from new ones."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def write_state(self, state: TrainerState, others: Sequence[str] = ()) -> None:
        """Write the trainer state. Call it last, when all files of the step are written: a run may resume from it."""
        flags = {"has_critic": CRITIC in others, "has_reference": REFERENCE in others}
        text = json.dumps({**asdict(state), **flags}).encode()
        write_sums(self.folder, {STATE: hashlib.sha256(text).hexdigest()})
        write_whole(self.folder / STATE, [text])

    def read_state(self) -> TrainerState:
        found = json.loads((self.folder / STATE).read_text())
        position = Position(found["position"]["next"], tuple(found["position"]["waiting"]))
        return TrainerState(found["step"], found["version"], position, found.get("kl_coef"))

    def stamp(self) -> str:
        """Digest of its checksums, which tells checkpoints of the same step apart."""
        sums = sorted(self.folder.rglob(SUMS))
        return hashlib.sha256(b"".join(file.read_bytes() for file in sums)).hexdigest()

    def verify(self, others: Sequence[str] = ()) -> None:
        """Read all files. Raise Damaged if they differ from what was written, Unreadable if that is unknown.

        Checkpoints of earlier versions have no checksums; for them file sizes are checked.
        """
        written = [self.folder / name for name in others if name in self.others]
        for folder in (self.folder, self.learner, *written):
            with _reading(folder):
                if not check_sums(folder) and folder != self.folder:
                    from roost.learner.checkpoint import check_whole  # torch: reports are written without it

                    check_whole(folder)
        with _reading(self.folder / STATE):
            self.read_state()


class Unreadable(OSError):
    """The file system cannot read a checkpoint now; it may still be intact."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert read errors into Damaged, and file system errors into Unreadable."""
    try:
        yield
    except Damaged:
        raise
    except FileNotFoundError as error:
        raise Damaged(f"{path} cannot be read: {error!r}") from error
    except OSError as error:
        raise Unreadable(
            f"{path} cannot be read: {error}; check the file system, or choose another checkpoint: --resume STEP"
        ) from error
    except Exception as error:  # anything that reading a damaged index raises
        raise Damaged(f"{path} cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Verified:
    """The newest intact checkpoint, and the problems of newer ones."""

    checkpoint: Checkpoint | None
    problems: tuple[Damaged, ...] = ()


def saved_beside(settings: TrainSettings) -> tuple[str, ...]:
    """Learners besides the policy whose state is in checkpoints, in the order of `Models.saved`."""
    is_saved = {
        CRITIC: settings.advantage.advantage_estimator is AdvantageEstimator.GAE,
        REFERENCE: settings.moves_reference,
    }
    return tuple(name for name, saved in is_saved.items() if saved)


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, keep: int, others: Sequence[str] = ()) -> None:
        self._folder, self._keep, self._others = folder, keep, others

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(self._folder / f"step-{step:06d}")

    def found(self) -> list[Checkpoint]:
        """Complete checkpoints, newest last."""
        return [one for one in self._every() if one.is_complete(self._others)]

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.found()), None)

    def newest_verified(self) -> Verified:
        """Verify checkpoints from the newest to the oldest, until one is intact."""
        problems: list[Damaged] = []
        for one in reversed(self.found()):
            try:
                one.verify(self._others)
            except Damaged as problem:
                problems.append(problem)
            else:
                return Verified(one, tuple(problems))
        return Verified(None, tuple(problems))

    def verified_at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step after verifying it; errors list the available steps."""
        one = self.at(step)
        if one not in self.found():
            steps = ", ".join(str(each.step) for each in self.found()) or "none"
            raise FileNotFoundError(f"{self._folder} has no complete checkpoint of step {step}; there are: {steps}")
        try:
            one.verify(self._others)
        except Damaged as problem:
            others = ", ".join(str(each.step) for each in self.found() if each != one)
            fix = f"continue from another checkpoint ({others}): --resume STEP" if others else START_OVER
            raise Damaged(f"{problem}; {fix}") from problem
        return one

    def set_aside(self, after: int) -> list[str]:
        """Rename the checkpoints after this step, which the run repeats, and return their new names."""
        renamed = []
        for one in self.found():
            if one.step > after:
                renamed.append(one.folder.rename(name_aside(one.folder)).name)
        return renamed

    def prune(self, confirmed: int | None = None, best: int | None = None) -> None:
        """Remove checkpoints beyond those to keep, and incomplete ones older than the newest complete one.

        An incomplete checkpoint newer than all others is being written. Weights are confirmed by a later optimizer step
        with finite loss and gradient: the newest checkpoint up to step `confirmed` is always kept, and so is that of
        step `best`.
        """
        whole = self.found()
        kept = kept_steps([one.step for one in whole], self._keep, confirmed, best)
        for one in self._every():
            if whole and one.step < whole[-1].step and one.step not in kept:
                shutil.rmtree(one.folder, ignore_errors=True)

    def _every(self) -> list[Checkpoint]:
        if not self._folder.is_dir():
            return []
        every = [Checkpoint(path) for path in self._folder.iterdir() if NAME.fullmatch(path.name)]
        return sorted(every, key=lambda one: one.step)


def kept_steps(whole: Sequence[int], keep: int, confirmed: int | None = None, best: int | None = None) -> set[int]:
    """Return which checkpoints to keep: the newest few, the newest one that is confirmed, and the best.

    >>> sorted(kept_steps([2, 4, 6, 8], keep=1, confirmed=7, best=2))
    [2, 6, 8]
    """
    confirmed_steps = [step for step in whole if confirmed is not None and step <= confirmed]
    return {*whole[-keep:], *confirmed_steps[-1:], *(step for step in whole if step == best)}


def name_aside(folder: Path) -> Path:
    """Return `step-000004.aside`, or `.aside-2` and so on: an earlier one may hold the only copy of its weights."""
    names = (
        folder.with_name(f"{folder.name}{ASIDE}{f'-{count}' if count > 1 else ''}") for count in itertools.count(1)
    )
    return next(name for name in names if not name.exists())


EVALUATION, TRAINING = "evaluation", "training"
HELD_OUT = "loss/held_out"  # of an evaluation in supervised training


@dataclass(frozen=True, slots=True)
class Best:
    """A step with a checkpoint and the best mean reward, or the lowest held-out loss."""

    step: int
    value: float  # the mean reward, or the loss
    by: str  # EVALUATION, TRAINING or HELD_OUT

    @property
    def figure(self) -> str:
        """The figure by which the checkpoint is the best."""
        return f"held-out loss {self.value:.3f}" if self.by == HELD_OUT else f"mean {self.by} reward {self.value:.3f}"


def best_of(steps: Sequence[Record], evaluations: Sequence[Record], among: Collection[int]) -> Best | None:
    """Return the best of the steps `among`; the latest of equal ones.

    Samples of a step come from the weights before its update, so a checkpoint is rated by the step after it.

    >>> rewards = [{"step": step, "reward/mean": reward} for step, reward in ((2, 0.5), (3, 0.9), (4, 0.7), (5, 0.8))]
    >>> best_of(rewards, [], {2, 4}), best_of(rewards, [{"step": 4, "reward/mean": 0.8}], {2, 4})
    (Best(step=2, value=0.9, by='training'), Best(step=4, value=0.8, by='evaluation'))
    """
    for by, records, later in ((EVALUATION, evaluations, 0), (TRAINING, steps, 1)):
        known = [
            (reward, one["step"] - later) for one in records if (reward := number_of(one, "reward/mean")) is not None
        ]
        found = max((pair for pair in known if pair[1] in among), default=None)
        if found is not None:
            return Best(found[1], found[0], by)
    losses = [(-loss, one["step"]) for one in evaluations if (loss := number_of(one, HELD_OUT)) is not None]
    lowest = max((pair for pair in losses if pair[1] in among), default=None)
    return None if lowest is None else Best(lowest[1], -lowest[0], HELD_OUT)


def best_checkpoint(run: RunFolder) -> Best | None:
    """Return the best checkpoint on disk."""
    saved = {one.step for one in Checkpoints(run.checkpoints, 1).found()}
    return best_of(run.steps(), run.evaluations(), saved) if saved else None


ADAPTER = "adapter"  # the folder in policy/
ABOUT = "roost.json"  # the description of the policy
OTHER_BYTES = 256 * 2**20  # room for the tokenizer and the config


class Saver:
    """Writes checkpoints of the policy and of the learners `others`; files are written in the background."""

    def __init__(
        self, run: RunFolder, settings: TrainSettings, others: Sequence[str], saved_at: int, recorder: SpanRecorder
    ) -> None:
        self._run, self._settings, self._others, self._recorder = run, settings, others, recorder
        self._checkpoints = Checkpoints(run.checkpoints, settings.checkpoint.keep_checkpoints, others)
        self._saved_at = saved_at or -1  # step of the newest checkpoint; -1: none, as step 0 is never saved
        self._checkpoint_bytes = 0  # of one checkpoint; 0: not known yet
        self._is_due = False
        self._is_writing = False

    def at(self, step: int) -> Checkpoint:
        return self._checkpoints.at(step)

    async def after_learning(
        self, learners: Sequence[Learners], state: TrainerState, skipped: SkippedSteps, note: Callable[[str], None]
    ) -> None:
        """Start a checkpoint if one is due; the learners must hold their devices.

        After the first step of a run, note if the disk has no room for a checkpoint.
        """
        if not self._checkpoint_bytes:
            self._checkpoint_bytes = sum([sum(await each.all("checkpoint_bytes")) for each in learners])
            try:
                check_room(self._run.checkpoints, self._checkpoint_bytes, "checkpoints")
            except DiskFull as full:
                note(f"{full}; free some space before the next checkpoint")
        every = self._settings.checkpoint.checkpoint_every
        self._is_due = self._is_due or bool(every and state.step % every == 0)
        # After a skipped optimizer step the weights may be broken: keep the earlier checkpoint instead.
        if self._is_due and not skipped.in_row:
            await self._save(learners, state)

    async def after_step(self, learners: Sequence[Learners], state: TrainerState, skipped: SkippedSteps) -> None:
        """Write the trainer state if this step has a checkpoint, and prune old checkpoints once it is written.

        Call it when metrics and samples of the step are on disk, because the run may then resume from it. Raise if
        writing the last checkpoint failed.
        """
        if self._saved_at == state.step:
            self._write_state(state)
        if self._is_writing and all([all(await each.all("is_saved")) for each in learners]):
            self._is_writing = False
            self._prune(skipped.confirmed)

    async def finish(
        self, learners: Sequence[Learners], state: TrainerState, skipped: SkippedSteps, note: Callable[[str], None]
    ) -> None:
        """Write the last checkpoint, and the policy of the first learner."""
        if state.step and self._saved_at != state.step:
            await self._save(learners, state)
            self._write_state(state)
        for each in learners:
            await each.all("wait_saved")
        self._prune(skipped.confirmed if skipped.in_row else None)
        if state.step:
            has_adapter, steps = self._settings.learner.adapter is not None, self._settings.step_count
            await export_policy(learners[0], self._run.policy, state, steps, has_adapter, note)

    async def _save(self, learners: Sequence[Learners], state: TrainerState) -> None:
        with self._recorder.timer("save", "work", True, step=state.step):
            check_room(self._run.checkpoints, self._checkpoint_bytes, f"the checkpoint of step {state.step}")
            checkpoint = self.at(state.step)
            checkpoint.begin()
            for each, name in zip(learners, (LEARNER, *self._others), strict=True):
                await each.all("save", str(checkpoint.folder / name))
        self._saved_at, self._is_due, self._is_writing = state.step, False, True

    def _write_state(self, state: TrainerState) -> None:
        self.at(state.step).write_state(state, self._others)

    def _prune(self, confirmed: int | None) -> None:
        best = best_checkpoint(self._run)
        self._checkpoints.prune(confirmed, best.step if best is not None else None)


async def export_policy(
    policy: Learners, folder: Path, state: TrainerState, steps: int, has_adapter: bool, note: Callable[[str], None]
) -> None:
    """Write the policy and its description, replacing an earlier one atomically.

    An adapter is also merged into the model, if the disk has room for it.
    """
    draft = unfinished(folder)
    shutil.rmtree(draft, ignore_errors=True)
    kind = "model"
    if has_adapter:
        kind = await _export_adapter(policy, draft, note)
    else:
        check_room(folder, max(await policy.all("whole_bytes")), "the policy")
        await policy.all("export", str(draft))
    about = {"kind": kind, "step": state.step, "of_steps": steps, "version": state.version}
    write_whole(draft / ABOUT, [json.dumps(about).encode()])
    put_in_place(folder)


async def _export_adapter(policy: Learners, draft: Path, note: Callable[[str], None]) -> str:
    """Write the adapter, and the merged model if there is room; return the kind of export."""
    await policy.all("export", str(draft / ADAPTER))
    try:
        check_room(draft, max(await policy.all("whole_bytes")) + OTHER_BYTES, "the merged model")
    except DiskFull as full:
        note(f"{full}; only the adapter is written")
        return ADAPTER
    await policy.all("export_whole", str(draft))
    return "merged"


def describe_policy(folder: Path) -> str:
    """Describe the contents of a policy folder; empty if not known."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        step, of_steps, kind = int(about["step"]), int(about["of_steps"]), str(about["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    what = {
        "model": "the whole model",
        "merged": f"the model with the LoRA adapter merged in; the adapter alone is in {ADAPTER}/",
        ADAPTER: f"a LoRA adapter in {ADAPTER}/, without the model",
    }.get(kind, kind)
    return f"step {step} of {of_steps}; {what}"
