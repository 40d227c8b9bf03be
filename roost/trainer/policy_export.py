"""Export the policy of a run as a Hugging Face folder, with the adapter in it if one was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from roost.procs.files import DiskFull, check_room, put_in_place, unfinished
from roost.trainer.checkpoints import TrainerState
from roost.trainer.learners import Learners
from roost.trainer.metrics.json_lines import write_whole

ADAPTER = "adapter"  # the folder in policy/


ABOUT = "roost.json"


BESIDE_WEIGHTS = 256 * 2**20  # bytes of the tokenizer and the config


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
