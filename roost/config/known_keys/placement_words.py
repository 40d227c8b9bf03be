"""What a framework's key means by its name, for keys that its reader does not know: nodes, GPUs, parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

from roost.config.job import Notation
from roost.config.known_keys.tables import expand

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_NAMES = (
    "rollout|vllm|sglang|actor|ref|reference|critic|reward|rm|inference|infer|train|trainer|training|engine|generator"
    "|generation|gen|model|policy|learner|teacher|student|server"
)
_ROLES = frozenset(_NAMES.split("|"))
_OF = rf"(?:(?:{_NAMES})\s)*"
_COUNT = r"(?:(?:num|n|number of|total)\s)"
_KINDS = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "data": "dp"}
_PARALLEL = {
    kind: re.compile(rf"{_OF}{_COUNT}?(?:{short}|{kind} (?:model )?parallel(?:ism)?)(?: size| degree)?")
    for kind, short in _KINDS.items()
}
_OTHERS = {
    "tensor": re.compile(rf"{_OF}{_COUNT}?n?gpus? per (?:engine|server|replica)s?"),
    "GPUs per node": re.compile(rf"{_OF}{_COUNT}?n?gpus? per (?:node|machine)s?|n ?proc per node"),
    "GPUs": re.compile(rf"{_OF}(?:{_COUNT}?n?gpus|{_COUNT}gpu|world size)"),
    "nodes": re.compile(rf"{_OF}(?:{_COUNT}?n?nodes|{_COUNT}node)"),
    "engines": re.compile(rf"{_OF}{_COUNT}{_OF}(?:engines|replicas)"),
    "colocation": re.compile(r".*\b(?:colocated?|collocated?|colocation)\b.*"),
}
_GENERAL = ("enable", "enabled", "size", "num", "count")  # names that mean something in their section only
# Sections that a framework passes on to another program, or that are about something else.
_ELSEWHERE = re.compile(r"kwargs|overrid|extra|env|ray|slurm|launcher|logg|profil|checkpoint|data|wandb|broadcast")
# Keys that frameworks read, but a plan does not need.
_READ: Mapping[Notation, Sequence[str]] = {
    notation: tuple(pattern for one in text.split() for pattern in expand(one))
    for notation, text in {
        Notation.VERL: """{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{veomni,torchtitan,automodel}.*
            {actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.mindspeed.* reward_model.megatron.* trainer.v1.*""",
        Notation.SLIME: "critic_num_{nodes,gpus_per_node} sglang_ep",
        Notation.MILES: "critic_num_{nodes,gpus_per_node} sglang_ep",
        Notation.NEMO: "teacher.generation.* policy.generation.{mcore_generation_config,dynamo_cfg,sglang_cfg}.*",
        Notation.AREAL: "sglang.* vllm.* *.megatron.* n_nodes n_gpus_per_node",
        Notation.SKYRL: "trainer.placement.{reward_num_nodes,reward_num_gpus_per_node,colocate_critic_reward}",
        Notation.PRIME: "{trainer.model,model}.tp inference.{parallel,model,vllm}.{pp,pipeline_parallel_size}",
        Notation.TRL: "tp_size",
    }.items()
}
# Meanings of keys whose names do not show them.
_MEANT: Mapping[Notation, Mapping[str, Collection[str]]] = {
    Notation.AREAL: {"backend": tuple(_KINDS)},
    Notation.TRL: {"num_processes": ("GPUs", "data"), "num_machines": ("nodes",)},
}


def words_of(name: str) -> list[str]:
    """The words of a name, however they are separated.

    >>> words_of("--rollout-numGPUs_per.node")
    ['rollout', 'num', 'gpus', 'per', 'node']
    """
    return [word.lower() for word in _WORD.findall(name.replace("GPUs", "Gpus"))]


def meaning(key: str) -> str:
    """Meaning of a key by its name: nodes, GPUs, a parallel size; empty if it is not about placement.

    >>> meaning("trainer.num_nodes"), meaning("--vllm.tp"), meaning("trainer.max_tokens_per_gpu")
    ('nodes', 'tensor', '')
    """
    parts = key.split(".")
    name = " ".join(words_of(".".join(parts[-2:]) if parts[-1] in _GENERAL else parts[-1]))
    found = (kind for patterns in (_PARALLEL, _OTHERS) for kind, one in patterns.items() if one.fullmatch(name))
    return next(found, "")


def is_read(key: str, notation: Notation) -> bool:
    """Return True for keys that the framework, or a program that it passes them to, may read."""
    section = key.lstrip("-").rpartition(".")[0]
    plain = key.lstrip("-").replace("-", "_")
    known = any(fnmatchcase(plain, pattern) for pattern in _READ.get(notation, ()))
    return known or _ELSEWHERE.search(section) is not None or any(sign in key for sign in "@/")


def nearest(key: str, placing: Sequence[str], notation: Notation) -> str:
    """The placing key with the same meaning in the nearest section; empty if there is none."""
    wanted, parts, roles = meaning(key), key.lstrip("-").split("."), _ROLES & set(words_of(key))

    def nearness(other: str) -> tuple[bool, int, int]:
        pairs = zip(parts, other.lstrip("-").split("."), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return key.startswith("-") == other.startswith("-"), shared, len(roles & set(words_of(other)))

    alike = [other for other in placing if wanted in _meanings(other, notation)]
    return max(alike, key=nearness, default="")  # the first of equally near ones


def _meanings(key: str, notation: Notation) -> Iterator[str]:
    if any(sign in key for sign in "*?["):
        return
    yield (own := meaning(key))
    if own == "GPUs per node":
        yield "GPUs"
    yield from _MEANT.get(notation, {}).get(key.lstrip("-").rpartition(".")[2], ())
