"""ml-loop's rule: may learners and servers stay in memory together, and with which share each?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roost.placement.memory import RESERVED_FRACTION


class MemoryRefused(ValueError):
    """Figures that contradict each other or the mode, with the numbers and the fix."""

    def __init__(self, what: str, why: str, fix: str, key: str = "inference_requires_memory_gb") -> None:
        super().__init__(what)
        self.what, self.why, self.fix, self.key = what, why, fix, key


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether both sides are kept, and the share of the device that each may take; None is no limit."""

    keeps_both: bool
    inference_fraction: float | None = None
    learning_fraction: float | None = None


def share_device(
    overlap: bool,
    inference_gb: float | None,
    learning_gb: float | None,
    total_gb: float,
    is_async: bool,
    cap: float | None,
) -> Sharing:
    """Keep both where they are apart or fit into 95 % of the device; otherwise they take turns.

    Together they get the whole 95 %, in proportion to what each asks for; `cap` bounds the servers' share.

    >>> share_device(True, 20, 40, 79.15, is_async=False, cap=None)
    Sharing(keeps_both=True, inference_fraction=0.316..., learning_fraction=0.633...)
    """
    if (inference_gb is None) != (learning_gb is None):
        raise MemoryRefused(
            "give both memory figures or neither",
            f"only {'learning' if inference_gb is None else 'inference'}_requires_memory_gb is written",
            "write both, or leave both out",
        )
    if not overlap:
        return Sharing(keeps_both=True)
    if inference_gb is None or learning_gb is None:
        if is_async:
            raise MemoryRefused(
                "overlapping GPUs with asynchronous rollouts need both memory figures",
                "servers and learners would run at the same time on the same GPUs",
                "write inference_requires_memory_gb and learning_requires_memory_gb, or use separate GPUs",
                "async_rollouts",
            )
        return Sharing(keeps_both=False)
    wanted = inference_gb + learning_gb
    if cap is not None and cap * total_gb < inference_gb:
        raise MemoryRefused(
            "the cap leaves less than inference requires",
            f"{cap} * {total_gb:g} GB = {cap * total_gb:.1f} GB, inference requires {inference_gb:g} GB",
            f"raise max_gpu_mem_utilization to {math.ceil(inference_gb / total_gb * 100) / 100:g}",
            "max_gpu_mem_utilization",
        )
    if wanted / total_gb > RESERVED_FRACTION:
        if is_async:
            raise MemoryRefused(
                "not enough memory for both at once, so rollouts cannot be asynchronous",
                f"{inference_gb:g} + {learning_gb:g} GB are {wanted / total_gb:.0%} of {total_gb:g} GB, "
                f"more than {RESERVED_FRACTION:.0%}",
                "write async_rollouts: false, or use separate GPUs",
            )
        return Sharing(keeps_both=False, inference_fraction=cap)
    if wanted == 0:
        return Sharing(keeps_both=True, inference_fraction=cap)
    inference = inference_gb / wanted * RESERVED_FRACTION
    return Sharing(True, inference if cap is None else min(cap, inference), learning_gb / wanted * RESERVED_FRACTION)
