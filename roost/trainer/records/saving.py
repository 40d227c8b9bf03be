"""Save a run: checkpoints while it trains, and the policy as a Hugging Face folder at its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from roost.config.train import TrainSettings
from roost.procs.files import DiskFull, check_room, put_in_place, unfinished
from roost.trace.spans import SpanRecorder
from roost.trainer.guards import SkippedSteps
from roost.trainer.learners import Learners
from roost.trainer.records.checkpoints import LEARNER, Checkpoint, Checkpoints, TrainerState, best_checkpoint
from roost.trainer.records.run_folder import RunFolder, write_whole

ADAPTER = "adapter"  # the folder in policy/


ABOUT = "roost.json"


BESIDE_WEIGHTS = 256 * 2**20  # bytes of the tokenizer and the config


PARTS_OF_CHECKPOINT = 3  # weights and two moments of each; a policy has the weights alone


class Saver:
    """Writes checkpoints of the policy and of `others`, learners beside it; files are written in the background."""

    def __init__(
        self, run: RunFolder, settings: TrainSettings, others: Sequence[str], saved_at: int, recorder: SpanRecorder
    ) -> None:
        self._run, self._settings, self._others, self._recorder = run, settings, others, recorder
        self._checkpoints = Checkpoints(run.checkpoints, settings.checkpoint.keep_checkpoints, others)
        self._saved_at = saved_at if saved_at else -1
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
        """Write the trainer state of a checkpoint: metrics and samples of the step are on disk, so a run may resume
        from here. Raise if writing the last checkpoint failed; once it is written, prune old ones.
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
            check_room(self._run.path, self._checkpoint_bytes // PARTS_OF_CHECKPOINT, "the policy")
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
    form = "model"
    if has_adapter:
        form = await _export_adapter(policy, draft, note)
    else:
        await policy.all("export", str(draft))
    about = {"form": form, "step": state.step, "of_steps": steps, "version": state.version}
    write_whole(draft / ABOUT, [json.dumps(about).encode()])
    put_in_place(folder)


async def _export_adapter(policy: Learners, draft: Path, note: Callable[[str], None]) -> str:
    """Write the adapter, and the merged model if there is room; return the form of the policy."""
    await policy.all("export", str(draft / ADAPTER))
    try:
        check_room(draft, max(await policy.all("whole_bytes")) + BESIDE_WEIGHTS, "the merged model")
    except DiskFull as full:
        note(f"{full}; only the adapter is written")
        return ADAPTER
    await policy.all("export_whole", str(draft))
    return "merged"


def described(folder: Path) -> str:
    """Describe the contents of a policy folder; empty if not known."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        step, of_steps, form = int(about["step"]), int(about["of_steps"]), str(about["form"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    what = {
        "model": "the whole model",
        "merged": f"the model with the LoRA adapter merged in; the adapter alone is in {ADAPTER}/",
        ADAPTER: f"a LoRA adapter in {ADAPTER}/, without the model",
    }.get(form, form)
    return f"step {step} of {of_steps}; {what}"
