"""Checks of what verl or its Hydra refuses: keys of Megatron, batch sizes, asynchronous training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from roost.config.findings import Findings, Where, counted, did_you_mean, remainder, shown
from roost.config.frameworks.arguments import Arguments
from roost.config.job import ParallelSizes, first_number, known_count
from roost.config.source import Section

if TYPE_CHECKING:
    from roost.config.shell.state import Value

ENGINES = ("vllm", "sglang", "trtllm", "hf")
TRAIN_BATCH = 1024  # defaults of verl's own configs
MINI_BATCH = 256
SYNC_STEP = 4
MINI, MICRO = "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"
MICRO_OF_ALL = "ppo_micro_batch_size"  # over all GPUs
# Keys with a value in all of verl's configs; the trainer itself reads the first ones, and the others have defaults.
_READ_BY_TRAINER = ("trainer.nnodes", "trainer.n_gpus_per_node", "data.train_batch_size")
_ALWAYS = (
    *_READ_BY_TRAINER,
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    *(f"actor_rollout_ref.rollout.{key}" for key in ("n", "tensor_model_parallel_size", "gpu_memory_utilization")),
)
_SIGNED = re.compile(rf"([+~])({'|'.join(map(re.escape, _ALWAYS))})(?:=|$)")
_MESHES = ("fsdp", "fsdp2", "megatron")  # backends with GPUs / model-parallel size replicas


def check_megatron_keys(arguments: Arguments, findings: Findings) -> None:
    """Report keys of Megatron in a config of another backend, which Hydra refuses even with strategy=megatron."""
    values, models = arguments.values, (("actor_rollout_ref", "actor"), ("actor_rollout_ref", "ref"), ("critic",))
    has_groups = any("@" in str(key) for key in values)  # of Hydra, which choose backends model by model
    if arguments.unknown or has_groups or values.get("model_engine") not in (None, "dp"):
        return
    for model in models:
        written = next((path for path in arguments.positions if path[: len(model) + 1] == (*model, "megatron")), None)
        if written is not None:
            findings.error(
                "RST-N068",
                Where(*arguments.positions[written], written),
                "is a key of Megatron, and the job has verl's config of FSDP",
                "verl's Hydra ends with: Key 'megatron' is not in struct",
                "write model_engine=megatron, or --config-name with verl's config of Megatron for the program",
            )
            return


def check_signs(words: Sequence[Value], findings: Findings) -> None:
    """Report keys of verl's configs that are added with `+` or removed with `~`: Hydra or verl ends with an error."""
    removed: dict[str, Value] = {}
    for word in words:
        match = _SIGNED.match(word.prefix)
        if match is None:
            continue
        sign, name = match.groups()
        if sign == "~":
            removed[name] = word
        elif removed.pop(name, None) is None:
            findings.error(
                "RST-N068",
                Where(*word.position, (*name.split("."),)),
                "is added with +, and verl's config has it",
                f"Hydra ends with: Could not append to config. An item is already at '{name}'",
                f"write {name}=... without the +",
            )
    for name, word in removed.items():
        if name in _READ_BY_TRAINER:
            findings.error(
                "RST-N068",
                Where(*word.position, (*name.split("."),)),
                "is removed with ~, and verl reads it",
                f"the program ends with: Key '{name.rpartition('.')[2]}' is not in struct",
                f"write {name}=..., or nothing for verl's default",
            )


def check_learner(root: Section, gpus: int, strategy: str, sizes: ParallelSizes, is_own: bool) -> None:
    """Check FSDP group sizes, and batch sizes if `is_own`: projects built on verl may have other trainers."""
    groups = {"reference": _part(root, "ref"), "critic": root.below("critic"), "learner": _part(root, "actor")}
    for what, part in groups.items():
        for section in (part.below("fsdp_config"), part.below("fsdp"), part.below("model", "fsdp_config")):
            size = first_number((section, "fsdp_size")) or -1
            if 0 < size < gpus and gpus % size:
                is_sure = what == "learner"  # a job may have no reference and no critic
                report = root.findings.error if is_sure else root.findings.warn
                report(
                    "RST-N056",
                    section.where("fsdp_size"),
                    f"is {int(size)}, which does not divide the {gpus} GPUs of the {what}",
                    f"{remainder(gpus, int(size))}; verl's mesh has whole groups, and no place for the others",
                    f"write a size that divides {gpus}, or -1 for all of them",
                )
    if is_own:
        _check_both_micro_batches(_part(root, "actor"))
    if is_own and gpus and gpus % sizes.model == 0:
        check_batch(root, gpus, strategy, sizes)
        _check_minibatch(root, gpus, strategy, sizes)


def check_batch(root: Section, gpus: int, strategy: str, sizes: ParallelSizes) -> None:
    """Check that samples of a step divide evenly among learner processes, unless batches are dynamic."""
    data, actor, rollout = root.below("data"), _part(root, "actor"), _part(root, "rollout")
    written = [section.values.get(key) for section, key in ((data, "train_batch_size"), (rollout, "n"))]
    if actor.flag("use_dynamic_bsz") or written == [None, None]:
        return
    batch, samples = known_count(data, "train_batch_size", TRAIN_BATCH), known_count(rollout, "n", 1)
    parts = gpus
    if strategy == "megatron":
        parts = gpus // sizes.model * known_count(actor, MICRO, 1)
    if parts and batch * samples % parts:
        root.findings.error(
            "RST-N088",
            data.where("train_batch_size") if written[0] is not None else rollout.where("n"),
            f"makes {batch} * {counted(samples, 'sample')} a step, which verl cannot divide by {parts}",
            f"{remainder(batch * samples, parts)}; verl asserts it where use_dynamic_bsz is false",
            f"write a multiple of {parts}, or actor_rollout_ref.actor.use_dynamic_bsz=true",
        )


def check_engine(rollout: Section) -> None:
    """Warn of an engine that verl does not have; a job may register one of its own."""
    name = rollout.text("name")
    if name is not None and name not in ENGINES:
        rollout.findings.warn(
            "RST-N068",
            rollout.where("name"),
            f"is {shown(name)}, which is not an engine of verl",
            did_you_mean(name, ENGINES) or "verl ends, unless the job registers an engine of this name",
            f"write one of {', '.join(ENGINES)}",
        )


def check_engine_parts(size: int, per_node: int, where: Where, root: Section) -> None:
    """Check that an engine over several nodes takes equal parts of them; verl asserts it."""
    on_node = min(per_node, size)
    if size % on_node:
        root.findings.error(
            "RST-N056",
            where,
            f"is {per_node}, of which an engine of {size} GPUs cannot take equal parts",
            f"{size} % {on_node} = {size % on_node}",
            f"use engines whose size is a multiple of {per_node}, or divides it",
        )


def _check_minibatch(root: Section, gpus: int, strategy: str, sizes: ParallelSizes) -> None:
    """Check that a minibatch divides evenly among replicas, and is no larger than the batch."""
    data, actor, samples = root.below("data"), _part(root, "actor"), known_count(_part(root, "rollout"), "n", 1)
    is_written, key = actor.values.get(MINI) is not None, f"actor_rollout_ref.actor.{MINI}"
    mini, batch = known_count(actor, MINI, MINI_BATCH), known_count(data, "train_batch_size")
    replicas = gpus // sizes.model
    if is_written and strategy in _MESHES and root.below("trainer").flag("use_v1", True) and mini * samples % replicas:
        root.findings.warn(  # older versions drop the remainder
            "RST-N088",
            actor.where(MINI),
            f"makes {mini} * {counted(samples, 'sample')} a minibatch, which verl cannot divide by {replicas}",
            f"{remainder(mini * samples, replicas)}; {gpus} GPUs / {sizes.model} for each replica = {replicas}",
            f"write a multiple of {replicas // gcd(samples, replicas)}",
        )
    if actor.flag("use_dynamic_bsz") or not (is_written or batch):
        return
    if mini and 0 < batch < mini:
        report = root.findings.error if is_written else root.findings.warn
        default = "" if is_written else f"verl takes {MINI_BATCH} where {MINI} is not written; "
        report(
            "RST-N088",
            data.where("train_batch_size"),
            f"is {counted(batch, 'prompt')}, and a minibatch has {mini}",
            f"{default}verl ends with a ValueError where use_dynamic_bsz is false",
            f"write {key}={batch} or less",
        )
    micro, share = known_count(actor, MICRO), mini * samples // max(1, replicas)
    if micro and strategy in _MESHES and share % micro:
        root.findings.warn(  # no error: a trainer of one's own may pad
            "RST-N088",
            actor.where(MICRO),
            f"is {micro}, which does not divide a replica's {counted(share, 'sample')} of a minibatch",
            f"{remainder(share, micro)}; {mini} * {samples} / {replicas} replicas = {share}; verl's workers assert it",
            f"write a divisor of {share}",
        )
    if all(actor.values.get(name) is None for name in (MICRO, MICRO_OF_ALL)):
        root.findings.warn(  # no error: arguments that are not known may have it
            "RST-N088",
            actor.where(MICRO),
            "is missing, and use_dynamic_bsz is false",
            "verl has no default for the samples of a pass, and ends with an error",
            "write it, with log_prob_micro_batch_size_per_gpu of rollout and ref, or "
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
        )


def _check_both_micro_batches(actor: Section) -> None:
    """Check that a micro-batch is written for each GPU or for all, not both."""
    if actor.flag("use_dynamic_bsz") or None in (actor.values.get(MICRO), actor.values.get(MICRO_OF_ALL)):
        return
    actor.error(
        "RST-N088",
        MICRO_OF_ALL,
        f"is written beside {MICRO}",
        "verl ends with a ValueError where both are set and use_dynamic_bsz is false",
        f"remove it, and keep {MICRO}",
    )


def check_separate_async(root: Section, has_own_reward_pool: bool) -> None:
    """Check the batch, the weight route and the reward model of separate_async."""
    data, rollout = root.below("data"), _part(root, "rollout")
    batch = first_number((data, "train_batch_size"))
    every = int(first_number((root.below("trainer", "v1", "separate_async"), "parameter_sync_step")) or SYNC_STEP)
    mini = int(first_number((_part(root, "actor"), "ppo_mini_batch_size")) or MINI_BATCH)
    if batch is not None and batch != every * mini:
        root.findings.error(
            "RST-N068",
            data.where("train_batch_size"),
            f"is {int(batch)}, which separate_async asserts to be parameter_sync_step * ppo_mini_batch_size",
            f"{every} * {mini} = {every * mini}",
            f"write {every * mini}, or other numbers of these",
        )
    engine = rollout.below("checkpoint_engine")
    if engine.get("backend") == "naive":
        root.findings.error(
            "RST-N068",
            engine.where("backend"),
            "is naive, which sends weights only to engines on the learner's GPUs",
            "separate_async has engines on nodes of their own",
            "write actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        )
    reward = root.below("reward", "reward_model")
    if reward.flag("enable") and not has_own_reward_pool:
        root.findings.error(
            "RST-N068",
            reward.where("enable"),
            "puts a reward model on the trainer's GPUs, which separate_async refuses",
            "it generates while it learns",
            "write reward.reward_model.enable_resource_pool=true, with its nnodes and n_gpus_per_node",
        )


def _part(root: Section, name: str) -> Section:
    return root.below("actor_rollout_ref", name)
