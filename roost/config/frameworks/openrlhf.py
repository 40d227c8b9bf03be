"""OpenRLHF: flags of `openrlhf.cli.train_ppo_ray`, with dots (since 2026-04-19) or underscores only (before).

Each role has nodes x GPUs of its own, unless a flag makes roles share them: a group of single GPUs, which Ray packs.
Engines come after the actor, or share its GPUs. Nothing says how many GPUs a machine has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, Where, counted, shown
from roost.config.frameworks.arguments import Arguments, read_flags
from roost.config.frameworks.pools import USUAL_WIDTH, Reader, check_divides
from roost.config.frameworks.registry import Framework
from roost.config.job import (
    OFFLOADED_PARTS,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Role,
    Sharding,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
)
from roost.config.notations.algorithm import AGENT, MEAN_ALONE, REWARD, WHITEN, algorithm_of, completion_of
from roost.config.shell.state import Value
from roost.config.source import Section

VERSION = "OpenRLHF of 2026-08-13 (3c3be623)"
ROLES = ("actor", "ref", "critic", "reward")
DEFAULTS: Mapping[str, Any] = {
    **{f"--{role}.num_nodes": 1 for role in ROLES},
    **{f"--{role}.num_gpus_per_node": 8 for role in ROLES},
    "--vllm.num_engines": 0,
    "--vllm.tensor_parallel_size": 1,
    "--vllm.gpu_memory_utilization": 0.95,
    "--algo.kl.init_coef": 0.01,
    "--algo.advantage.estimator": "gae",
    "--ds.ring_attn_size": 1,
    "--ds.tensor_parallel_size": 1,
    "--ds.zero_stage": 2,
    "--data.max_len": 2048,
    "--train.max_tokens_per_gpu": 16192,
    "--train.async_queue_size": 1,
}
MICRO_BATCH = {False: 1, True: 4}  # default sequences, by whether flags are those without dots

_SWITCHES = {
    "--train.colocate_all": "--colocate_all_models",
    "--train.colocate_actor_ref": "--colocate_actor_ref",
    "--train.colocate_critic_reward": "--colocate_critic_reward",
    "--train.async_enable": "--async_train",
    "--train.dynamic_batch_enable": "--use_dynamic_batch",
    "--vllm.enable_sleep": "--vllm_enable_sleep",
    "--ds.enable_sleep": "--deepspeed_enable_sleep",
    "--ds.adam_offload": "--adam_offload",
    "--actor.gradient_checkpointing_enable": "--gradient_checkpointing",
    "--algo.kl.use_loss": "--use_kl_loss",
    "--algo.advantage.no_std_norm": "--no_advantage_std_norm",
}
# The names of flags before 2026-04-19, without dots.
FLAT: Mapping[str, str] = {
    **{f"--{role}.{key}": f"--{role}_{key}" for role in ROLES for key in ("num_nodes", "num_gpus_per_node")},
    **{f"--vllm.{key}": f"--vllm_{key}" for key in ("num_engines", "tensor_parallel_size", "gpu_memory_utilization")},
    **_SWITCHES,
    "--algo.kl.init_coef": "--init_kl_coef",
    "--algo.advantage.estimator": "--advantage_estimator",
    "--reward.remote_url": "--remote_rm_url",
    "--train.agent_func_path": "--agent_func_path",
    "--train.max_tokens_per_gpu": "--train_max_tokens_per_gpu",
    "--train.async_queue_size": "--async_queue_size",
    "--train.micro_batch_size": "--micro_train_batch_size",
    "--ds.ring_attn_size": "--ring_attn_size",
    "--ds.tensor_parallel_size": "--ds_tensor_parallel_size",
    "--ds.zero_stage": "--zero_stage",
    "--ds.lora.rank": "--lora_rank",
    "--data.max_len": "--max_len",
    "--actor.model_name_or_path": "--pretrain",
    "--critic.model_name_or_path": "--critic_pretrain",
    "--reward.model_name_or_path": "--reward_pretrain",
}
SWITCHES = frozenset((*_SWITCHES, *_SWITCHES.values()))
OPTIMIZERS = tuple(f"--{role}.optim" for role in ("actor", "critic"))  # adam or muon; none before flags had dots
NEW_TOKENS = "--rollout.max_new_tokens"
PLACING = (*FLAT, *FLAT.values(), *OPTIMIZERS, NEW_TOKENS, "--prompt_max_len", "--generate_max_len")
WHITENED = ("gae", "reinforce", "reinforce_baseline")  # estimators whose advantages are whitened
NAMES = {"ref": "reference", "reward": "reward model"}


def read_arguments(words: Sequence[Value]) -> Arguments:
    return read_flags(words, SWITCHES)


def read_openrlhf(root: Section, notation: Notation) -> Job:
    """Read the flags of an OpenRLHF job."""
    return _OpenRLHF(root, notation).job()


FRAMEWORK = Framework(read_openrlhf, PLACING, read_arguments)


@dataclass(frozen=True, slots=True)
class _Count:
    """GPUs of a role."""

    nodes: int
    per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node


@dataclass(slots=True)
class _OpenRLHF(Reader):
    used: int = 0  # GPUs up to the last one taken
    gaps: list[range] = field(default_factory=list)  # free GPUs before it
    width: int = USUAL_WIDTH  # GPUs of a machine

    def job(self) -> Job:
        self._check_version()
        self._check_optimizers()
        started = self._started()
        counts = {role: self._count(role, int(started[role])) for role in ROLES}
        self.width = self._width([counts[role] for role in ROLES if started[role]], USUAL_WIDTH)
        self._learners(counts, started)
        self._report_unused(counts, started)
        width = self._width([counts[role] for role in ROLES if started[role]], self.used)
        machines = max(1, -(-self.used // width))
        self._report_machines(machines, width, [counts[role] for role in ROLES if started[role]])
        settings: dict[str, object] = {"engines_sleep": self._engines_sleep()}
        if self._flag("--train.async_enable"):
            ahead = self._number("--train.async_queue_size", 1)  # batches that wait for the learner
            settings |= {"async_rollouts": True, "async_generation_ratio": ahead}
        job = self.as_job(machines, width, settings | self._algorithm())
        return replace(job, assumes_machines=True)  # Ray is asked for single GPUs

    # --- flags

    @property
    def _is_flat(self) -> bool:
        values = self.root.values
        return any(key in values for key in FLAT.values()) and not any(key in values for key in FLAT)

    def _key(self, flag: str) -> str:
        """The flag as it is written: with dots, or its older name."""
        is_old = FLAT[flag] in self.root.values or (self._is_flat and flag not in self.root.values)
        return FLAT[flag] if is_old else flag

    def _number(self, flag: str, minimum: int, maximum: int | None = None) -> int:
        key = self._key(flag)
        return self.root.whole_number(key, minimum, DEFAULTS[flag], maximum) or minimum

    def _flag(self, flag: str) -> bool:
        return self.root.flag(self._key(flag))

    def _where(self, flag: str) -> Where:
        return self.root.where(self._key(flag))

    def _text(self, flag: str) -> str | None:
        return first_text((self.root, self._key(flag)))

    def _is_given(self, flag: str) -> bool:
        return self.root.values.get(self._key(flag)) not in (None, False)

    def _check_version(self) -> None:
        """Report a mix of flags with dots and older ones, which no version takes."""
        dotted = [key for key in FLAT if key in self.root.values]
        flat = [key for key in FLAT.values() if key in self.root.values]
        if dotted and flat:
            self.root.error(
                "RST-N069",
                flat[0],
                f"is a flag of OpenRLHF before 2026-04-19, and {dotted[0]} one since then",
                "no version takes both, and ends with unrecognized arguments",
                f"write {next(new for new, old in FLAT.items() if old == flat[0])}",
            )

    def _is_muon(self, role: str) -> bool:
        return self.root.values.get(f"--{role}.optim") == "muon"

    def _check_optimizers(self) -> None:
        for flag in OPTIMIZERS:
            word = self.root.text(flag)
            if word not in (None, "adam", "muon"):
                self.root.error("RST-N068", flag, f"is {shown(word)}; it is adam or muon", fix="write one of the two")
        learners = [role for role in ("actor", "critic") if self._started()[role]]
        if self._flag("--ds.adam_offload") and all(self._is_muon(role) for role in learners):
            self._has_no_effect("--ds.adam_offload", "Muon keeps its state on the GPU", "remove it")

    def _estimator(self) -> str:
        return self.root.text(self._key("--algo.advantage.estimator")) or str(DEFAULTS["--algo.advantage.estimator"])

    def _penalty(self) -> float:
        penalty = self.root.number(self._key("--algo.kl.init_coef"))
        return float(DEFAULTS["--algo.kl.init_coef"]) if penalty is None else penalty

    def _algorithm(self) -> dict[str, object]:
        is_loss, penalty = self._flag("--algo.kl.use_loss"), self._penalty() or None  # no reference for 0
        in_loss, in_reward = (penalty, None) if is_loss else (None, penalty)
        prompt, response, sequence = self._lengths()
        found = algorithm_of(self.notation, self._estimator(), in_loss, in_reward, prompt)
        found |= completion_of(prompt, response, sequence)
        if self._flag("--algo.advantage.no_std_norm"):
            if self._estimator() in WHITENED:
                found[WHITEN] = MEAN_ALONE
            else:
                why = f"advantages of {self._estimator()} are not whitened"
                self._has_no_effect("--algo.advantage.no_std_norm", why, "remove it")
        functions = {REWARD: "--reward.remote_url", AGENT: "--train.agent_func_path"}
        return found | {name: text for name, flag in functions.items() if (text := self._text(flag))}

    def _lengths(self) -> tuple[float | None, float | None, int]:
        """Maximum tokens of a prompt, a completion and both; None if not written."""
        flags = ("--prompt_max_len", NEW_TOKENS, "--generate_max_len")
        prompt, new, generated = (first_number((self.root, flag)) for flag in flags)
        sequence = self._number("--data.max_len", 1)
        if prompt and generated and not self._is_given("--data.max_len"):
            sequence = int(prompt + generated)
        if prompt is None and new and new < sequence:
            prompt = sequence - new
        return prompt, new or generated, sequence

    # --- roles

    def _count(self, role: str, minimum: int) -> _Count:
        return _Count(
            self._number(f"--{role}.num_nodes", minimum, MAX_NODES),
            self._number(f"--{role}.num_gpus_per_node", minimum, MAX_ACCELERATORS_PER_NODE),
        )

    def _started(self) -> dict[str, bool]:
        """The roles that the job starts."""
        is_remote = self._is_given("--reward.remote_url") or self._is_given("--train.agent_func_path")
        return {
            "actor": True,
            "ref": self._penalty() > 0,
            "critic": self._estimator() == "gae",
            "reward": not is_remote,
        }

    def _report_unused(self, counts: Mapping[str, _Count], started: Mapping[str, bool]) -> None:
        reasons = {
            "ref": (f"{self._key('--algo.kl.init_coef')} is 0", "remove it, or write a coefficient above 0"),
            "critic": (f"{self._key('--algo.advantage.estimator')} is not gae", "remove it, or use gae"),
            "reward": ("rewards come from a URL, a file or an agent", "remove it"),
        }
        for role, (why, fix) in reasons.items():
            flag = f"--{role}.num_gpus_per_node"
            if not started[role] and self._is_given(flag) and counts[role].gpus:
                what = f"gives GPUs to the {NAMES.get(role, role)}, which is never started"
                self.root.findings.note("RST-N067", self._where(flag), what, why, fix)

    def _take(self, count: int, size: int = 1) -> range:
        """The next free GPUs; engines of `size` GPUs begin on a new machine if its end would split one of them."""
        for index, gap in enumerate(self.gaps):
            if size == 1 and count <= len(gap):
                self.gaps[index] = gap[count:]
                return gap[:count]
        left = self.width - self.used % self.width
        if count > left and left % size and self.width % size == 0:
            self.gaps.append(range(self.used, self.used + left))
            self.used += left
        start, self.used = self.used, self.used + count
        return range(start, self.used)

    def _learners(self, counts: Mapping[str, _Count], started: Mapping[str, bool]) -> None:
        shares_all, shares_ref = self._flag("--train.colocate_all"), self._flag("--train.colocate_actor_ref")
        actor = self._take(counts["actor"].gpus)
        self._add("actor", actor, Role.LEARNER)
        if started["ref"] and (shares_all or shares_ref):
            self._check_equal("ref", "actor", counts)
            self._add("ref", actor, Role.SCORER)
        self._engines(actor, shares_all)
        if started["ref"] and not (shares_all or shares_ref):
            self._add("ref", self._take(counts["ref"].gpus), Role.SCORER)
        together: range | None = actor if shares_all else None
        if self._flag("--train.colocate_critic_reward"):
            if started["critic"]:
                self._check_equal("reward", "critic", counts)
                together = self._take(counts["critic"].gpus)
            self._report_critic_reward(started["critic"], shares_all)
        for role, kind in (("critic", Role.LEARNER), ("reward", Role.SCORER)):
            if started[role]:
                devices = self._take(counts[role].gpus) if together is None else self._part(role, together, counts)
                self._add(role, devices, kind)

    def _part(self, role: str, group: range, counts: Mapping[str, _Count]) -> range:
        """The GPUs of a role in a group that it shares; OpenRLHF does not check that the group is large enough."""
        gpus, name = counts[role].gpus, NAMES.get(role, role)
        if gpus > len(group):
            self.root.findings.error(
                "RST-N066",
                self._where(f"--{role}.num_gpus_per_node"),
                f"gives the {name} {counted(gpus, 'GPU')}, but the group that it shares has {len(group)}",
                f"{self._key('--train.colocate_all')}: process {len(group)} has no GPU in the actor's group",
                f"give the {name} as many nodes and GPUs as the actor",
            )
        return group[:gpus]

    def _check_equal(self, role: str, other: str, counts: Mapping[str, _Count]) -> None:
        mine, theirs = counts[role], counts[other]
        if mine != theirs:
            self.root.findings.error(
                "RST-N066",
                self._where(f"--{role}.num_gpus_per_node"),
                f"gives the {NAMES.get(role, role)} {mine.nodes} x {counted(mine.per_node, 'GPU')}, "
                f"but it shares those of the {other}, which has {theirs.nodes} x {theirs.per_node}",
                "both numbers must be equal, also for a role that is not started; OpenRLHF ends with an assertion",
                f"write {self.root.spell(self._key(f'--{role}.num_nodes'), theirs.nodes)} "
                f"{self.root.spell(self._key(f'--{role}.num_gpus_per_node'), theirs.per_node)}",
            )

    def _report_critic_reward(self, has_critic: bool, shares_all: bool) -> None:
        flag, share_all = "--train.colocate_critic_reward", self._key("--train.colocate_all")
        if not has_critic:
            why = f"there is no critic, for {self._key('--algo.advantage.estimator')} is not gae"
            self._has_no_effect(flag, why, "remove it")
        elif shares_all:
            self.root.findings.warn(
                "RST-N068",
                self._where(flag),
                f"gives the critic and the reward model GPUs of their own, despite {share_all}",
                "OpenRLHF makes a second group for the two, after that of the actor",
                f"remove it for all to share, or remove {share_all}",
            )

    def _has_no_effect(self, flag: str, why: str, fix: str) -> None:
        self.root.findings.warn("RST-N068", self._where(flag), "has no effect", why, fix)

    def _add(self, role: str, devices: Sequence[int], kind: Role) -> None:
        sizes = ParallelSizes(
            tensor=self._number("--ds.tensor_parallel_size", 1), context=self._number("--ds.ring_attn_size", 1)
        )
        flag = f"--{role}.num_gpus_per_node"
        if role in ("actor", "critic"):
            names = f"tensor {sizes.tensor} * ring {sizes.context}"
            check_divides(sizes, len(devices), self._where(flag), self.root, names)
        name = "reference" if role == "ref" else role
        requested = DeviceList(devices, 1)
        self.add(name, self._key(flag), self._where(flag), requested, kind, sizes, self._model(role, kind))

    def _model(self, role: str, kind: Role) -> ModelUse:
        actor, reward = self._text("--actor.model_name_or_path"), self._text("--reward.model_name_or_path")
        paths = {
            "critic": self._text("--critic.model_name_or_path") or (reward or "").split(",")[0] or actor,
            "reward": reward,
        }
        path = paths.get(role, actor)
        is_whole = self._number("--ds.zero_stage", 0, 3) == 3
        rank = first_number((self.root, self._key("--ds.lora.rank")))
        use = ModelUse(
            path,
            read_model_config(path),
            sharding=Sharding.FULL if is_whole else Sharding.OPTIMIZER,
            strategy="deepspeed",
            sequence=self._lengths()[2],
        )
        if kind is not Role.LEARNER:
            return use
        is_muon = self._is_muon(role)
        on_host = self._flag("--ds.adam_offload")
        return replace(
            use,
            recomputes=self._flag("--actor.gradient_checkpointing_enable"),
            optimizer="muon" if is_muon else "adamw",
            optimizer_on_host=on_host and not is_muon,
            offloads=OFFLOADED_PARTS if self._flag("--ds.enable_sleep") else (),
            tokens=self._tokens(),
            lora_rank=int(rank) if rank else None,
        )

    def _tokens(self) -> int:
        """Tokens of a micro-batch of a ring."""
        if self._flag("--train.dynamic_batch_enable"):
            tensor, ring = (self._number(f"--ds.{key}", 1) for key in ("tensor_parallel_size", "ring_attn_size"))
            return self._number("--train.max_tokens_per_gpu", 1) * tensor * ring
        key = self._key("--train.micro_batch_size")
        return (self.root.whole_number(key, 1) or MICRO_BATCH[self._is_flat]) * self._lengths()[2]

    # --- engines

    def _engines_sleep(self) -> bool:
        return self._flag("--vllm.enable_sleep") and self._flag("--train.colocate_all")

    def _engines(self, actor: range, shares_all: bool) -> None:
        count = self._number("--vllm.num_engines", 0)
        size = self._number("--vllm.tensor_parallel_size", 1)
        is_async = self._flag("--train.async_enable")
        self._check_sleep(shares_all, is_async)
        if not count:
            return
        is_shared = shares_all and not is_async
        if is_shared and count * size != len(actor):
            self.root.findings.error(
                "RST-N066",
                self._where("--vllm.num_engines"),
                f"gives the engines {counted(count * size, 'GPU')}, but they share the actor's {len(actor)}",
                f"{counted(count, 'engine')} * tensor {size} = {count * size}; OpenRLHF ends with an assertion",
                self._engines_fix(len(actor), size),
            )
        devices: Sequence[int] = actor[: count * size] if is_shared else self._take(count * size, size)
        if len(devices) < count * size:
            return  # an error already
        path = self._text("--actor.model_name_or_path")
        key = self._key("--vllm.gpu_memory_utilization")
        fraction = fraction_of_device(self.root, key) or float(DEFAULTS["--vllm.gpu_memory_utilization"])
        model = ModelUse(path, read_model_config(path), memory_fraction=fraction, strategy="vllm")
        where = self._where("--vllm.num_engines")
        requested = DeviceList(devices, size)
        written = self._key("--vllm.num_engines")
        self.add("rollout", written, where, requested, Role.ENGINE, ParallelSizes(tensor=size), model)

    def _engines_fix(self, gpus: int, size: int) -> str:
        if gpus % size:
            return f"choose a tensor size that divides {gpus}"
        return f"write {self.root.spell(self._key('--vllm.num_engines'), gpus // size)}"

    def _check_sleep(self, shares_all: bool, is_async: bool) -> None:
        flag = "--vllm.enable_sleep"
        if not self._flag(flag):
            return
        share_all, run_async = self._key("--train.colocate_all"), self._key("--train.async_enable")
        if not shares_all:
            why = f"engines sleep with {share_all} only"
            self._has_no_effect(flag, why, f"remove it, or add {share_all}")
        elif is_async:
            self.root.findings.error(
                "RST-N068",
                self._where(flag),
                f"cannot be used with {run_async}",
                "engines that generate while the actor learns never sleep; OpenRLHF ends with an assertion",
                "remove it",
            )

    # --- machines

    def _width(self, counts: Sequence[_Count], used: int) -> int:
        """GPUs of a machine: as many as a role has on each of several nodes, else the usual number."""
        widest = max(count.per_node for count in counts)
        if any(count.nodes > 1 for count in counts):
            return widest
        return max(widest, min(used, USUAL_WIDTH))

    def _report_machines(self, machines: int, width: int, counts: Sequence[_Count]) -> None:
        if machines == 1:
            return
        where = self._where("--actor.num_gpus_per_node")
        if any(count.per_node != width for count in counts):
            planned = f"{counted(machines, 'machine')} of {counted(width, 'GPU')}"
            self.root.findings.note(
                "RST-N065",
                where,
                f"the roles are planned on {planned}, or on those of --inventory",
                f"{counted(self.used, 'GPU')} in all; OpenRLHF asks Ray for single GPUs, and does not say how many a "
                "machine has",
                "compare with the machines of the cluster, or give them with --inventory",
            )
        self.root.findings.note(
            "RST-N059",
            self._where("--actor.num_nodes"),
            "the order of the nodes is not fixed: Ray packs the GPUs of each group, and promises no order",
            "planned in this order: actor, engines, reference, critic, reward model",
            "compare with the nodes that OpenRLHF uses, where the order matters",
        )
