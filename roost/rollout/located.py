"""What a dotted path names, and what it may have been meant to name."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


class NotLocated(ValueError):
    """A dotted path that names nothing: how far it goes, why no further, and the names that there are."""

    def __init__(self, target: str, why: str, part: str = "", known: Iterable[str] = ()) -> None:
        super().__init__(f"{target} is not found: {why}")
        self.why, self.part, self.known = why, part, tuple(known)


def located(target: str) -> Any:
    """The object that a dotted path names.

    >>> located("collections.Counter.update").__qualname__
    'Counter.update'
    >>> located("collections.Cuonter")
    Traceback (most recent call last):
        ...
    roost.rollout.located.NotLocated: collections.Cuonter is not found: collections has no Cuonter
    """
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts):
        raise NotLocated(target, "it is no dotted path")
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
    """What has this name in a module or class; None where a module may still have a module of that name."""
    try:
        return getattr(found, part)
    except AttributeError:
        if isinstance(found, ModuleType):
            return None
        raise NotLocated(target, f"{name.rpartition('.')[0]} has no {part}", part, _public(found)) from None
    except Exception as error:  # a package that imports what it lists when it is asked for
        raise NotLocated(target, f"importing {name} raises {type(error).__name__}: {error}") from error


def _imported(target: str, name: str, part: str, known: Iterable[str]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.rpartition(".")[0]
        if error.name == name or error.name is None or f"{error.name}".startswith(f"{name}."):
            why = f"{package} has no {part}" if package else f"there is no module {name}"
            raise NotLocated(target, why, part, known) from error
        raise NotLocated(target, f"{name} imports {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        raise NotLocated(target, f"importing {name} raises {type(error).__name__}: {error}") from error


def _here() -> list[str]:
    """Modules that users may mean: their own. Those of all that is installed would only be guesses."""
    return ["roost", *(module.name for module in pkgutil.iter_modules([str(Path.cwd())]))]


def _public(found: Any) -> list[str]:
    """The names that there are in a module, a package or a class; also those that it only promises."""
    names = [*dir(found), *getattr(found, "__all__", ())]
    names += [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]
