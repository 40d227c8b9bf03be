"""The policy that a run leaves behind: a model that loads as it is, with the adapter beside it if one was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from roost.trainer.checkpoints import TrainerState
from roost.trainer.learners import Learners
from roost.trainer.metrics.json_lines import write_whole

ADAPTER = "adapter"  # the folder in policy/
ABOUT = "roost.json"
SPARE_BYTES = 256 * 2**20


async def export_policy(
    policy: Learners, folder: Path, state: TrainerState, steps: int, has_adapter: bool, note: Callable[[str], None]
) -> None:
    """Write the policy, and what it is. An adapter is also merged into the model, where the disk has room for that."""
    if not has_adapter:
        await policy.all("export", str(folder))
        form = "model"
    else:
        await policy.all("export", str(folder / ADAPTER))
        needed = max(await policy.all("whole_bytes"))
        free = shutil.disk_usage(folder).free
        form = "merged" if free > needed + SPARE_BYTES else ADAPTER
        if form == "merged":
            await policy.all("export_whole", str(folder))
        else:
            note(
                f"the merged model needs {needed / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} GiB free; "
                f"only the adapter is written, to {folder / ADAPTER}"
            )
    about = {"form": form, "step": state.step, "of_steps": steps, "version": state.version}
    write_whole(folder / ABOUT, [json.dumps(about).encode()])


def described(folder: Path) -> str:
    """What is in the folder of a policy, for people; nothing where that is not known."""
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
