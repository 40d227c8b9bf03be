"""The components of a plan as writers of other programs' jobs need them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.job import Notation, ParallelSizes
from roost.config.notations.algorithm import ESTIMATOR, ESTIMATORS, KL_COEF, KL_IN, PROMPT, RESPONSE, shared_estimator
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.models import KEEP, refuse_without, size_of_all
from roost.placement.models import backend, has_devices, with_reference
from roost.placement.plan import Plan

PREFILL, DECODE = "rollout.prefill", "rollout.decode"
_TRAINED = {"leave_one_out": "rloo", "grpo": "grpo", "gae": "gae"}  # Roost's words for estimators that others have
ASSUMED = "RST-N084"  # the code of a value that the source does not say


@dataclass(frozen=True, slots=True)
class Parts:
    """Components with devices, by name, and the program that they are written for."""

    plan: Plan
    program: str
    findings: Findings
    by_name: dict[str, ComponentPlan]

    @classmethod
    def of(
        cls, plan: Plan, program: str, findings: Findings, needs: Sequence[str] = ("actor",), splits: bool = False
    ) -> Parts | None:
        """None, with a finding, where a component lacks; `splits`: the program has engines for prefill and decode."""
        by_name = {part.name: part for part in with_reference(plan) if has_devices(part)}
        if PREFILL in by_name and DECODE in by_name:
            if not splits:
                where, what = Where(path=(PREFILL,)), f"{program} has no engines for prefill and decode here"
                findings.error("RST-N048", where, what, fix=KEEP)
                return None
            needs = [name for name in needs if name != "rollout"]
        return cls(plan, program, findings, by_name) if refuse_without(by_name, needs, findings) else None

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
        """Iterations that rollouts of an asynchronous job are ahead, as whole ones."""
        ratio = self.plan.settings.get("async_generation_ratio")
        return math.ceil(ratio) if isinstance(ratio, int | float) and ratio else 1

    @property
    def width(self) -> int:
        """GPUs of a node; of a single node those that are used."""
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
        """Nodes that components are on, and their GPUs on each."""
        return self.pool_of([number for name in names for number in self.devices(name)])

    def pool_of(self, devices: Sequence[int]) -> tuple[int, int]:
        nodes = np.searchsorted(self.plan.inventory.first_accelerators, devices, side="right")
        count = len(np.unique(nodes))
        return count, len(set(devices)) // count

    def engine_size(self, part: ComponentPlan) -> int:
        return size_of_all(part, self.program, self.findings)

    def engine(self, part: ComponentPlan, known: Sequence[str]) -> str | None:
        """The engine's word as the program has it; None where the job does not say it."""
        return self.backend(part, known) if backend(part, self.plan.notation) is not None else None

    def backend(self, part: ComponentPlan, known: Sequence[str]) -> str:
        """The engine's word, or the first one of the program's."""
        word = backend(part, self.plan.notation)
        return word if word is not None and word in known else known[0]

    def assume(self, key: str, value: Any, why: str) -> Any:
        """Write a value that the source does not say, with a note."""
        fix = "set it where it should be another"
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
        """The program's word for the estimator that Roost trains the job with, where the job says none."""
        if ESTIMATOR in self.plan.settings:
            return None
        trained = (str(setting.value) for setting in self.plan.training if setting.name == ESTIMATOR)
        return ESTIMATORS[notation].get(_TRAINED.get(next(trained, ""), ""))

    def penalty(self, key: str, usual: float) -> float:
        """The coefficient of KL: 0 without one, and the usual one where there is a reference that the job uses."""
        said = self.plan.settings.get(KL_COEF)
        if said is not None:
            return float(said)
        if "reference" not in self:
            return 0.0
        return float(self.assume(key, usual, f"the job has a reference, which {self.program} starts for a KL only"))

    @property
    def is_penalty_in_reward(self) -> bool:
        return self.plan.settings.get(KL_IN) == "reward"

    def lengths(self, prompt_key: str, usual: int) -> tuple[int, int] | None:
        """Longest prompt and completion; None where the job does not say how long sequences are."""
        sequence, said = self.actor.model.sequence, self.plan.settings.get(PROMPT)
        response = self.plan.settings.get(RESPONSE)
        if response and not sequence:
            why = f"{self.program} has two lengths, and the job says that of a completion alone"
            return int(self.assume(prompt_key, usual, why)), int(response)
        if not sequence or sequence < 2:
            return None
        half = min(usual, sequence // 2)
        if said is None:
            why = f"{self.program} has two lengths, and the job says their sum alone: {sequence}"
            said = self.assume(prompt_key, half, why)
        prompt = int(said) if said < sequence else half  # named where both plans are compared
        return prompt, sequence - prompt


def estimator_word(plan: Plan, notation: Notation) -> str | None:
    """The notation's word for the job's advantage estimator; None where the job says none, or one it lacks."""
    said = shared_estimator(plan.settings)
    if not isinstance(said, str):
        return None
    return ESTIMATORS[notation].get(said, said if plan.notation is notation else None)


def above_one(**sizes: int) -> dict[str, Any]:
    """Sizes that are written: those above 1."""
    return {key: size for key, size in sizes.items() if size > 1}


def megatron_sizes(sizes: ParallelSizes) -> dict[str, Any]:
    """Sizes above 1 by Megatron's names."""
    return above_one(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
    )


def given(**values: Any) -> dict[str, Any]:
    """Values that there are; None and empty ones are left out."""
    return {key: value for key, value in values.items() if value not in (None, {}, ())}
