"""Sharing of a device by engines and learners, from ml-loop's memory figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roost.placement.memory.model import RESERVED_FRACTION


class MemoryRefused(ValueError):
    """Memory figures that contradict each other or the mode."""

    def __init__(self, code: str, what: str, why: str, fix: str, key: str = "inference_requires_memory_gb") -> None:
        super().__init__(what)
        self.code, self.what, self.why, self.fix, self.key = code, what, why, fix, key


@dataclass(frozen=True, slots=True)
class Sharing:
    """Keep both engines and learners or not, and the fraction of the device each may use; None: no limit."""

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
    """Keep both if they are on separate devices or fit into 95 % of one; otherwise they time-share the devices.

    Together they get the whole 95 %, in proportion to their requirements; `cap` bounds the servers' fraction.

    >>> share_device(True, 20, 40, 79.15, is_async=False, cap=None)
    Sharing(keeps_both=True, inference_fraction=0.316..., learning_fraction=0.633...)
    """
    if (inference_gb is None) != (learning_gb is None):
        raise MemoryRefused(
            "RST-M007",
            "give both memory figures or neither",
            f"only {'learning' if inference_gb is None else 'inference'}_requires_memory_gb is written",
            "write both, or leave both out",
        )
    if not overlap:
        return Sharing(keeps_both=True)
    if inference_gb is None or learning_gb is None:
        if is_async:
            raise MemoryRefused(
                "RST-M008",
                "overlapping GPUs with asynchronous rollouts need both memory figures",
                "servers and learners would run at the same time on the same GPUs",
                "write inference_requires_memory_gb and learning_requires_memory_gb, or use separate GPUs",
                "async_rollouts",
            )
        return Sharing(keeps_both=False)
    wanted = inference_gb + learning_gb
    if cap is not None and cap * total_gb < inference_gb:
        raise MemoryRefused(
            "RST-M010",
            "the cap leaves less than inference requires",
            f"{cap} * {total_gb:g} GB = {cap * total_gb:.1f} GB, inference requires {inference_gb:g} GB",
            f"raise max_gpu_mem_utilization to {math.ceil(inference_gb / total_gb * 100) / 100:g}",
            "max_gpu_mem_utilization",
        )
    if wanted / total_gb > RESERVED_FRACTION:
        if is_async:
            raise MemoryRefused(
                "RST-M009",
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
