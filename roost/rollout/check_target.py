"""Resolve dotted paths in configs, and check their keys before anything is created."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from roost.config.findings import Findings, Where, did_you_mean, shown


class NotLocated(ValueError):
    """A dotted path that cannot be resolved, with the reason, the failing part and the names that exist."""

    def __init__(self, target: str, why: str, part: str = "", known: Iterable[str] = ()) -> None:
        super().__init__(f"{target} is not found: {why}")
        self.why, self.part, self.known = why, part, tuple(known)


def located(target: str) -> Any:
    """Return the object that a dotted path names.

    >>> located("collections.Counter.update").__qualname__
    'Counter.update'
    >>> located("collections.Cuonter")
    Traceback (most recent call last):
        ...
    roost.rollout.check_target.NotLocated: collections.Cuonter is not found: collections has no Cuonter
    """
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts):
        raise NotLocated(target, "it is not a dotted path")
    found: Any = _imported(target, parts[0], parts[0], _here())
    for count, part in enumerate(parts[1:], start=2):
        name = ".".join(parts[:count])
        inside = _attribute(target, found, name, part)
        if inside is not None or not isinstance(found, ModuleType):
            found = inside
        else:
            found = _imported(target, name, part, _public(found))
    return found


def _attribute(target: str, found: Any, name: str, part: str) -> Any:
    """Return an attribute of a module or class; None if it may still be a submodule."""
    try:
        return getattr(found, part)
    except AttributeError:
        if isinstance(found, ModuleType):
            return None
        raise NotLocated(target, f"{name.rpartition('.')[0]} has no {part}", part, _public(found)) from None
    except Exception as error:  # a package that imports its members lazily
        raise NotLocated(target, f"importing {name} raises {type(error).__name__}: {error}") from error


def _imported(target: str, name: str, part: str, known: Iterable[str]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.rpartition(".")[0]
        if error.name == name or error.name is None or error.name.startswith(f"{name}."):
            why = f"{package} has no {part}" if package else f"there is no module {name}"
            raise NotLocated(target, why, part, known) from error
        raise NotLocated(target, f"{name} imports {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:  # anything a user's module raises
        raise NotLocated(target, f"importing {name} raises {type(error).__name__}: {error}") from error


def _here() -> list[str]:
    """Modules to suggest: Roost, and those of the working directory. Any installed module would be a guess."""
    return ["roost", *(module.name for module in pkgutil.iter_modules([str(Path.cwd())]))]


def _public(found: Any) -> list[str]:
    """Public names of a module, package or class, including submodules and `__all__`."""
    names = [*dir(found), *getattr(found, "__all__", ())]
    names += [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


TARGET, ARGUMENTS = "_target_", "_args_"


@dataclass(frozen=True, slots=True)
class Interface:
    """Methods that a class must have, and the arguments that Roost passes to it."""

    methods: tuple[str, ...]
    given: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()  # passed only to a class that takes them
    optional: tuple[str, ...] = ()  # passed only if Roost has a value; the config may set them, too


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the config that names a class; `example` is one of Roost's classes for it."""

    name: str
    interfaces: tuple[Interface, ...]  # any one of them
    example: str
    protocol: str  # the class that documents the interface

    @property
    def with_article(self) -> str:
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def check_target(config: Any, where: Where, part: Part, findings: Findings) -> bool:
    """Return True if a section can be instantiated, as far as can be checked without doing so.

    A class may add checks: `config_parts` lists nested sections that name classes, and
    `check_config(config, where, findings)` checks anything else.

    >>> part = Part("clock", (Interface(("strftime",)),), "datetime.time", "datetime.time")
    >>> findings = Findings()
    >>> check_target({"_target_": "datetime.tiem"}, Where(path=("clock",)), part, findings)
    False
    >>> print(*findings.found)
    error RST-A001: clock._target_: datetime.tiem is not found
      why: datetime has no tiem
      fix: did you mean time?
    """
    before = findings.num_errors
    target = _target(config, where, part, findings)
    if target is None:
        return findings.num_errors == before
    interface = next((each for each in part.interfaces if _lacks(target, each) == ()), None)
    if interface is None:
        why = " and ".join(f"it has no {', '.join(_lacks(target, each))}" for each in part.interfaces)
        findings.error(
            "RST-A003", where.under(TARGET), f"{config[TARGET]} is not {part.with_article}", why, f"see {part.protocol}"
        )
        return False
    if ARGUMENTS not in config:
        check_call(
            Call(part.name, config[TARGET], where.under(TARGET)), target, interface, own_keys(config), where, findings
        )
    for path, inner in getattr(target, "config_parts", {}).items():
        named = _nested(config, path)
        if named is not None:
            check_target(named, where.under(*path), inner, findings)
    if hasattr(target, "check_config"):
        target.check_config(config, where, findings)
    return findings.num_errors == before


def own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that a config passes to its class.

    >>> own_keys({"_target_": "my.Agent", "_recursive_": False, "hint": "be quick"})
    {'hint': 'be quick'}
    """
    return {str(key): value for key, value in config.items() if not _is_for_hydra(str(key))}


def _is_for_hydra(key: str) -> bool:
    return key.startswith("_") and key.endswith("_")


def _nested(config: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of keys; None if there is none."""
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


# The class ------------------------------------------------------------------------------------------------------------


def _target(config: Any, where: Where, part: Part, findings: Findings) -> Any:
    """Return the object that `_target_` names; None if there is none or nothing to resolve."""
    if not isinstance(config, Mapping):
        if any(_lacks(type(config), each) == () for each in part.interfaces):
            return None  # an instance passed from Python
        fix = f"write _target_: {part.example} under it, or a class of your own"
        findings.error("RST-A004", where, f"is not {part.with_article}", f"it is {shown(config)}", fix)
        return None
    written = config.get(TARGET)
    if not isinstance(written, str) or not written:
        hint = did_you_mean(TARGET, [str(key) for key in config if key != TARGET])
        near = hint.removeprefix("did you mean ").removesuffix("?")
        why = f"there is {near}" if near else "" if written is None else f"_target_ is {shown(written)}"
        fix = f"write _target_: {part.example}, or a class of your own"
        findings.error("RST-A005", where, f"the {part.name} has no class", why, fix)
        return None
    return find_callable(written, where.under(TARGET), "a class", findings)


def find_callable(written: str, where: Where, what: str, findings: Findings) -> Any:
    """Return the callable that a dotted path names; None with a finding if there is none."""
    try:
        found = located(written)
    except NotLocated as error:
        fix = did_you_mean(error.part, error.known)
        fix = fix or f"name {what} in a file of this folder, or of one in PYTHONPATH, as module.Name"
        findings.error("RST-A001", where, f"{written} is not found", error.why, fix)
        return None
    if not callable(found):
        findings.error("RST-A002", where, f"{written} is not {what}", f"it is {shown(found)}", f"name {what}")
        return None
    return found


def _lacks(target: Any, interface: Interface) -> tuple[str, ...]:
    """Methods that a class lacks; empty for a function, as its return type is unknown."""
    if not isinstance(target, type):
        return ()
    return tuple(name for name in interface.methods if not callable(getattr(target, name, None)))


# Its keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """The callable to check: its role, its dotted path, and the position of that path."""

    what: str
    written: str
    where: Where


def check_call(
    call: Call, target: Any, interface: Interface, keys: Mapping[str, Any], where: Where, findings: Findings
) -> None:
    """Report keys that are missing, set by Roost itself, or unknown; `where` is the position of the keys."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (ValueError, TypeError):  # some C classes have no signature; creating one will show errors
        return
    named = {each.name: each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    why = f"Roost passes it to every {call.what}"
    for name in interface.given:
        if name not in named and not takes_any:
            findings.error(
                "RST-A008", call.where, f"{call.written} does not take {name}", why, f"add {name} to its parameters"
            )
    given = {*interface.given, *(name for name in interface.offered if name in named)}
    own = {name: each for name, each in named.items() if name not in given}
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in keys and name not in interface.optional:
            findings.error(
                "RST-A007", where, f"{name} is missing", f"{call.written} has no default for it", f"add {name}: ..."
            )
    for key in keys:
        if key in given:
            findings.error("RST-A009", where.under(key), f"{key} cannot be set", why, "leave it out")
        elif key not in own and not takes_any:
            takes = f"it takes {', '.join(own)}" if own else "it takes no keys"
            fix = did_you_mean(key, own) or "leave it out"
            findings.error("RST-A006", where.under(key), f"{key} is not a key of {call.written}", takes, fix)


SCENARIO = Part(
    "scenario",
    (Interface(("size", "task", "run_episode"), given=("tokenizer",)),),
    "roost.rollout.arithmetic.Arithmetic",
    "roost.rollout.episode.Scenario",
)
TASKS = Part(
    "source of tasks",
    (Interface(("size", "task")),),
    "roost.app_world.serving.tasks.AppWorldTasks",
    "roost.rollout.agents.scenario.TaskSource",
)
ENVIRONMENT = Part(
    "class of environments",
    (Interface(("open", "close"), optional=("hardware",)),),
    "roost.app_world.serving.client.AppWorldEnvironments",
    "roost.rollout.environments.environment.Environments",
)
AGENT = Part(
    "agent",
    (
        Interface(("run_episode",), given=("task",), offered=("recorder",)),
        Interface(("next_code_block",), given=("task", "llm")),
    ),
    "roost.rollout.agents.react.ReactCoder",
    "roost.rollout.agents.agent.Agent, and roost.rollout.agents.appworld_agent.AppworldAgent",
)
TOOL = Part(
    "tool",
    (Interface(("call", "close")),),
    "roost.rollout.environments.tools.Search",
    "roost.rollout.environments.tools.Tool",
)
