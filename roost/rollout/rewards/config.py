"""Build rewards from a config: functions as rewards, routing by tag, and weights."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roost.config.findings import Findings, Where, counted, did_you_mean, shown
from roost.procs.user_code import call, in_daemon_thread, within
from roost.rollout.check_target import NotLocated, located
from roost.rollout.data.tables import DataError
from roost.rollout.episode import Task
from roost.rollout.rewards.reward import TRUTH, Answer, Reads, Reward, RewardFailed, Scored, as_scored

OFFERED = ("answer", "task", "data", "text", "reward", "messages")  # arguments: the answer, and its parts


class Function:
    """Calls a function, asynchronous or not, with those arguments of `OFFERED` that it takes.

    >>> def short(text, most=10):
    ...     return len(text) <= most
    >>> from roost.rollout.episode import Task
    >>> asyncio.run(Function(short, keys={"most": 3}).score(Answer(Task("say hello"), "hello")))
    0.0
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        keys: dict[str, Any] | None = None,
        threads: int = 4,
        limit_s: float = 60.0,
    ) -> None:
        if threads < 1 or limit_s <= 0:
            raise ValueError(f"threads is {threads} and limit_s {limit_s}; both must be above 0")
        self._function = located(function) if isinstance(function, str) else function
        self._name = getattr(self._function, "__name__", type(self._function).__name__)
        self._keys = dict(keys or {})
        self._named = named_arguments(self._function, self._keys)
        self._limit_s = limit_s
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._places = asyncio.Semaphore(threads)  # limit_s counts from when a thread is free

    async def score(self, answer: Answer) -> Scored | float:
        parts = answer, answer.task, answer.task.data, answer.text, answer.reward, answer.messages
        offered = dict(zip(OFFERED, parts, strict=True))
        arguments = {name: offered[name] for name in self._named} | self._keys
        try:
            async with self._places if not self._is_async else contextlib.nullcontext():
                value = await within(self._limit_s, self._called(arguments))
        except TimeoutError as error:
            raise RewardFailed(f"{self._name} was not over after {self._limit_s:g} s") from error
        scored = as_scored(value, self._name, answer.turns)
        return scored if scored.parts or scored.turn_rewards else scored.reward

    async def close(self) -> None:
        """Do nothing: threads cannot be killed; one that still runs is abandoned."""

    async def _called(self, arguments: dict[str, Any]) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A new thread for each call, so that a hanging call does not block later answers.
        result = await asyncio.wrap_future(
            in_daemon_thread(f"reward {self._name}", lambda: self._function(**arguments))
        )
        return await result if inspect.isawaitable(result) else result


def named_arguments(function: Callable[..., Any], keys: dict[str, Any]) -> tuple[str, ...]:
    """Return the offered arguments that a function takes. Raise TypeError for missing or unknown ones.

    >>> named_arguments(lambda text, data, most=1: 0, {"most": 2})
    ('data', 'text')
    """
    parameters = inspect.signature(function).parameters.values()
    by_name = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    missing = [name for name in needed if name not in by_name or name not in (*OFFERED, *keys)]
    if missing:
        raise TypeError(f"it needs {', '.join(missing)}; it may name {', '.join(OFFERED)}, and keys of the config")
    unknown = [name for name in keys if name not in by_name and not takes_any]
    if unknown:
        raise TypeError(f"it does not take {', '.join(unknown)}; it takes {', '.join(by_name) or 'nothing'}")
    return tuple(name for name in OFFERED if (name in by_name or takes_any) and name not in keys)


SCENARIO = "scenario"  # the name under which the scenario's own reward is weighted


@dataclass(frozen=True, slots=True)
class Route:
    """A reward's name, the tasks it scores, and its weight."""

    name: str
    tags: frozenset[str] = frozenset()  # tags of the tasks it scores; empty: all tasks, unless it has a domain
    weight: float = 1.0
    domain: str = ""  # tasks with this `domain` in their data are scored by this reward alone, whatever their tag
    is_fallback: bool = False  # also scores tasks that no other reward scores
    is_cached: bool = False  # equal answers to equal tasks are scored once

    def takes(self, tag: str) -> bool:
        return tag in self.tags if self.tags or self.domain else True


@dataclass(frozen=True, slots=True)
class Routing:
    """Routes of all rewards. The total is the weighted sum of the rewards that match a task.

    The scenario's own reward is added only if it has a weight. An answer that no reward matches keeps it.

    >>> routing = Routing((Route("exact", frozenset({"math"})), Route("style", weight=0.5)))
    >>> [route.name for route in routing.of("math")], routing.total("math", 9.0, {"exact": 1.0, "style": 0.2})
    (['exact', 'style'], 1.1)
    """

    routes: tuple[Route, ...] = ()
    own: Route | None = None  # the scenario's own reward

    def of(self, tag: str, domain: str = "") -> tuple[Route, ...]:
        """Routes that match a task: those of its domain, else of its tag, else the fallback.

        >>> routing = Routing((Route("exact", domain="math", is_fallback=True), Route("tests", frozenset({"code"}))))
        >>> [routing.of(*task)[0].name for task in (("code",), ("code", "math"), ("chat",))]
        ['tests', 'exact', 'exact']
        """
        by_domain = tuple(route for route in self.routes if domain and route.domain == domain)
        by_tag = tuple(route for route in self.routes if route.takes(tag))
        return by_domain or by_tag or tuple(route for route in self.routes if route.is_fallback)

    def total(self, tag: str, own: float, scores: Mapping[str, float], domain: str = "") -> float:
        """Total reward of an answer, from the scenario's own reward and the matching rewards."""
        chosen = self.of(tag, domain)
        if not chosen:
            return own
        return sum((route.weight * scores[route.name] for route in chosen), self.own_weight(tag, domain) * own)

    def own_weight(self, tag: str, domain: str = "") -> float:
        """Weight of the scenario's own reward, and so of its turn rewards, for a task.

        >>> Routing((Route("exact"),)).own_weight(""), Routing((Route("exact", frozenset({"math"})),)).own_weight("")
        (0.0, 1.0)
        """
        if not self.of(tag, domain):
            return 1.0
        return self.own.weight if self.own is not None and self.own.takes(tag) else 0.0

    def parts(self, tag: str, own: float, scores: Mapping[str, float], domain: str = "") -> dict[str, float]:
        """Rewards that make up the total, before weighting.

        >>> Routing((Route("exact"),), Route(SCENARIO)).parts("", 9.0, {"exact": 1.0}), Routing().parts("", 9.0, {})
        ({'exact': 1.0, 'scenario': 9.0}, {'scenario': 9.0})
        """
        counts_own = not self.of(tag, domain) or (self.own is not None and self.own.takes(tag))
        return {**scores, **({SCENARIO: own} if counts_own else {})}


def domain_of(task: Task) -> str:
    """The `domain` in a task's data; empty if there is none."""
    domain = task.data.get("domain")
    return domain if isinstance(domain, str) else ""


ROUTE_KEYS = ("tags", "weight", "cache", "domain", "fallback")
SCORING = ("score", "score_batch", "close")
EXAMPLE = "write a name, and under it _target_: roost.rollout.rewards.math_answer.ExactAnswer"


@dataclass(frozen=True, slots=True)
class ConfiguredRewards:
    """Rewards of a run: the routing, local rewards, and configs of the remote ones."""

    routing: Routing = field(default_factory=Routing)
    local: Mapping[str, Reward] = field(default_factory=dict)
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def make_rewards(config: Any, where: Where, findings: Findings, elsewhere: Collection[str] = ()) -> ConfiguredRewards:
    """Create the rewards of a config; for those in `elsewhere`, which run in workers, only check the keys.

    >>> built = make_rewards(
    ...     {"exact": {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer", "tags": "math", "find": "boxed"}},
    ...     Where(path=("train", "rewards")),
    ...     Findings(),
    ... )
    >>> built.routing.routes
    (Route(name='exact', tags=frozenset({'math'}), weight=1.0, domain='', is_fallback=False, is_cached=False),)
    """
    if not isinstance(config, Mapping):
        findings.error("RST-A004", where, "is not a mapping of rewards", f"it is {shown(config)}", EXAMPLE)
        return ConfiguredRewards()
    routes: list[Route] = []
    own: Route | None = None
    local: dict[str, Reward] = {}
    for name, keys in config.items():
        here = where.under(str(name))
        if not isinstance(keys, Mapping):
            findings.error("RST-A004", here, "is not a reward", f"it is {shown(keys)}", EXAMPLE)
            continue
        route = _route(str(name), keys, here, findings)
        if name == SCENARIO and "_target_" not in keys:
            own = route
            _check_scenario(keys, here, findings)
            continue
        routes.append(route)
        make = _checked_call(keys, here, findings)
        if make is not None and name not in elsewhere:
            built = _built(str(keys["_target_"]), make, here, findings)
            if built is not None:
                local[str(name)] = built
    sent = {route.name: config[route.name] for route in routes if route.name in elsewhere}
    return ConfiguredRewards(Routing(tuple(routes), own), local, sent)


def make_reward(name: str, keys: Mapping[str, Any]) -> Reward:
    """Create one reward of a config, in a reward worker. Raise ConfigError if that fails."""
    findings = Findings()
    built = make_rewards({name: keys}, Where(path=("rewards",)), findings)
    findings.raise_errors()
    return built.local[name]


# Routing ------------------------------------------------------------------------------------------------------------


def _route(name: str, keys: Mapping[str, Any], where: Where, findings: Findings) -> Route:
    flags = {key: keys.get(key, False) for key in ("fallback", "cache")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            fix = f"write {key}: true or {key}: false"
            findings.error("RST-C027", where.under(key), f"is {shown(value)}; it must be true or false", fix=fix)
    domain = keys.get("domain") or ""
    if not isinstance(domain, str):
        fix = "write the word that the column `domain` of its tasks has"
        findings.error("RST-C028", where.under("domain"), f"is {shown(domain)}; it must be a word", fix=fix)
        domain = ""
    return Route(
        name,
        _tags(keys.get("tags"), bool(domain), where, findings),
        _weight(keys.get("weight", 1.0), where, findings),
        domain,
        is_fallback=flags["fallback"] is True,
        is_cached=flags["cache"] is True,
    )


def _tags(written: Any, has_domain: bool, where: Where, findings: Findings) -> frozenset[str]:
    tags = [written] if isinstance(written, str) else [] if written is None else written
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) and tag for tag in tags):
        fix = "write a tag, or a list of tags; leave tags out for all tasks"
        findings.error("RST-A015", where.under("tags"), "are not tags", f"they are {shown(written)}", fix)
        return frozenset()
    if written is not None and not tags and not has_domain:
        fix = "leave tags out for all tasks, or the reward"
        findings.error("RST-A015", where.under("tags"), "is an empty list", "it would score no task", fix)
    return frozenset(tags)


def _weight(written: Any, where: Where, findings: Findings) -> float:
    if isinstance(written, bool) or not isinstance(written, int | float) or not math.isfinite(written):
        fix = "write a number; one below 0 is a penalty"
        findings.error("RST-A016", where.under("weight"), "is not a weight", f"it is {shown(written)}", fix)
        return 1.0
    return float(written)


def _check_scenario(keys: Mapping[str, Any], where: Where, findings: Findings) -> None:
    known = ("tags", "weight")
    for key in keys:
        if key not in known:
            why = f"the scenario's own reward has {', '.join(known)}"
            fix = did_you_mean(key, (*known, "_target_")) or "remove it"
            findings.error("RST-A006", where.under(str(key)), "is not a key here", why, fix)


# Columns of the data that rewards read ------------------------------------------------------------------------------


def check_answers(
    config: Mapping[str, Any], routing: Routing, tasks: Iterable[tuple[str, Task]], where: Where, findings: Findings
) -> None:
    """Report data that rewards cannot read: values of the wrong kind, and columns that no task has.

    `tasks` are some tasks with their places; `where` is the place of the data.
    """
    readers = {route.name: _columns_read(config[route.name]) for route in routing.routes}
    without: dict[tuple[str, str], list[tuple[str, Task]]] = {}  # tasks without a value, by reward and column
    with_value: set[tuple[str, str]] = set()  # rewards and columns for which a task has a value
    reported: set[tuple[str, str]] = set()
    for place, task in tasks:
        for route in routing.of(task.tag, domain_of(task)):
            for column, check in readers[route.name].items():
                key, value = (route.name, column), task.data.get(column)
                if value is None:
                    without.setdefault(key, []).append((place, task))
                    continue
                with_value.add(key)
                why = check(value)
                if why and key not in reported:
                    fix = "correct the row, or name another column as answer in the data"
                    what = f"{place}: {column} {why}"
                    DataError("RST-T089", what, f"reward {route.name} reads it", fix, "answer").report(where, findings)
                    reported.add(key)
    for (name, column), lacking in without.items():
        place, task = lacking[0]
        if (name, column) in with_value:
            what = f"{counted(len(lacking), 'row')} without {column}, which reward {name} reads, such as {place}"
            findings.warn("RST-T091", where, what, "their samples fail and are skipped", "correct or remove the rows")
            continue
        columns = [str(each) for each in task.data]
        fix = did_you_mean(column, columns)
        if column in ("answer", TRUTH):
            near = fix.removeprefix("did you mean ").removesuffix("?") or "COLUMN"
            override = {"data.train_files": "+train.data.answer=", "--dataset_name": "train.data.answer="}
            fix = f"name the column of the answers: {override.get(where.key_path, 'train.data.answer: ')}{near}"
        what = f"{place} has no {column}, which reward {name} reads"
        why = f"no row that was looked at has a value for it; the columns are {', '.join(columns)}"
        findings.error("RST-T090", where, what, why, fix or f"rename the column that has it to {column}")


def _columns_read(keys: Mapping[str, Any]) -> dict[str, Callable[[Any], str]]:
    """Columns that a reward reads, by its class and the config's keys."""
    target = located(str(keys["_target_"]))
    reads: Reads = getattr(target, "reads", {})
    callables = inspect.getmro(target)[:-1] if isinstance(target, type) else (target,)
    signatures = [inspect.signature(one).parameters for one in callables] if reads else []
    found = {}
    for name, check in reads.items():
        # A subclass may pass keys on to its base class; a name that no class takes is that of a column.
        default = next((each[name].default for each in signatures if name in each), name)
        column = keys.get(name, default)
        if isinstance(column, str):
            found[column] = check
    return found


# Creating a reward --------------------------------------------------------------------------------------------------


def _checked_call(keys: Mapping[str, Any], where: Where, findings: Findings) -> Callable[[], Any] | None:
    """Return a function that creates the reward, if `_target_` and the keys are valid."""
    written = keys.get("_target_")
    if not isinstance(written, str) or not written:
        why = f"it is {shown(written)}" if "_target_" in keys else ""
        findings.error("RST-A005", where.under("_target_"), "names no class or function", why, EXAMPLE)
        return None
    own = {str(key): value for key, value in keys.items() if key not in ("_target_", *ROUTE_KEYS)}
    try:
        target = located(written)
    except NotLocated as error:
        fix = did_you_mean(error.part, error.known)
        fix = fix or "name a class or function in a file of this folder, or of one in PYTHONPATH, as module.Name"
        findings.error("RST-A001", where.under("_target_"), f"{written} cannot be found", error.why, fix)
        return None
    if not callable(target):
        fix = "name a class, or a function"
        findings.error("RST-A002", where.under("_target_"), f"{written} is not a reward", f"it is {shown(target)}", fix)
        return None
    if not _keys_fit(written, target, own, where, findings):
        return None
    if hasattr(target, "check_config"):
        before = findings.num_errors
        target.check_config(own, where, findings)
        if findings.num_errors > before:
            return None
    return (lambda: target(**own)) if isinstance(target, type) else (lambda: Function(target, own))


def _keys_fit(written: str, target: Any, own: Mapping[str, Any], where: Where, findings: Findings) -> bool:
    """Return True if the class or function takes these keys."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some C classes have no signature; creating one will show errors
        return True
    is_function = not isinstance(target, type)
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [] if any(one.kind is one.VAR_KEYWORD for one in parameters) else [key for key in own if key not in names]
    for key in unknown:
        takes = [name for name in names if not (is_function and name in OFFERED)]
        why = f"it has {', '.join(takes)}" if takes else "it has none"
        fix = did_you_mean(key, [*takes, *ROUTE_KEYS]) or "remove it"
        findings.error("RST-A006", where.under(key), f"is not a key of {written}", why, fix)
    if unknown:
        return False
    try:
        if is_function:
            named_arguments(target, dict(own))
        else:
            inspect.signature(target).bind(**own)
    except TypeError as error:
        findings.error(
            "RST-A007", where, f"{written} cannot be called with these keys", str(error), "add the keys that it needs"
        )
        return False
    return True


def _built(written: str, make: Callable[[], Any], where: Where, findings: Findings) -> Reward | None:
    try:
        built = call(make)
    except Exception as error:  # anything a user's class raises
        fix = "correct the value that it names"
        findings.error(
            "RST-A010", where, f"{written} cannot be made from these keys", f"{type(error).__name__}: {error}", fix
        )
        return None
    there = {name for name in SCORING if inspect.iscoroutinefunction(getattr(built, name, None))}
    missing = ([] if there - {"close"} else ["score"]) + ([] if "close" in there else ["close"])
    if missing:
        why = f"it has no asynchronous {', '.join(missing)}"
        fix = "see roost.rollout.rewards.reward.Reward"
        if missing == ["close"]:
            fix = "write async def close(self): pass, or release there what the reward holds"
        findings.error("RST-A003", where, f"{written} is not a reward", why, fix)
        return None
    reward: Reward = built
    return reward
