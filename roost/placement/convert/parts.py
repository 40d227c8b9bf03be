"""What the writers of several notations share: components by name, and words for their settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.job import EXPERT_TENSOR, ModelUse, Notation, ParallelSizes, Role
from roost.config.notations.algorithm import ESTIMATOR, ESTIMATORS, KL_COEF, KL_IN, PROMPT, RESPONSE, shared_estimator
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan, backend, has_devices, with_reference

KEEP = "keep the notation it is written in"


def precision(model: ModelUse) -> str:
    """The word of all notations for the type of a model's weights."""
    return {4: "fp32", 1: "fp8"}.get(model.named_bytes, "bf16")


def says_recomputing(part: ComponentPlan) -> bool:
    """Return True for a learner that does not leave the recomputing of activations to the notation's default."""
    is_default = part.model.recomputes_by_default and part.model.recomputes
    return part.role is Role.LEARNER and not is_default


def is_dealt(part: ComponentPlan) -> bool:
    """Return True for workers without devices that are spread over the nodes round robin."""
    return part.strategy == "SpreadPlacementStrategy"


_MEMBERS = {"actor": "trainer", "rollout": "engines"}


def refuse_without(parts: Mapping[str, ComponentPlan], names: Sequence[str], program: str, findings: Findings) -> bool:
    """Return False, with a finding, if a component that the program needs has no devices."""
    missing = [name for name in names if name not in parts]
    for name in missing:
        what = f"the job has no {_MEMBERS[name]}, which {program} needs"
        why = f"components on devices: {', '.join(parts) or 'none'}"
        findings.error("RST-N048", Where(path=(name,)), what, why, KEEP)
    return not missing


PREFILL, DECODE = "rollout.prefill", "rollout.decode"
TRAINED = {"leave_one_out": "rloo", "grpo": "grpo", "gae": "gae"}  # Roost's words for estimators that others have
ASSUMED = "RST-N084"  # the code of a value that the source does not set


@dataclass(frozen=True, slots=True)
class Parts:
    """Components with devices, by name, and the program that they are written for."""

    plan: Plan
    program: str
    findings: Findings
    by_name: dict[str, ComponentPlan]

    @classmethod
    def of(
        cls,
        plan: Plan,
        program: str,
        findings: Findings,
        needs: Sequence[str] = ("actor",),
        splits: bool = False,
        idles: bool = True,
    ) -> Parts | None:
        """The components of a plan with devices; None, with a finding, if one of `needs` is missing.

        `splits`: the program has engines for prefill and decode. `idles`: it starts a reference for a KL of 0.
        """
        by_name = {part.name: part for part in with_reference(plan) if has_devices(part)}
        if not idles and is_kl_off(plan):
            by_name.pop("reference", None)
        if PREFILL in by_name and DECODE in by_name:
            needs = [name for name in needs if name != "rollout"]
            if not splits:
                what = f"{program} has engines of one kind, and the job has different ones for prefill and for decode"
                findings.error("RST-N048", Where(path=(PREFILL,)), what, fix=KEEP)
        is_whole = refuse_without(by_name, needs, program, findings)
        return cls(plan, program, findings, by_name) if is_whole and not findings.has_errors else None

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __getitem__(self, name: str) -> ComponentPlan:
        return self.by_name[name]

    def __iter__(self) -> Iterator[ComponentPlan]:
        return iter(self.by_name.values())

    @property
    def actor(self) -> ComponentPlan:
        return self["actor"]

    @property
    def engines(self) -> list[ComponentPlan]:
        """Engines of the policy: one component, or those for prefill and for decode."""
        return [self[name] for name in ("rollout", PREFILL, DECODE) if name in self]

    @property
    def path(self) -> str | None:
        """The model that is trained."""
        return next((part.model.path for part in (self.actor, *self.engines) if part.model.path), None)

    @property
    def is_async(self) -> bool:
        settings = self.plan.settings
        return settings.get("async_rollouts") is True or bool(settings.get("async_generation_ratio"))

    @property
    def staleness(self) -> int:
        """Iterations that rollouts of an asynchronous job are ahead, rounded up."""
        ratio = self.plan.settings.get("async_generation_ratio")
        return math.ceil(ratio) if isinstance(ratio, int | float) and ratio else 1

    @property
    def width(self) -> int:
        """GPUs of a node; on a single node, those up to the last that is used."""
        last = max(max(self.devices(part.name)) for part in self)
        return last + 1 if self.nodes == 1 else int(self.plan.inventory.accelerator_counts.max(initial=1))

    @property
    def nodes(self) -> int:
        """Nodes up to the last that is used."""
        return max(int(part.table.device_nodes.max()) for part in self) + 1

    def devices(self, name: str) -> list[int]:
        return [int(number) for number in self[name].table.device_numbers]

    def share(self, one: str, other: str) -> bool:
        return bool(set(self.devices(one)) & set(self.devices(other)))

    def shares_actor(self) -> bool:
        """Return True if engines are on the learner's devices."""
        return any(self.share("actor", part.name) for part in self.engines)

    def engines_sleep(self) -> bool:
        return self.plan.settings.get("engines_sleep") is not False and all(
            part.model.can_sleep for part in self.engines
        )

    def pool(self, *names: str) -> tuple[int, int]:
        """Number of nodes that components are on, and of their GPUs on each."""
        return self.pool_of([number for name in names for number in self.devices(name)])

    def pool_of(self, devices: Sequence[int]) -> tuple[int, int]:
        nodes = np.searchsorted(self.plan.inventory.first_accelerators, devices, side="right")
        count = len(np.unique(nodes))
        return count, len(set(devices)) // count

    def engine_size(self, part: ComponentPlan) -> int:
        """Number of devices of each engine; engines of several sizes are a finding."""
        sizes = np.unique(np.diff(part.table.offsets)).tolist()
        if len(sizes) > 1:
            what, why = f"{self.program} has engines of one size", f"its processes hold {', '.join(map(str, sizes))}"
            self.findings.error("RST-N049", Where(path=(part.name,)), what, why, KEEP)
        return int(sizes[-1])

    def engine(self, part: ComponentPlan, known: Sequence[str]) -> str | None:
        """The program's word for the engine; None if the job does not name one."""
        return self.backend(part, known) if backend(part, self.plan.notation) is not None else None

    def backend(self, part: ComponentPlan, known: Sequence[str]) -> str:
        """The program's word for the engine; the first of `known` if the job names none, or another."""
        word = backend(part, self.plan.notation)
        return word if word is not None and word in known else known[0]

    def assume(self, key: str, value: Any, why: str) -> Any:
        """Return a value that the source does not set; a note names it."""
        fix = "edit it in what is printed if another is wanted"
        self.findings.note("RST-N084", Where(path=(key,)), f"not in the source; set to {value}", why, fix)
        return value

    def estimator(self, notation: Notation, key: str) -> str:
        """The program's word for the job's advantage estimator."""
        words, word = ESTIMATORS[notation], estimator_word(self.plan, notation) or self._trained(notation)
        if word is not None:
            return word
        if "critic" in self:
            return words["gae"]
        if ESTIMATOR in self.plan.settings or not self.engines:
            return words["grpo"]  # named where both plans are compared
        return str(self.assume(key, words["grpo"], f"{self.program} needs an estimator that does without a critic"))

    def _trained(self, notation: Notation) -> str | None:
        """The program's word for the estimator that Roost trains the job with; None if the job names its own."""
        if ESTIMATOR in self.plan.settings:
            return None
        trained = (str(setting.value) for setting in self.plan.training if setting.name == ESTIMATOR)
        return ESTIMATORS[notation].get(TRAINED.get(next(trained, ""), ""))

    def penalty(self, key: str, usual: float) -> float | None:
        """The KL coefficient: the job's, else `usual` if it has a reference, else None."""
        said = self.plan.settings.get(KL_COEF)
        if said is not None:
            return float(said)
        if "reference" not in self:
            return None
        return float(self.assume(key, usual, f"the job has a reference, which {self.program} starts for a KL only"))

    @property
    def is_penalty_in_reward(self) -> bool:
        return self.plan.settings.get(KL_IN) == "reward"

    @property
    def completion(self) -> int | None:
        """Most tokens of a completion: as written, or what the longest prompt leaves of a sequence."""
        prompt, response = (self.plan.settings.get(name) for name in (PROMPT, RESPONSE))
        sequence = self.actor.model.sequence
        left = sequence - int(prompt) if prompt and sequence and prompt < sequence else None
        return int(response) if response else left

    def lengths(self, prompt_key: str, usual: int) -> tuple[int, int] | None:
        """Most tokens of a prompt and of a completion; None if the job does not limit sequences."""
        prompt, response, sequence = known_lengths(self.plan, self.actor.model.sequence)
        if response and not sequence:
            why = f"{self.program} has two lengths, and the job says that of a completion alone"
            return int(prompt or self.assume(prompt_key, usual, why)), response
        if not sequence or sequence < 2:
            return None
        usual = sequence - response if response else min(usual, sequence // 2)
        if prompt is None:
            said = "their sum and that of a completion" if response else "their sum alone"
            why = f"{self.program} has two lengths, and the job says {said}: {sequence}"
            prompt = int(self.assume(prompt_key, usual, why))
        prompt = prompt if prompt < sequence else usual  # named where both plans are compared
        return prompt, response or sequence - prompt


def is_kl_off(plan: Plan) -> bool:
    """Return True if the coefficient of KL is written as 0, which starts a reference in some programs."""
    return plan.settings.get(KL_COEF) == 0


def known_lengths(plan: Plan, sequence: int | None) -> tuple[int | None, int | None, int | None]:
    """Most tokens of a prompt, of a completion, and of both together; each None if it is not known."""
    prompt, response = (int(said) if (said := plan.settings.get(name)) else None for name in (PROMPT, RESPONSE))
    if not sequence:
        return prompt, response, None
    if prompt and prompt < sequence:
        response = min(response or sequence, sequence - prompt)
        return prompt, response, prompt + response
    return prompt, response if response and response < sequence else None, sequence


def estimator_word(plan: Plan, notation: Notation) -> str | None:
    """The notation's word for the job's advantage estimator; None if the job names none, or the notation lacks it."""
    said = shared_estimator(plan.settings)
    if not isinstance(said, str):
        return None
    words = ESTIMATORS[notation]
    usual = words.get("grpo") if said == "gspo" else None  # the same advantages
    return words.get(said, said if plan.notation is notation else usual)


def above_one(**sizes: int) -> dict[str, Any]:
    """Those of the sizes that are above 1; others are not written."""
    return {key: size for key, size in sizes.items() if size > 1}


def megatron_sizes(sizes: ParallelSizes) -> dict[str, Any]:
    """Sizes by Megatron's names: those above 1, and the expert tensor size if it is set."""
    of_experts = {} if sizes.expert_tensor is None else {EXPERT_TENSOR: sizes.expert_tensor}
    return of_experts | above_one(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
    )


def given(**values: Any) -> dict[str, Any]:
    """The values without those that are None or empty."""
    return {key: value for key, value in values.items() if value not in (None, {}, ())}
