"""AReaL's allocation strings.

`sglang:d4t2` is the backend of one role, `megatron:(attn:d1p12t4|ffn:d1p12e4)` one with a mixture of experts, and
`sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4` the roles of a job: + separates devices, | shares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roost.config.job import ParallelSizes

ENGINES = ("sglang", "vllm")
LEARNERS = ("fsdp", "megatron", "archon")
MAX_LENGTH = 500
_DIMENSIONS = r"(?:[a-z][1-9]\d{0,5})+"
_ONE = re.compile(rf"(?:([a-z]+))?(?:\[([A-Za-z_]\w*)\])?:({_DIMENSIONS})|({_DIMENSIONS})")
_MIXTURE = re.compile(rf"([a-z]+):(\()?attn:({_DIMENSIONS})\|ffn:({_DIMENSIONS})(\))?")
_FIX = "write backend:dimensions, such as sglang:d4t2 or megatron:d2p2t2"


class AllocationError(ValueError):
    """An allocation string that AReaL refuses, with the reason and the fix."""

    def __init__(self, what: str, why: str = "", fix: str = _FIX) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix


@dataclass(frozen=True, slots=True)
class Allocation:
    """Backend and parallel sizes of a role; its name where the string has one."""

    backend: str
    data: int
    sizes: ParallelSizes
    name: str | None = None

    @property
    def world(self) -> int:
        return self.data * self.sizes.model

    @property
    def is_engine(self) -> bool:
        return self.backend in ENGINES

    @property
    def per_process(self) -> int:
        """GPUs of a process: an engine's, or one of a learner."""
        return self.sizes.tensor * self.sizes.pipeline if self.is_engine else 1

    @property
    def processes(self) -> int:
        return self.world // self.per_process


def parse_backend(text: str) -> Allocation:
    """The allocation of one role.

    >>> parse_backend("sglang:d4t2").world, parse_backend("megatron:(attn:d1p12t4|ffn:d1p12e4)").world
    (8, 48)
    """
    if "+" in text:
        raise AllocationError("is for several roles", "a backend is that of one role", "write a backend for each role")
    groups = parse_allocations(text, needs_backend=True)
    if len(groups[0]) != 1:
        raise AllocationError("is for several roles", "a backend is that of one role", "write a backend for each role")
    return groups[0][0]


def parse_allocations(text: str, needs_backend: bool = False) -> list[list[Allocation]]:
    """Groups of allocations: those of a group share devices, the groups have their own.

    >>> [[one.world for one in group] for group in parse_allocations("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4")]
    [[2], [4, 4]]
    """
    text = re.sub(r"\s+", "", text)
    if len(text) > MAX_LENGTH:
        raise AllocationError(f"has more than {MAX_LENGTH} characters")
    groups = [[_one(part, needs_backend) for part in _shared(group)] for group in text.split("+")]
    every = [one for group in groups for one in group]
    names = [one.name for one in every if one.name is not None]
    if len(names) != len(set(names)):
        raise AllocationError("names a component twice", fix="give each component a name of its own")
    if len(groups) > 1 and len(every) > 2 and len(names) != len(every):
        raise AllocationError("has components without a name", "of three or more each has one", "write fsdp[actor]:d4")
    for group in groups:
        if any(one.name is None for one in group[1:]):
            raise AllocationError("shares devices with a component without a name", fix="write fsdp[critic]:d4")
        sizes = sorted({one.world for one in group})
        if len(sizes) > 1:
            raise AllocationError(
                "shares devices between components of unequal size", f"{' and '.join(map(str, sizes))} GPUs"
            )
    return groups


def _shared(group: str) -> list[str]:
    """The components of a group; the bar between attn and ffn does not separate two."""
    parts: list[str] = []
    for part in group.split("|"):
        if part.startswith("ffn:") and parts and "attn:" in parts[-1]:
            parts[-1] += f"|{part}"
        else:
            parts.append(part)
    return parts


def _one(text: str, needs_backend: bool) -> Allocation:
    mixture = _MIXTURE.fullmatch(text)
    if mixture is not None:
        return _mixture(mixture[1], mixture[3], mixture[4])
    match = _ONE.fullmatch(text)
    if match is None:
        raise AllocationError(f"cannot be read at {text!r}" if text else "has an empty part")
    backend, name, dimensions = match[1], match[2], match[3] or match[4]
    if backend is None and needs_backend:
        raise AllocationError("has no backend", "AReaL does not choose one any more")
    backend = backend or ("megatron" if set("pe") & set(dimensions) else "fsdp")
    if backend not in (*ENGINES, *LEARNERS):
        raise AllocationError(f"has the backend {backend!r}", f"AReaL knows {', '.join((*ENGINES, *LEARNERS))}")
    found = _dimensions(dimensions, "dtp" if backend in ENGINES else "dtpce", backend)
    sizes = ParallelSizes(found.get("t", 1), found.get("p", 1), found.get("c", 1), found.get("e", 1))
    return _checked(Allocation(backend, found.get("d", 1), sizes, name), 1)


def _mixture(backend: str, attention: str, experts: str) -> Allocation:
    """Sizes of a mixture of experts: those of attention, with the experts folded into the same processes."""
    if backend not in LEARNERS:
        raise AllocationError(f"has attn and ffn for {backend!r}", f"learners have: {', '.join(LEARNERS)}")
    outer, inner = _dimensions(attention, "cdtp", "attn"), _dimensions(experts, "detp", "ffn")
    pipeline = outer.get("p", 1)
    if inner.get("p", pipeline) != pipeline:
        raise AllocationError(
            f"has p{pipeline} for attn and p{inner['p']} for ffn", "stages hold both", "make them equal"
        )
    sizes = ParallelSizes(outer.get("t", 1), pipeline, outer.get("c", 1), inner.get("e", 1))
    allocation = Allocation(backend, outer.get("d", 1), sizes)
    parts = inner.get("e", 1) * inner.get("t", 1) * pipeline
    whole = parts * inner["d"] if "d" in inner else allocation.world
    if whole != allocation.world or allocation.world % parts:
        raise AllocationError(
            f"takes {allocation.world} GPUs for attn, which {parts * inner.get('d', 1)} for ffn do not fill",
            fix="choose sizes with the same product",
        )
    return _checked(allocation, inner.get("t", 1))


def _dimensions(text: str, known: str, owner: str) -> dict[str, int]:
    found = {letter: int(number) for letter, number in re.findall(r"([a-z])(\d+)", text)}
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise AllocationError(f"has the dimension {unknown[0]!r}", f"{owner} has {', '.join(known)}")
    return found


def _checked(allocation: Allocation, expert_tensor: int) -> Allocation:
    sizes = allocation.sizes
    if allocation.backend == "fsdp" and (sizes.pipeline > 1 or sizes.expert > 1):
        raise AllocationError(
            "has p or e", "fsdp has data, tensor and context parallelism only", "use megatron or archon"
        )
    parts = sizes.pipeline * expert_tensor * sizes.expert
    if sizes.expert > 1 and allocation.world % parts:
        raise AllocationError(f"cuts experts over {parts} GPUs, which do not divide {allocation.world}")
    return allocation
