"""The settings `data` (prompts) and `teacher` (models to distil from) of the section `train`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from roost.config.findings import Findings, Where, did_you_mean, listed_keys, shown
from roost.config.train_choices import Divergence, KlEstimator

SCENARIO = "roost.rollout.data.scenario.PromptScenario"
AGENTS = "roost.rollout.agents.scenario.AgentScenario"  # it takes its tasks from data, if it names no other source
QUESTIONS = "roost.rollout.environments.environment.Questions"  # an environment that gives no rewards
OVERLONG = ("filter", "error", "truncate")
EVALUATION = "evaluation"  # name of an evaluation set that has none


@dataclass(frozen=True, slots=True)
class DataSource:
    """Files, or a data set of the Hugging Face hub, with the columns to read."""

    path: tuple[str, ...]
    name: str | None = None  # configuration of a hub data set
    split: str = "train"
    prompt: str | None = None  # column: text, messages, or messages as JSON text
    query: str | None = None  # column: text that follows a text prompt on a new line, in rows that have it
    answer: str | None = None  # column
    images: tuple[str, ...] = ()  # columns; default: `images` or `image`, if the prompt has placeholders
    choices: str | None = None  # column: a list, written as A., B., ... after a text prompt; part of the answer
    tag: str = ""  # of all rows
    tag_column: str | None = None
    optional_answer: str | None = None  # like answer, but rows or files may lack the column
    optional_tag_column: str | None = None  # like tag_column, the same
    system_prompt: str | None = None
    system_column: str | None = None  # column with system prompts; rows without one have `system_prompt`
    weight: float | None = None
    limit: int | None = None  # rows


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The setting `train.data`."""

    sources: tuple[DataSource, ...]
    eval: Mapping[str, tuple[DataSource, ...]] = field(default_factory=dict)
    held_out: float = 0  # rows if at least 1, else a fraction
    chat_template: bool | str | None = None  # None: for messages, not for text
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tag_templates: Mapping[str, Any] = field(default_factory=dict)
    prompt_suffix: str = ""
    max_prompt_tokens: int | None = None
    min_prompt_tokens: int = 0
    overlong: str = "filter"
    only: Mapping[str, Any] = field(default_factory=dict)  # values of training rows by column, if they have it
    shuffle: bool = True
    seed: int | None = None  # None: the run's
    limit: int | None = None  # rows of all sources together, before any is dropped
    drop_last: bool = False
    rows_per_epoch: int | None = None
    mix: Mapping[str, float] = field(default_factory=dict)
    batch_size: int = 0  # prompts of a step
    domains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    domain_column: str | None = None
    default_domain: str = ""


TEXT, FLAG, COUNT, NUMBER, MAPPING, ANY = "a text", "true or false", "a whole number", "a number", "a mapping", "any"
SOURCE_KEYS = {
    "path": ANY,
    "name": TEXT,
    "split": TEXT,
    "prompt": TEXT,
    "query": TEXT,
    "answer": TEXT,
    "images": ANY,
    "choices": TEXT,
    "tag": TEXT,
    "tag_column": TEXT,
    "optional_answer": TEXT,
    "optional_tag_column": TEXT,
    "system_prompt": TEXT,
    "system_column": TEXT,
    "weight": NUMBER,
    "limit": COUNT,
}
OTHER_KEYS = {
    "eval": ANY,
    "held_out": NUMBER,
    "chat_template": ANY,
    "template_arguments": MAPPING,
    "tag_templates": MAPPING,
    "prompt_suffix": TEXT,
    "max_prompt_tokens": COUNT,
    "min_prompt_tokens": COUNT,
    "overlong": TEXT,
    "only": MAPPING,
    "shuffle": FLAG,
    "seed": COUNT,
    "drop_last": FLAG,
    "rows_per_epoch": COUNT,
    "mix": MAPPING,
    "batch_size": COUNT,
    "domains": MAPPING,
    "domain_column": TEXT,
    "default_domain": TEXT,
}
KEYS = SOURCE_KEYS | OTHER_KEYS
SHARED = tuple(key for key in SOURCE_KEYS if key not in ("path", "weight", "limit"))  # defaults of every source


def read_data(values: Mapping[str, Any], where: Where, findings: Findings) -> DataSettings | None:
    """Read the setting; None if anything is wrong with it.

    >>> read = read_data({"path": "a.jsonl", "prompt": "question", "eval": {"aime": "b.jsonl"}}, Where(), Findings())
    >>> read.sources[0].prompt, read.eval["aime"][0].path, read.eval["aime"][0].prompt
    ('question', ('b.jsonl',), 'question')
    """
    before = findings.num_errors
    given = checked(values, KEYS, where, findings)
    shared = {key: given[key] for key in SHARED if key in given}
    _check_images(shared, where, findings)
    weight = {"weight": given["weight"]} if "weight" in given else {}
    sources = _sources(given.get("path"), {**shared, **weight}, where.under("path"), findings)
    own = {key: value for key, value in given.items() if key in OTHER_KEYS or key == "limit"}
    own["eval"] = _eval_sets(given.get("eval"), shared, where.under("eval"), findings)
    own["mix"] = _shares(given.get("mix", {}), where.under("mix"), findings)
    _warn_left_out(own["mix"], own.get("batch_size", 0), where.under("mix"), findings)
    own["domains"] = {str(key): words(tags) for key, tags in given.get("domains", {}).items()}
    if own.get("overlong", "filter") not in OVERLONG:
        what, fix = f"is {shown(own['overlong'])}", f"write one of {', '.join(OVERLONG)}"
        findings.error("RST-T060", where.under("overlong"), what, did_you_mean(own["overlong"], OVERLONG), fix)
    if not isinstance(own.get("chat_template"), bool | str | None):
        what = f"is {shown(own['chat_template'])}; it must be true, false or a template"
        findings.error("RST-T060", where.under("chat_template"), what, fix="write chat_template: true")
    if own["mix"] and any(source.weight is not None for source in sources):
        why = "sources have weights as well"
        findings.error("RST-T060", where.under("mix"), "mixes by tag", why, "keep mix, or the weights of the sources")
    if own["eval"] and own.get("held_out"):
        why, fix = "eval names other prompts for evaluations", "keep held_out, or eval"
        findings.error("RST-T060", where.under("held_out"), f"holds out {own['held_out']:g}", why, fix)
    return DataSettings(sources, **own) if findings.num_errors == before else None


def shares_of_batch(shares: Sequence[float], batch: int) -> list[int]:
    """Tasks of each kind in a batch: its share rounded down, and the rest for the last kind, as in ROLL.

    >>> shares_of_batch([0.4, 0.3, 0.3], 32)
    [12, 9, 11]
    """
    total = sum(shares)
    counts = [int(share / total * batch + 1e-9) for share in shares[:-1]]
    return [*counts, batch - sum(counts)]


def checked(
    values: Mapping[str, Any],
    kinds: Mapping[str, str],
    where: Where,
    findings: Findings,
    code: str = "RST-T060",
    of: str = "data",
) -> dict[str, Any]:
    """The keys with a valid value; report unknown keys and wrong values."""
    found = {}
    for key, value in values.items():
        if key not in kinds:
            hint = did_you_mean(key, kinds)
            fix = "correct the key, or remove it" if hint else listed_keys(key, kinds)
            findings.error("RST-C023", where.under(str(key)), f"is not a key of {of}", hint, fix)
        elif value is not None and not _has_kind(value, kinds[key]):
            fix = f"write {key}: {_EXAMPLES[kinds[key]]}"
            findings.error(code, where.under(key), f"is {shown(value)}; it must be {kinds[key]}", fix=fix)
        elif value is not None:
            found[key] = value
    return found


_EXAMPLES = {TEXT: "name", FLAG: "true", COUNT: "1", NUMBER: "0.5", MAPPING: "{math: 0.5}"}


def _has_kind(value: Any, kind: str) -> bool:
    if kind is FLAG:
        return isinstance(value, bool)
    if kind in (COUNT, NUMBER):
        return isinstance(value, int if kind is COUNT else int | float) and not isinstance(value, bool) and value >= 0
    return kind is ANY or isinstance(value, str if kind is TEXT else Mapping)


def _sources(written: Any, shared: Mapping[str, Any], where: Where, findings: Findings) -> tuple[DataSource, ...]:
    """One source for each path, with the keys of a mapping over the shared ones."""
    items = written if isinstance(written, Sequence) and not isinstance(written, str) else [written]
    found = []
    for item in items:
        if isinstance(item, Mapping):
            own = checked(item, SOURCE_KEYS, where, findings)
            _check_images(own, where, findings)
            found += [_source(own.pop("path", ()), {**shared, **own})]
        else:
            found += [_source(item, shared)]
    if not found or not all(source.path for source in found):
        what = "is missing" if written is None else f"is {shown(written)}; it must be a path, or a list of paths"
        findings.error("RST-T060", where, what, fix="name a file, a folder or a data set of the hub: data/train.jsonl")
        return ()
    return tuple(found)


def _source(path: Any, keys: Mapping[str, Any]) -> DataSource:
    return DataSource(words(path), **{**keys, "images": words(keys.get("images", ()))})


def _check_images(keys: Mapping[str, Any], where: Where, findings: Findings) -> None:
    images = keys.get("images")
    if images and not words(images):
        what = f"is {shown(images)}; it must be a column, or a list of columns"
        findings.error("RST-T060", where.under("images"), what, fix="write images: [image]")


def _eval_sets(
    written: Any, shared: Mapping[str, Any], where: Where, findings: Findings
) -> dict[str, tuple[DataSource, ...]]:
    if written is None:
        return {}
    if not isinstance(written, Mapping) or "path" in written:
        return {EVALUATION: _sources(written, shared, where, findings)}
    return {str(name): _sources(each, shared, where.under(str(name)), findings) for name, each in written.items()}


def _shares(written: Mapping[str, Any], where: Where, findings: Findings) -> dict[str, float]:
    wrong = [key for key, share in written.items() if not _has_kind(share, NUMBER)]
    for key in wrong:
        what = f"is {shown(written[key])}; it must be a share"
        findings.error("RST-T060", where.under(str(key)), what, fix=f"write {key}: 0.5")
    return {} if wrong else {str(key): float(share) for key, share in written.items()}


def _warn_left_out(shares: Mapping[str, float], batch: int, where: Where, findings: Findings) -> None:
    """Warn of shares that are less than one prompt of a batch."""
    total = sum(shares.values(), 0.0)
    counts = shares_of_batch(list(shares.values()), batch) if batch and total else []
    for (name, share), count in zip(shares.items(), counts, strict=False):
        if share and not count:
            of_all = share / total
            why, fix = f"{of_all:.3g} * {batch} is less than 1", f"use {math.ceil(1 / of_all)} prompts per step or more"
            findings.warn("RST-T071", where.under(name), f"no prompt of {batch} in a step is of {name}", why, fix)


def words(written: Any) -> tuple[str, ...]:
    """A text or a list of texts as a tuple; empty for anything else.

    >>> words("a"), words(["a", "b"]), words(None), words([1])
    (('a',), ('a', 'b'), (), ())
    """
    words = [written] if isinstance(written, str) else written if isinstance(written, Sequence) else ()
    return tuple(words) if all(isinstance(word, str) and word for word in words) else ()


TEACHER = "teacher"
RL_TEACHER_KEYS = {"coef": NUMBER, "estimator": TEXT, "tags": ANY}  # distillation on the policy's own samples
SFT_TEACHER_KEYS = {  # distillation on given completions
    "weight": NUMBER,
    "divergence": TEXT,
    "top_k": COUNT,
    "temperature": NUMBER,
    "teacher_temperature": NUMBER,
    "adaptive_alpha": NUMBER,
    "skew": NUMBER,
    "on_prompt": FLAG,
}
TEACHER_KEYS = {"model": TEXT, **RL_TEACHER_KEYS, **SFT_TEACHER_KEYS}


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher of on-policy distillation: the KL from it changes the advantages of sampled tokens."""

    name: str = TEACHER  # of its component, which loads the model: `teacher`, or `teacher.NAME` of several
    coef: float = 1.0  # of the KL in the advantage
    estimator: KlEstimator = KlEstimator.K1
    tags: tuple[str, ...] = ()  # of the tasks that it teaches; empty: all


@dataclass(frozen=True, slots=True)
class Distillation:
    """Distillation loss at the tokens of given completions, beside the supervised loss."""

    weight: float = 0.5  # of the divergence; the supervised loss has 1 - weight
    divergence: Divergence = Divergence.FORWARD_KL
    top_k: int = 64  # the teacher's most likely tokens, over which both distributions are normalised; 0: all
    temperature: float = 1.0  # of both distributions
    teacher_temperature: float = 1.0  # of the teacher's distribution, in addition
    adaptive_alpha: float = 0.5  # total probability of the unlikely tokens, for adaptive_kl
    skew: float = 0.1  # weight, in the mixture of a skewed KL, of the distribution compared with the mixture
    on_prompt: bool = False  # include prompt tokens in both losses


def is_teacher(component: str) -> bool:
    """Return True for a component that holds a teacher.

    >>> [is_teacher(name) for name in ("teacher", "teacher.math", "reference")]
    [True, True, False]
    """
    return component == TEACHER or component.startswith(f"{TEACHER}.")


def read_teachers(values: Mapping[str, Any], where: Where, findings: Findings) -> tuple[Teacher, ...]:
    """One teacher, or several by name; keys beside the names apply to all of them.

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
    given = {key: values[key] for key in SFT_TEACHER_KEYS if values.get(key) is not None and _is_right(values, key)}
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
    return bool(checked({key: values[key]}, SFT_TEACHER_KEYS, Where(), Findings()))


def merged_teachers(usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the teachers of `train` over those of the notation, also within a teacher that both name.

    >>> merged_teachers({"coef": 1.0, "math": {"tags": ["a"]}}, {"math": {"model": "m"}})
    {'coef': 1.0, 'math': {'tags': ['a'], 'model': 'm'}}
    """
    both = [key for key, value in own.items() if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping)]
    return {**usual, **own, **{key: {**usual[key], **own[key]} for key in both}}


def _teacher(name: str, values: Mapping[str, Any], where: Where, findings: Findings) -> Teacher:
    given = checked(values, TEACHER_KEYS, where, findings, "RST-T076", TEACHER)
    given = {key: given[key] for key in RL_TEACHER_KEYS if key in given}  # the model is read with the component
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
