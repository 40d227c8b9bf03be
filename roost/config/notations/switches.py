"""Keys that do nothing without another key, which switches them on, or with the job's objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.data import RL_TEACHER_KEYS, SFT_TEACHER_KEYS, Distillation
from roost.config.findings import Where, shown
from roost.config.job import Notation
from roost.config.notations import rlinf_train as rlinf
from roost.config.notations.roll import is_distilled_alone
from roost.config.source import Section
from roost.config.train import Objective

NO_VALUE = (None, False, 0)


@dataclass(frozen=True, slots=True)
class Switched:
    """A key that has no effect where `is_off`; `switch` is the key whose absence decides it, if any."""

    path: str
    switch: str
    is_off: Callable[[Section], bool]
    why: str
    fix: str

    def is_idle(self, root: Section) -> bool:
        """Return True if the key has a value that does nothing."""
        return _value(root, self.path) not in NO_VALUE and self.is_off(root)


def _value(root: Section, path: str) -> Any:
    *above, key = path.split(".")
    return root.below(*above).values.get(key)


def _by(switch: str, *paths: str) -> tuple[Switched, ...]:
    """Keys that need a key to be true."""
    why, fix = f"{switch} is not true", f"write {switch}: true, or remove it"
    return tuple(Switched(path, switch, lambda root: _value(root, switch) is not True, why, fix) for path in paths)


def _has_no_kl_coef(root: Section) -> bool:
    return _value(root, "kl_loss_coef") in NO_VALUE and not is_distilled_alone(root)


def _is_not_decoupled(root: Section) -> bool:
    return bool(_value(root, "algorithm.loss_type") != rlinf.DECOUPLED)


def _is_fsdp(root: Section) -> bool:
    return rlinf.is_fsdp(root.below("actor"))


_LOSS = "algorithm.loss_type"
SWITCHED: Mapping[Notation, tuple[Switched, ...]] = {
    Notation.RLINF: (
        *_by("algorithm.importance_sampling_fix", "algorithm.importance_sampling_clip"),
        Switched(
            "algorithm.behave_weight_threshold",
            _LOSS,
            _is_not_decoupled,
            f"loss_type is not {rlinf.DECOUPLED}",
            f"write {_LOSS}: {rlinf.DECOUPLED}, or remove it",
        ),
        Switched(
            "algorithm.early_stop_imp_ratio",
            "",
            _is_fsdp,
            "RLinf's FSDP actor does not read it; its Megatron actor does",
            "write max_mean_ratio in train, or remove it",
        ),
    ),
    Notation.ROLL: (
        *_by("use_pg_clip_range", "pg_clip_low", "pg_clip_high"),
        *_by("add_token_level_kl", "init_kl_coef", "target_kl", "kl_horizon"),
        *_by("use_kl_loss", "kl_loss_coef"),
        Switched(
            "use_kl_loss",
            "kl_loss_coef",
            _has_no_kl_coef,
            "kl_loss_coef is 0",
            "write kl_loss_coef: 0.001, or remove it",
        ),
    ),
}


def idle_keys(root: Section, notation: Notation) -> Iterator[Switched]:
    """The keys of a config that have no effect."""
    return (switched for switched in SWITCHED.get(notation, ()) if switched.is_idle(root))


def note_idle_keys(root: Section, notation: Notation) -> None:
    """Note keys whose switch is missing; one that is written is off on purpose."""
    for switched in idle_keys(root, notation):
        if not switched.switch or _value(root, switched.switch) is None:
            *above, key = switched.path.split(".")
            root.findings.note("RST-T094", root.below(*above).where(key), "has no effect", switched.why, switched.fix)


def note_idle_teacher_keys(values: Mapping[str, Any], place: Where, root: Section) -> None:
    """Note keys of `teacher` that only the other objective uses."""
    is_sft = values.get("objective") is Objective.SFT
    of_other, objective = (RL_TEACHER_KEYS, "rl") if is_sft else (SFT_TEACHER_KEYS, "sft")
    own = root.below("train", "teacher").values
    below = [each for each in own.values() if isinstance(each, Mapping)]
    keys = dict.fromkeys(key for each in (own, *below) for key in each if key in of_other)
    if keys:
        what = f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not used"
        why = f"it is for objective: {objective}" if len(keys) == 1 else f"they are for objective: {objective}"
        fix = "remove what is not for another command"
        if is_sft and not below:
            weight = values["teacher"].get("weight", Distillation().weight)
            why += f"; the teacher is used for distillation on the given completions, with weight {shown(weight)}"
            fix += ", write weight, or remove teacher"
        root.findings.note("RST-T081", place, what, why, fix)
