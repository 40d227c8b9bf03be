"""The setting `teacher` of the section `train`: models that the policy is distilled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.data import ANY, NUMBER, TEXT, checked, words
from roost.config.findings import Findings, Where, did_you_mean, shown
from roost.config.train_choices import KlEstimator

TEACHER = "teacher"
KEYS = {"model": TEXT, "coef": NUMBER, "estimator": TEXT, "tags": ANY}


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model whose log-probs of the sampled tokens change their advantages. Its component loads the model."""

    name: str = TEACHER  # of its component: `teacher`, or `teacher.NAME` where there are several
    coef: float = 1.0  # of the KL in the advantage
    estimator: KlEstimator = KlEstimator.K1
    tags: tuple[str, ...] = ()  # of the tasks that it teaches; empty: all


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


def merged_teachers(usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the teachers of `train` over those of the notation, also within a teacher that both name.

    >>> merged_teachers({"coef": 1.0, "math": {"tags": ["a"]}}, {"math": {"model": "m"}})
    {'coef': 1.0, 'math': {'tags': ['a'], 'model': 'm'}}
    """
    both = [key for key, value in own.items() if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping)]
    return {**usual, **own, **{key: {**usual[key], **own[key]} for key in both}}


def _teacher(name: str, values: Mapping[str, Any], where: Where, findings: Findings) -> Teacher:
    given = checked(values, KEYS, where, findings, "RST-T076", TEACHER)
    given.pop("model", None)  # read with the component
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
