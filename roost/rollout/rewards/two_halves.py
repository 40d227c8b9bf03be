"""The two halves of a unit test: the test in one sandbox, the code that it tries in another.

The code sees the arguments of its functions and nothing else: no expected value, no comparison, no verdict is ever in
its process. What it gives back arrives as plain values, or as a stand-in for an object that stays where it is; so an
object that calls itself equal to everything is equal to nothing.

This file is run as a program in both sandboxes and must stay without imports beyond the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

Exchange = Callable[[Any], Any]  # say something to the other half, and hear what it says then
LARGE = 2**53  # larger integers are not exact in every JSON parser
PACKAGES = {"np": "numpy", "pd": "pandas", "numpy": "numpy", "pandas": "pandas"}


class Half:
    """One end of the connection: sends plain values, keeps other objects, and executes requests of the other end."""

    def __init__(self, exchange: Exchange, serves_all: bool) -> None:
        self._exchange = exchange
        self._serves_all = serves_all  # the half of the tests only lets functions be called that it handed over
        self._kept: list[Any] = []
        self.raised: dict[str, type[Exception]] = {}  # classes that stand for the other half's

    def pack(self, value: Any) -> Any:
        """Encode a value as JSON, ignoring subclasses."""
        if isinstance(value, StandIn):
            return ["yours", object.__getattribute__(value, "_number")]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if abs(value) < LARGE else ["int", hex(value)]
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        kind: Any
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):  # its own way to iterate is nothing to us, if it has one
                return [kind.__name__, [self.pack(one) for one in kind.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self.pack(key), self.pack(one)] for key, one in dict.items(value)]]
        if isinstance(value, bytes | bytearray):
            return [("bytes" if isinstance(value, bytes) else "bytearray"), bytes(value).hex()]
        if isinstance(value, complex | Decimal | Fraction):
            return [type(value).__name__.lower(), str(value)]
        if hasattr(value, "tolist") and hasattr(value, "dtype"):
            return self.pack(value.tolist())
        self._kept.append(value)
        return ["mine", len(self._kept) - 1]

    def unpack(self, packed: Any) -> Any:
        """Decode a value; only plain classes are created."""
        if not isinstance(packed, list):
            return packed
        kind, content = packed
        if kind in ("list", "tuple", "set", "frozenset"):
            values = [self.unpack(one) for one in content]
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](values)
        if kind == "dict":
            return {self.unpack(key): self.unpack(one) for key, one in content}
        if kind == "mine":
            return StandIn(self, content)
        if kind == "yours":
            return self._kept[content]
        readers: dict[str, Callable[[str], Any]] = {
            "int": lambda text: int(text, 16),
            "bytes": bytes.fromhex,
            "bytearray": bytearray.fromhex,
            "complex": complex,
            "decimal": Decimal,
            "fraction": Fraction,
        }
        return readers[kind](content)

    def ask(self, what: str, number: int, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None) -> Any:
        """Send a request for a kept object; arguments that the other half changed are changed here as well."""
        packed = [self.pack(one) for one in arguments]
        answer = self._exchange({"do": what, "of": number, "with": packed, "named": self.pack(named or {})})
        while "do" in answer:  # it calls a function that was an argument, before it can answer
            answer = self._exchange(self.done(answer))
        if "raised" in answer:
            raise self._error(answer["raised"], str(answer["text"]))
        for place, after in answer["changed"]:
            _change(arguments[place], self.unpack(after))
        return self.unpack(answer["value"])

    def done(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Execute a request of the other half and return its result."""
        try:
            arguments = [self.unpack(one) for one in asked["with"]]
            value = self.pack(self._do(asked["do"], self._kept[asked["of"]], arguments, self.unpack(asked["named"])))
            changed = self._changed(asked["with"], arguments)
        except (Exception, SystemExit) as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"raised": names, "text": str(error)}
        return {"value": value, "changed": changed}

    def _do(self, what: str, kept: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        if what == "call":
            return kept(*arguments, **named)
        if not self._serves_all:
            raise PermissionError(what)
        if what == "get":
            return getattr(kept, arguments[0])
        if what == "set":
            return setattr(kept, *arguments)
        if what == "equal":
            return kept == arguments[0]
        if what == "less":
            return kept < arguments[0]
        return SPECIAL[what](kept, *arguments)

    def _changed(self, before: list[Any], arguments: list[Any]) -> list[Any]:
        places = [place for place, one in enumerate(arguments) if isinstance(one, list | dict | set | bytearray)]
        after = [[place, self.pack(arguments[place])] for place in places]
        return [[place, packed] for place, packed in after if packed != before[place]]

    def _error(self, names: list[str], text: str) -> Exception:
        """An error of the same kind, as far as that is known here; never one that ends the process."""
        for name in names:
            kind = self.raised.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(text)
                except TypeError:
                    continue  # some need more than a text
        return RuntimeError(f"{names[0]}: {text}")


class StandIn:
    """Proxy of an object of the other half: operations run there, except comparison with values."""

    def __init__(self, half: Half, number: int) -> None:
        object.__setattr__(self, "_half", half)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", arguments, named)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", (name, value))

    def __eq__(self, other: object) -> Any:
        return _ask(self, "equal", (other,)) is True if isinstance(other, StandIn) else NotImplemented

    def __lt__(self, other: object) -> Any:
        return _ask(self, "less", (other,)) is True if isinstance(other, StandIn) else NotImplemented


def _ask(stand_in: StandIn, what: str, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None) -> Any:
    half: Half = object.__getattribute__(stand_in, "_half")
    return half.ask(what, object.__getattribute__(stand_in, "_number"), arguments, named)


def _forwarding(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, name, arguments)


SPECIAL: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__getitem__": lambda kept, key: kept[key],
    "__setitem__": lambda kept, key, value: kept.__setitem__(key, value),
    "__delitem__": lambda kept, key: kept.__delitem__(key),
    "__iter__": iter,
    "__next__": next,
    "__str__": str,
    "__repr__": repr,
    "__bool__": bool,
    "__hash__": hash,
    "__enter__": lambda kept: kept.__enter__(),
    "__exit__": lambda kept, *error: kept.__exit__(None, None, None),
    "__instancecheck__": lambda kept, one: isinstance(one, kept),
}
for _name in SPECIAL:  # Python looks for these in the class alone
    setattr(StandIn, _name, _forwarding(_name))


def _change(original: Any, after: Any) -> None:
    if type(original) in (list, bytearray):
        original[:] = after
    elif type(original) in (dict, set):
        original.clear()
        original.update(after)


# The half of the code -----------------------------------------------------------------------------------------------


def serve(exchange: Exchange, code: str) -> None:
    """Run the code, send the names it defines, and execute requests of the tests."""
    half = Half(exchange, serves_all=True)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with contextlib.suppress(SystemExit):  # what it has defined by then is there
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    defined = {name: value for name, value in module.__dict__.items() if not name.startswith("_")}
    reply: Any = {
        "names": {name: half.pack(value) for name, value in defined.items() if not isinstance(value, types.ModuleType)},
        "modules": [name for name, value in defined.items() if isinstance(value, types.ModuleType)],
        "errors": {
            name: [kind.__name__ for kind in value.__mro__] for name, value in defined.items() if _is_error(value)
        },
    }
    while True:
        reply = half.done(exchange(reply))


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


# The half of the tests ----------------------------------------------------------------------------------------------


def tests_module(exchange: Exchange, setup: str, test: str, entry_points: Sequence[str]) -> types.ModuleType:
    """Run the text of tests with stand-ins for what the code defines; it raises where an assertion of it fails."""
    half = Half(exchange, serves_all=False)
    names = solution_names(half, exchange({"hello": True}), entry_points)
    solution = types.ModuleType("solution")
    solution.__dict__.update(names)
    tests = types.ModuleType("tests_of_solution")
    tests.__dict__.update(names)
    sys.modules.update({"solution": solution, "tests_of_solution": tests})
    exec(compile(setup, "setup.py", "exec", dont_inherit=True), tests.__dict__)
    exec(compile(test, "test.py", "exec", dont_inherit=True), tests.__dict__)
    return tests


def solution_names(half: Half, told: dict[str, Any], entry_points: Sequence[str]) -> dict[str, Any]:
    """Names of the solution that tests see; none that shadow builtins or standard library modules."""
    names: dict[str, Any] = {}
    for name in told["modules"]:
        if name in sys.stdlib_module_names or name in PACKAGES:
            names[name] = importlib.import_module(PACKAGES.get(name, name))
    for name, packed in told["names"].items():
        if name.startswith("_") or not name.isidentifier():
            continue  # which an honest half does not offer: with another __builtins__, asserts would call its functions
        is_reserved = hasattr(builtins, name) or name in sys.stdlib_module_names or name in PACKAGES
        if name in entry_points or not (entry_points or is_reserved):
            names[name] = half.unpack(packed)
    for name, kinds in told["errors"].items():
        if name in names:
            found = (getattr(builtins, kind, None) for kind in kinds)
            known = next((kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception)
            names[name] = half.raised[name] = type(name, (known,), {})
    return names
