"""The setting `teacher` of the section `train`: models that the policy is distilled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from roost.config.data import ANY, COUNT, FLAG, NUMBER, TEXT, checked, words
from roost.config.findings import Findings, Where, did_you_mean, shown
from roost.config.train_choices import Divergence, KlEstimator

TEACHER = "teacher"
OF_SAMPLES = {"coef": NUMBER, "estimator": TEXT, "tags": ANY}  # keys for the policy's own samples
OF_COMPLETIONS = {  # keys for given completions
    "weight": NUMBER,
    "divergence": TEXT,
    "top_k": COUNT,
    "temperature": NUMBER,
    "teacher_temperature": NUMBER,
    "adaptive_alpha": NUMBER,
    "skew": NUMBER,
    "on_prompt": FLAG,
}
KEYS = {"model": TEXT, **OF_SAMPLES, **OF_COMPLETIONS}


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model whose log-probs of the sampled tokens change their advantages. Its component loads the model."""

    name: str = TEACHER  # of its component: `teacher`, or `teacher.NAME` where there are several
    coef: float = 1.0  # of the KL in the advantage
    estimator: KlEstimator = KlEstimator.K1
    tags: tuple[str, ...] = ()  # of the tasks that it teaches; empty: all


@dataclass(frozen=True, slots=True)
class Distillation:
    """Loss from a teacher's distribution at the tokens of given completions, beside the supervised loss."""

    weight: float = 0.5  # of the divergence; the supervised loss has 1 - weight
    divergence: Divergence = Divergence.FORWARD_KL
    top_k: int = 64  # tokens most likely to the teacher, over which both distributions are normalised; 0: all
    temperature: float = 1.0  # of both distributions
    teacher_temperature: float = 1.0  # of the teacher's, as well
    adaptive_alpha: float = 0.5  # probability of the unlikely tokens together, for adaptive_kl
    skew: float = 0.1  # share, in the mixture of a skewed KL, of the distribution that is compared with it
    on_prompt: bool = False  # learn the tokens of prompts as well, in both losses


def is_teacher(component: str) -> bool:
    """
    >>> [is_teacher(name) for name in ("teacher", "teacher.math", "reference")]
    [True, True, False]
    """
    return component == TEACHER or component.startswith(f"{TEACHER}.")


def read_teachers(values: Mapping[str, Any], where: Where, findings: Findings) -> tuple[Teacher, ...]:
    """One teacher, or several by their names; keys beside the names are for all of them.

    >>> [each.name for each in read_teachers({"model": "large", "coef": 0.5}, Where(), Findings())]
    ['teacher']
    >>> two = read_teachers({"coef": 0.5, "math": {"tags": ["aime"]}, "code": {"coef": 1}}, Where(), Findings())
    >>> [(each.name, each.coef) for each in two]
    [('teacher.math', 0.5), ('teacher.code', 1)]
    """
    named = {str(key): value for key, value in values.items() if isinstance(value, Mapping)}
    shared = {key: value for key, value in values.items() if str(key) not in named}
    if not named:
        return (_teacher(TEACHER, shared, where, findings),) if values else ()
    if "model" in shared:
        fix = f"write the model below {next(iter(named))}"
        findings.error("RST-T076", where.under("model"), "is one model for several teachers", fix=fix)
    own = {key: value for key, value in shared.items() if key != "model"}
    return tuple(
        _teacher(f"{TEACHER}.{name}", {**own, **value}, where.under(name), findings) for name, value in named.items()
    )


def read_distillation(values: Mapping[str, Any], where: Where, findings: Findings) -> Distillation | None:
    """The distillation of a supervised job, from its one teacher; None without a teacher.

    >>> read_distillation({"model": "large", "weight": 0.85, "divergence": "reverse_kl"}, Where(), Findings()).weight
    0.85
    """
    names = [str(key) for key, value in values.items() if isinstance(value, Mapping)]
    if names:
        what, why = f"has {len(names)} teachers: {', '.join(names)}", "supervised training learns from one"
        findings.error("RST-T076", where, what, why, "write the keys of one teacher, without its name")
    if names or not values:
        return None
    given = {key: values[key] for key in OF_COMPLETIONS if values.get(key) is not None and _is_right(values, key)}
    if "divergence" in given:
        if given["divergence"] not in tuple(Divergence):
            what, fix = f"is {shown(given['divergence'])}", f"write one of {', '.join(Divergence)}"
            hint = did_you_mean(given["divergence"], tuple(Divergence))
            findings.error("RST-T076", where.under("divergence"), what, hint, fix)
            return None
        given["divergence"] = Divergence(given["divergence"])
    for key in ("weight", "adaptive_alpha", "skew"):
        if given.get(key, 0) > 1:
            what = f"is {given[key]:g}; it must be at most 1"
            findings.error("RST-T076", where.under(key), what, fix=f"write {key}: {_DEFAULTS[key]}")
    for key in ("temperature", "teacher_temperature"):
        if given.get(key) == 0:
            findings.error("RST-T076", where.under(key), "is 0; it must be above 0", fix=f"write {key}: 1")
    if given.get("top_k") == 1:
        what, why = "is 1; it must be 0, or 2 or more", "over one token both distributions are 1, and never diverge"
        findings.error("RST-T076", where.under("top_k"), what, why, f"write top_k: {_DEFAULTS['top_k']}")
    return Distillation(**given)


_DEFAULTS = {each.name: each.default for each in fields(Distillation)}


def _is_right(values: Mapping[str, Any], key: str) -> bool:
    """Return True if a key holds a value of its kind; `read_teachers` reports the others."""
    return bool(checked({key: values[key]}, OF_COMPLETIONS, Where(), Findings()))


def merged_teachers(usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the teachers of `train` over those of the notation, also within a teacher that both name.

    >>> merged_teachers({"coef": 1.0, "math": {"tags": ["a"]}}, {"math": {"model": "m"}})
    {'coef': 1.0, 'math': {'tags': ['a'], 'model': 'm'}}
    """
    both = [key for key, value in own.items() if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping)]
    return {**usual, **own, **{key: {**usual[key], **own[key]} for key in both}}


def _teacher(name: str, values: Mapping[str, Any], where: Where, findings: Findings) -> Teacher:
    given = checked(values, KEYS, where, findings, "RST-T076", TEACHER)
    given = {key: given[key] for key in OF_SAMPLES if key in given}  # the model is read with the component
    estimator = given.pop("estimator", KlEstimator.K1.value)
    if estimator not in tuple(KlEstimator):
        fix = f"write one of {', '.join(KlEstimator)}"
        findings.error(
            "RST-T076",
            where.under("estimator"),
            f"is {shown(estimator)}",
            did_you_mean(estimator, tuple(KlEstimator)),
            fix,
        )
        return Teacher(name)
    written = given.pop("tags", ())
    tags = words(written)
    if written and not tags:
        what = f"is {shown(written)}; it must be a tag or a list of tags"
        findings.error("RST-T076", where.under("tags"), what, fix="write tags: [math]")
    return Teacher(name, estimator=KlEstimator(estimator), tags=tags, **given)
