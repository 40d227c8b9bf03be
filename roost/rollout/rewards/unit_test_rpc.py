"""RPC between a unit test and the code under test, which run in separate sandboxes.

The code sees only the arguments of its functions: expected values, comparisons and the verdict never enter its process.
Results arrive as plain values, or as proxies of objects that stay in the sandbox of the code. An object whose `__eq__`
always returns True is therefore equal to no expected value.

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

Exchange = Callable[[Any], Any]  # sends a message to the other peer and returns its reply
LARGE = 2**53  # larger integers are not exact in every JSON parser
PACKAGES = {"np": "numpy", "pd": "pandas", "numpy": "numpy", "pandas": "pandas"}


class RpcPeer:
    """One end of the connection: sends plain values, keeps other objects, and executes requests of the other end."""

    def __init__(self, exchange: Exchange, serves_all: bool) -> None:
        self._exchange = exchange
        self._serves_all = serves_all  # False for the tests: the code may only call functions that they passed to it
        self._kept: list[Any] = []
        self.raised: dict[str, type[Exception]] = {}  # local classes for exceptions of the other peer

    def pack(self, value: Any) -> Any:
        """Encode a value as JSON, ignoring subclasses."""
        if isinstance(value, RemoteObject):
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
            if isinstance(value, kind):  # bypass an overridden __iter__
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
            return RemoteObject(self, content)
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

    def request(
        self, operation: str, number: int, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Send a request for a kept object; arguments that the other peer changed are changed here as well."""
        packed = [self.pack(one) for one in arguments]
        answer = self._exchange({"do": operation, "of": number, "with": packed, "named": self.pack(named or {})})
        while "do" in answer:  # it first calls a function that was an argument
            answer = self._exchange(self.execute(answer))
        if "raised" in answer:
            raise self._error(answer["raised"], str(answer["text"]))
        for place, after in answer["changed"]:
            _change(arguments[place], self.unpack(after))
        return self.unpack(answer["value"])

    def execute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request of the other peer and return its result."""
        try:
            arguments = [self.unpack(one) for one in request["with"]]
            value = self.pack(
                self._do(request["do"], self._kept[request["of"]], arguments, self.unpack(request["named"]))
            )
            changed = self._changed(request["with"], arguments)
        except (Exception, SystemExit) as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"raised": names, "text": str(error)}
        return {"value": value, "changed": changed}

    def _do(self, operation: str, kept: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        if operation == "call":
            return kept(*arguments, **named)
        if not self._serves_all:
            raise PermissionError(operation)
        if operation == "get":
            return getattr(kept, arguments[0])
        if operation == "set":
            return setattr(kept, *arguments)
        if operation == "equal":
            return kept == arguments[0]
        if operation == "less":
            return kept < arguments[0]
        return SPECIAL[operation](kept, *arguments)

    def _changed(self, before: list[Any], arguments: list[Any]) -> list[Any]:
        places = [place for place, one in enumerate(arguments) if isinstance(one, list | dict | set | bytearray)]
        after = [[place, self.pack(arguments[place])] for place in places]
        return [[place, packed] for place, packed in after if packed != before[place]]

    def _error(self, names: list[str], text: str) -> Exception:
        """Exception of the nearest class known here; never SystemExit or another that is not an Exception."""
        for name in names:
            kind = self.raised.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(text)
                except TypeError:
                    continue  # its constructor needs more than a message
        return RuntimeError(f"{names[0]}: {text}")


class RemoteObject:
    """Proxy of an object of the other peer: operations run there, except comparison with values."""

    def __init__(self, peer: RpcPeer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _request(self, "call", arguments, named)

    def __getattr__(self, name: str) -> Any:
        return _request(self, "get", (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        _request(self, "set", (name, value))

    def __eq__(self, other: object) -> Any:
        return _request(self, "equal", (other,)) is True if isinstance(other, RemoteObject) else NotImplemented

    def __lt__(self, other: object) -> Any:
        return _request(self, "less", (other,)) is True if isinstance(other, RemoteObject) else NotImplemented


def _request(
    remote: RemoteObject, operation: str, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
) -> Any:
    peer: RpcPeer = object.__getattribute__(remote, "_peer")
    return peer.request(operation, object.__getattribute__(remote, "_number"), arguments, named)


def _forwarding(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _request(self, name, arguments)


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
for _name in SPECIAL:  # Python looks special methods up on the class
    setattr(RemoteObject, _name, _forwarding(_name))


def _change(original: Any, after: Any) -> None:
    if type(original) in (list, bytearray):
        original[:] = after
    elif type(original) in (dict, set):
        original.clear()
        original.update(after)


# The code under test ------------------------------------------------------------------------------------------------


def serve(exchange: Exchange, code: str) -> None:
    """Run the code, send the names it defines, and execute requests of the tests."""
    peer = RpcPeer(exchange, serves_all=True)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with contextlib.suppress(SystemExit):  # names defined before the exit can be used
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    defined = {name: value for name, value in module.__dict__.items() if not name.startswith("_")}
    reply: Any = {
        "names": {name: peer.pack(value) for name, value in defined.items() if not isinstance(value, types.ModuleType)},
        "modules": [name for name, value in defined.items() if isinstance(value, types.ModuleType)],
        "errors": {
            name: [kind.__name__ for kind in value.__mro__] for name, value in defined.items() if _is_error(value)
        },
    }
    while True:
        reply = peer.execute(exchange(reply))


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


# The tests ----------------------------------------------------------------------------------------------------------


def tests_module(exchange: Exchange, setup: str, test: str, entry_points: Sequence[str]) -> types.ModuleType:
    """Run the tests with proxies for the names that the code defines; raises if an assertion fails."""
    peer = RpcPeer(exchange, serves_all=False)
    names = solution_names(peer, exchange({"hello": True}), entry_points)
    solution = types.ModuleType("solution")
    solution.__dict__.update(names)
    tests = types.ModuleType("tests_of_solution")
    tests.__dict__.update(names)
    sys.modules.update({"solution": solution, "tests_of_solution": tests})
    exec(compile(setup, "setup.py", "exec", dont_inherit=True), tests.__dict__)
    exec(compile(test, "test.py", "exec", dont_inherit=True), tests.__dict__)
    return tests


def solution_names(peer: RpcPeer, defined: dict[str, Any], entry_points: Sequence[str]) -> dict[str, Any]:
    """Names of the solution that tests see; none that shadow builtins or standard library modules."""
    names: dict[str, Any] = {}
    for name in defined["modules"]:
        if name in sys.stdlib_module_names or name in PACKAGES:
            names[name] = importlib.import_module(PACKAGES.get(name, name))
    for name, packed in defined["names"].items():
        if name.startswith("_") or not name.isidentifier():
            continue  # never sent by `serve`; a forged __builtins__ would run its functions in the tests
        is_reserved = hasattr(builtins, name) or name in sys.stdlib_module_names or name in PACKAGES
        if name in entry_points or not (entry_points or is_reserved):
            names[name] = peer.unpack(packed)
    for name, kinds in defined["errors"].items():
        if name in names:
            found = (getattr(builtins, kind, None) for kind in kinds)
            known = next((kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception)
            names[name] = peer.raised[name] = type(name, (known,), {})
    return names
