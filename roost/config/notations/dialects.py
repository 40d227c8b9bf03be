"""Settings that a notation spells otherwise than by one key of the same meaning, and the notation's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from roost.config.findings import Where, shown
from roost.config.frameworks import trl_train as training_trl, verl_train as training_verl
from roost.config.job import EXPERT_TENSOR, Job, Notation, size_place
from roost.config.notations import (
    loop_train as training_loop,
    rlinf_train as training_rlinf,
    roll_train as training_roll,
)
from roost.config.source import Section, Unresolved

_DIALECTS: Mapping[Notation, ModuleType] = {
    Notation.RLINF: training_rlinf,
    Notation.ROLL: training_roll,
    Notation.LOOP: training_loop,
    Notation.VERL: training_verl,
    Notation.TRL: training_trl,
}
# The keys that each setting follows from: where a finding points to, and docs/training-settings.md.
DERIVED_FROM: Mapping[Notation, Mapping[str, tuple[str, ...]]] = {
    notation: dialect.DERIVED_FROM for notation, dialect in _DIALECTS.items()
}


def derived(root: Section, job: Job) -> dict[str, Any]:
    """Settings derived from the notation's own keys, by Roost's names; those not given are left out.

    It has `minibatches` if the notation gives their number instead of `minibatch_size`.
    """
    found: dict[str, Any] = _DIALECTS[job.notation].derived(root, job)
    return {name: value for name, value in found.items() if value is not None}


def defaults(root: Section, notation: Notation, values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the other program that differ from Roost's; `values` are the settings that were given."""
    found: dict[str, Any] = _DIALECTS[notation].defaults(root, values)
    return found


OFF = (None, False, 0)
Values = Mapping[str, Any]


def _always(root: Section, values: Values) -> bool:
    return True


def _embodied(root: Section, values: Values) -> bool:
    """Return True for RLinf's embodied tasks."""
    return root.below("runner").values.get("task_type") == "embodied"


@dataclass(frozen=True, slots=True)
class Unlike:
    """A key of the other program that Roost does not follow; no warning is needed for its harmless values.

    `read_by_other`: whether the other program reads the key in this config.
    """

    path: str
    harmless: tuple[Any, ...] = OFF
    instead: str = "remove it, if the run is to be without it"
    read_by_other: Callable[[Section, Values], bool] = _always


_STALENESS = "write max_staleness in train, or remove it"
_POLICIES = ("actor_train", "student_train")  # roles of ROLL's
_TASK = "let the scenario of train.task do it"

UNLIKE: Mapping[Notation, tuple[Unlike, ...]] = {
    Notation.RLINF: (
        Unlike("algorithm.filter_rewards", instead=_TASK, read_by_other=_embodied),
        Unlike(
            "algorithm.loss_type",
            (None, "actor", "actor_critic", training_rlinf.DECOUPLED),
            "write advantage_estimator and loss_type in train",
        ),
        Unlike("algorithm.max_num_gen_batches", (None, 0, 1)),
        Unlike("runner.weight_sync_interval", (None, 1), _STALENESS),
        Unlike("actor.lr_sched.weight_decay_incr_style", (None, "constant"), "remove it"),
        Unlike("algorithm.sampling_params.do_sample", (None, True)),
    ),
    Notation.ROLL: (
        Unlike("use_policy_loss_type", (None, "PPO"), "write importance_sampling_level: none in train"),
        Unlike("mask_type", (None, "loss")),
        Unlike("length_loss_weight"),
        *(Unlike(f"{role}.model_update_frequency", (None, 1), _STALENESS) for role in _POLICIES),
        *(Unlike(f"{role}.apply_loss_scale", (None, True)) for role in _POLICIES),
        Unlike("is_use_additional_prompts"),
        *(Unlike(f"{role}.generating_args.include_stop_str_in_output", (None, True)) for role in training_roll.ENGINES),
        Unlike("force_disable_old_logprobs_recompute", instead="write importance_sampling_level: none in train"),
    ),
    Notation.LOOP: (
        Unlike("rl.eval.n_iterations", (None, 0, 1)),
        Unlike("llm.vllm_class.frequency_penalty"),
        Unlike("llm.lora_dropout"),
    ),
    # Keys of other frameworks are judged in roost/config/frameworks/keys.py.
    Notation.VERL: (),
    Notation.TRL: (),
}
HALF = ("fp16", "float16", "16", "fp16-mixed", "16-mixed")
PRECISIONS = {
    Notation.RLINF: ("actor", "model", "precision"),
    Notation.ROLL: ("", "model_args", "dtype"),
    Notation.LOOP: ("rl", "dtype"),
}


def warn_unlike(root: Section, notation: Notation, values: Mapping[str, Any]) -> None:
    """Warn of each key that the other program would follow and Roost does not; `values` are the settings so far."""
    for unlike in UNLIKE[notation]:
        *above, key = unlike.path.split(".")
        section = root.below(*above)
        value = section.values.get(key)
        if not unlike.read_by_other(root, values):
            continue
        if not (isinstance(value, Unresolved) or value in unlike.harmless):
            what = f"is {shown(value)}, which Roost does not follow"
            root.findings.warn(
                "RST-T014", section.where(key), what, "the run will differ from the other program's", unlike.instead
            )
    _warn_half(root, notation, values)


# The section of a learner's parallel sizes, below its component.
_SIZES = {Notation.RLINF: ("model",), Notation.ROLL: ("strategy_args", "strategy_config")}


def refuse_expert_tensor_parallel(root: Section, job: Job) -> None:
    """Report an error for each learner with expert tensor parallelism, which Megatron has and Roost has not."""
    found: list[tuple[Any, Where]] = []
    if job.notation in _SIZES:  # as written: ParallelSizes drops a size that equals the tensor size
        for name in root.values:
            section = root.below(str(name), *_SIZES[job.notation])
            found.append((section.values.get(EXPERT_TENSOR), section.where(EXPERT_TENSOR)))
    else:
        found += [
            (part.parallel.expert_tensor, size_place(part.where, part.written_name, "expert_tensor"))
            for part in job.components
        ]
    for size, where in found:
        if isinstance(size, int) and size > 1:
            root.findings.error(
                "RST-T123",
                where,
                f"is {size}, but Roost's learner does not split single experts",
                "expert_model_parallel_size N divides whole experts over N ranks",
                "write expert_tensor_parallel_size 1",
            )


def _warn_half(root: Section, notation: Notation, values: Mapping[str, Any]) -> None:
    """Warn of float16, unless train has a compute_dtype."""
    *above, key = PRECISIONS.get(notation, ("",))
    section = root.below(*(part or training_roll.learner_role(root) for part in above))
    value = section.values.get(key)
    if str(value).lower().removeprefix("torch.") in HALF and "compute_dtype" not in values:
        root.findings.warn(
            "RST-T015",
            section.where(key),
            f"is {shown(value)}, but the learner will compute in float32",
            "float16 needs loss scaling, which Roost does not do",
            "write compute_dtype: bfloat16, or compute_dtype: float32, in train",
        )
