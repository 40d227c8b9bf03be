"""Device lists written as Python expressions, and interpolations (`${...}`) between values of a config.

Expressions are evaluated by a whitelist, never by `eval`: lists, tuples, whole numbers, `range(...)`, `list(...)` of
those, and arithmetic. Length, size and depth are capped, so that none takes much time or memory.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from roost.config.findings import shown
from roost.config.ranks import RankSyntaxError, parse_rank_list
from roost.config.source import Unresolved

MAX_EXPRESSION = 20_000  # characters
MAX_DEVICES = 4_194_304
MAX_NESTING = 50
_FIX = "write list(range(0,8)), [0, 1, 2], a sum of those, or a rank range such as 0-7"


class ExpressionError(ValueError):
    """A device expression that cannot be read, with the code of the finding and the fix."""

    def __init__(self, code: str, what: str, fix: str = _FIX) -> None:
        super().__init__(f"{what}; {fix}")
        self.code, self.what, self.fix = code, what, fix


def parse_devices(value: object) -> Sequence[int]:
    """Device numbers in the order written, from an expression, a list of numbers, one number, or a rank range.

    >>> parse_devices("list(range(0,4))"), parse_devices([3, 1]), parse_devices("0-2,5")
    (range(0, 4), [3, 1], [0, 1, 2, 5])
    >>> parse_devices("list(range(0,2)) + [7]"), parse_devices("list(range(0,2*4))")
    ([0, 1, 7], range(0, 8))
    """
    if isinstance(value, str):
        return _from_text(value)
    return _checked(value if isinstance(value, list | tuple | range) else [value])


def _from_text(text: str) -> Sequence[int]:
    if len(text) > MAX_EXPRESSION:
        raise ExpressionError(
            "RST-N020", f"an expression has {len(text):,} characters; at most {MAX_EXPRESSION:,} are read"
        )
    if not any(sign in text for sign in "([+"):
        return _from_ranks(text)
    try:
        found = _evaluate(ast.parse(text.strip(), mode="eval").body, 0)
    except ExpressionError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("RST-N024", f"{shown(text)} is not an expression Roost reads") from None
    return _checked([found] if isinstance(found, int) else found)


def _from_ranks(text: str) -> Sequence[int]:
    try:
        ranges = parse_rank_list(text)
    except RankSyntaxError as error:
        raise ExpressionError(error.code, error.what) from None
    if ranges is None:
        raise ExpressionError("RST-N025", "'all' does not say how many devices there are")
    if sum(len(part) for part in ranges) > MAX_DEVICES:
        raise ExpressionError("RST-N026", f"{shown(text)} is more than {MAX_DEVICES:,} devices", "name fewer devices")
    return ranges[0] if len(ranges) == 1 else [rank for part in ranges for rank in part]


def _evaluate(node: ast.expr, depth: int) -> int | Sequence[int]:
    if depth > MAX_NESTING:
        raise ExpressionError("RST-N020", f"the expression is nested more than {MAX_NESTING} deep")
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _number(_evaluate(operand, depth + 1))
            return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return _items(items, depth)
        case ast.BinOp(op=ast.Add()):
            return _sum(node, depth)
        case ast.BinOp(left=left, op=ast.Sub() | ast.Mult() | ast.FloorDiv() as sign, right=right):
            return _computed(sign, _number(_evaluate(left, depth + 1)), _number(_evaluate(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in ("range", "list", "tuple"):
            values = [_evaluate(argument, depth + 1) for argument in arguments]
            return _range(values) if name == "range" else _listed(name, values)
    raise ExpressionError("RST-N024", f"{shown(ast.unparse(node))} is not allowed in a device list")


def _items(items: list[ast.expr], depth: int) -> list[int]:
    """The items of a list; `*range(...)` among them stands for several."""
    found: list[int] = []
    for item in items:
        value = _evaluate(item.value if isinstance(item, ast.Starred) else item, depth + 1)
        found.extend(_listed("*", [value]) if isinstance(item, ast.Starred) else [_number(value)])
        if len(found) > MAX_DEVICES:
            raise ExpressionError("RST-N026", f"more than {MAX_DEVICES:,} devices", "name fewer devices")
    return found


def _sum(node: ast.BinOp, depth: int) -> int | Sequence[int]:
    """The sum a + b + c ..., without recursion, because Python nests a long sum deeply."""
    terms: list[ast.expr] = []
    rest: ast.expr = node
    while isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Add):
        terms.append(rest.right)
        rest = rest.left
    total: int | list[int] | None = None
    for term in [rest, *reversed(terms)]:
        value = _evaluate(term, depth + 1)
        if total is None:
            total = value if isinstance(value, int) else list(value)
        elif isinstance(total, int) and isinstance(value, int):
            total = _bounded(total + value)
        elif isinstance(total, int) or isinstance(value, int):
            raise ExpressionError("RST-N024", "a number is added to a list")
        elif len(total) + len(value) > MAX_DEVICES:
            raise ExpressionError("RST-N026", f"more than {MAX_DEVICES:,} devices", "name fewer devices")
        else:
            total.extend(value)
    return total if total is not None else []


def _computed(sign: ast.operator, left: int, right: int) -> int:
    if isinstance(sign, ast.Mult):
        return _bounded(left * right)
    if isinstance(sign, ast.Sub):
        return _bounded(left - right)
    if right == 0:
        raise ExpressionError("RST-N024", "a number is divided by 0")
    return left // right


def _range(values: list[int | Sequence[int]]) -> range:
    numbers = [_number(value) for value in values]
    if not 1 <= len(numbers) <= 3 or (len(numbers) == 3 and numbers[2] == 0):
        raise ExpressionError(
            "RST-N024",
            "range takes (stop), (start, stop) or (start, stop, step); step must not be 0",
            "write range(0, 8)",
        )
    devices = range(*numbers)
    if len(devices) > MAX_DEVICES:
        raise ExpressionError(
            "RST-N026", f"{shown(devices)} is more than {MAX_DEVICES:,} devices", "name fewer devices"
        )
    return devices


def _listed(name: str, values: list[int | Sequence[int]]) -> Sequence[int]:
    if not values:
        return []
    if len(values) != 1 or isinstance(values[0], int):
        raise ExpressionError("RST-N024", f"{name} takes one list or range")
    return values[0]


def _number(value: int | Sequence[int]) -> int:
    if not isinstance(value, int):
        raise ExpressionError("RST-N024", "a list is given where a number is needed")
    return value


def _bounded(number: int) -> int:
    if abs(number) > 10**9:
        raise ExpressionError("RST-N019", f"{shown(number)} is beyond any cluster", "use smaller numbers")
    return number


def _checked(devices: Sequence[object]) -> Sequence[int]:
    """The devices, if all are whole numbers of at least 0."""
    if len(devices) > MAX_DEVICES:
        raise ExpressionError("RST-N026", f"more than {MAX_DEVICES:,} devices", "name fewer devices")
    if isinstance(devices, range):
        wrong: list[object] = [end for end in (devices[0], devices[-1]) if end < 0] if devices else []
        checked: Sequence[int] = devices
    else:
        wrong = [
            item for item in devices if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= 10**9
        ]
        checked = [item for item in devices if isinstance(item, int)]
    if wrong:
        raise ExpressionError("RST-N027", f"{shown(wrong[0])} is not a device number", "number devices from 0 upwards")
    return checked


Number = int | float


def _compute_numbers(compute: Callable[[Number, Number], Number], one: Any, other: Any) -> Number:
    if not all(isinstance(value, int | float) for value in (one, other)):
        raise TypeError(f"{one!r} and {other!r} are not both numbers")
    return compute(one, other)


def safe_min(*values: Any) -> Any:
    """The smallest of the values that are not null.

    >>> safe_min(None, 3, 2)
    2
    """
    return min((value for value in values if value is not None), default=None)


RESOLVERS: dict[str, Callable[..., Any]] = {
    "multiply": partial(_compute_numbers, operator.mul),
    "divide": partial(_compute_numbers, operator.truediv),
    "int_div": partial(_compute_numbers, operator.floordiv),
    "subtract": partial(_compute_numbers, operator.sub),
    "not": operator.not_,
    "safe_min": safe_min,
    "add": partial(_compute_numbers, operator.add),  # these five are NeMo-RL's
    "sub": partial(_compute_numbers, operator.sub),
    "mul": partial(_compute_numbers, operator.mul),
    "div": partial(_compute_numbers, operator.truediv),
    "max": partial(_compute_numbers, max),
}


def register() -> None:
    """Register `RESOLVERS` with OmegaConf, without replacing resolvers of the same names."""
    from omegaconf import OmegaConf

    for name, resolver in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)


# OmegaConf resolves a reference again each time it is used, so that values that double at each level would never end.
MAX_STEPS = 5_000  # references followed for all values together
MAX_STEPS_OF_ONE = 500  # and for one value
MAX_IN_ONE_VALUE = 50  # interpolations written in one value
MAX_CHAIN = 100  # references that lead to one another
_NAMES = re.compile(r"[^\W\d]\w*")


def resolve(values: dict[Any, Any]) -> dict[Any, Any]:
    """The values with every interpolation resolved or replaced by an `Unresolved`.

    >>> resolve({"a": "${b}", "b": 2, "c": "${nowhere}"})["a"]
    2
    """
    if not _has_interpolation(values):
        return values
    with suppress(_NotPlain):
        return _map_mapping(values, _Plain(values).look_up)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    failures = (OmegaConfBaseException, ValueError, TypeError, KeyError, RecursionError)
    register()
    try:
        config: Any = OmegaConf.create(_wrapped(values), flags={"allow_objects": True})
    except failures as error:
        reason = str(error).splitlines()[0]
        return _map_mapping(values, lambda path, text: Unresolved(text, reason))
    weights = _Weights(values)
    steps_left = MAX_STEPS

    def look_up(path: tuple[Any, ...], text: str) -> Any:
        nonlocal steps_left
        if text.count("${") > MAX_IN_ONE_VALUE:
            return Unresolved(text, f"it holds more than {MAX_IN_ONE_VALUE} interpolations")
        weight = weights.of(text)
        if weight > min(steps_left, MAX_STEPS_OF_ONE):
            return Unresolved(text, "it leads through too many references")
        steps_left -= weight
        try:
            found = config
            for key in path:
                found = found[key]
            found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
            if isinstance(found, str) and _Wrapped.MARK in found:
                return Unresolved(text, "it refers to a value that is not known")
            return _unwrapped(found)
        except failures as error:
            unset = re.search(r"Environment variable '(\w+)' not found", str(error))
            if unset is not None:
                return Unresolved(text, f"{unset[1]} is not set", f"give it: {unset[1]}=... before roost")
            return Unresolved(text, str(error).splitlines()[0])

    return _map_mapping(values, look_up)


class _NotPlain(Exception):
    """An interpolation that only OmegaConf can resolve."""


class _Plain:
    """Resolves references such as `${a.b}` and `${.b}`, and resolvers of references and numbers.

    Most configs have no other interpolations, and OmegaConf takes a tenth of a second to import.
    """

    REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
    CALL = re.compile(r"\$\{(\w+):([^{}]*(?:\$\{[^{}:]*\}[^{}]*)*)\}")
    NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?")
    MAX_DEPTH = 20  # of references that lead to others

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.values = values
        self.steps_left = MAX_STEPS_OF_ONE

    def look_up(self, path: tuple[Any, ...], text: str, depth: int = 0) -> Any:
        self.steps_left -= 1
        if depth > self.MAX_DEPTH or not self.steps_left:
            raise _NotPlain
        reference = self.REFERENCE.fullmatch(text)
        if reference is not None:
            return self._referred(path, reference, depth)
        call = self.CALL.fullmatch(text)
        if call is None or call[1] not in RESOLVERS:
            raise _NotPlain
        parts = [part.strip() for part in call[2].split(",")]
        try:
            return RESOLVERS[call[1]](*(self._argument(path, part, depth) for part in parts))
        except (ArithmeticError, ValueError, TypeError) as error:
            raise _NotPlain from error

    def _argument(self, path: tuple[Any, ...], part: str, depth: int) -> Any:
        number = self.NUMBER.fullmatch(part)
        if number is not None:
            return float(part) if number[1] else int(part)
        return self.look_up(path, part, depth + 1)

    def _referred(self, path: tuple[Any, ...], reference: re.Match[str], depth: int) -> Any:
        dots = len(reference[1])
        if dots > len(path):
            raise _NotPlain
        target = (*(path[: len(path) - dots] if dots else ()), *reference[2].split("."))
        found: Any = self.values
        for key in target:
            if not isinstance(found, Mapping) or key not in found:
                raise _NotPlain
            found = found[key]
        if isinstance(found, str):
            if found == "???" or "\\" in found:
                raise _NotPlain
            return self.look_up(target, found, depth + 1) if "${" in found else found
        if found is None or isinstance(found, bool | int | float):
            return found
        raise _NotPlain


class _Wrapped:
    """Wraps an `Unresolved` for OmegaConf, which would convert a dataclass to a config."""

    MARK = "\0unresolved\0"

    def __init__(self, value: Unresolved) -> None:
        self.value = value

    def __str__(self) -> str:
        return self.MARK


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _wrapped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_wrapped(inner) for inner in value]
    return _Wrapped(value) if isinstance(value, Unresolved) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unwrapped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_unwrapped(inner) for inner in value]
    return value.value if isinstance(value, _Wrapped) else value


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(inner) for inner in value.values())
    return isinstance(value, list | tuple) and any(_has_interpolation(inner) for inner in value)


def _map_mapping(values: Mapping[Any, Any], change: Any, path: tuple[Any, ...] = ()) -> dict[Any, Any]:
    return {key: _map_text(inner, change, (*path, key)) for key, inner in values.items()}


def _map_text(value: Any, change: Any, path: tuple[Any, ...] = ()) -> Any:
    """The value with `change` applied to each text that has an interpolation."""
    if isinstance(value, str):
        return change(path, value) if "${" in value else value
    if isinstance(value, Mapping):
        return _map_mapping(value, change, path)
    if isinstance(value, list | tuple):
        return [_map_text(inner, change, (*path, index)) for index, inner in enumerate(value)]
    return value


class _Weights:
    """Upper bound on the references that OmegaConf follows to resolve a text.

    References are matched by their last name only, whether absolute, relative or in a resolver: a name weighs as much
    as the heaviest value that any key of this name has.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.texts: dict[str, set[str]] = {}
        self.known: dict[str, int] = {}
        _map_mapping(values, self._note)

    def _note(self, path: tuple[Any, ...], text: str) -> str:
        for part in path:
            if isinstance(part, str):
                self.texts.setdefault(part, set()).add(text)
        return text

    def of(self, text: str, depth: int = 0) -> int:
        if text in self.known:
            return self.known[text]
        if depth > MAX_CHAIN:
            return MAX_STEPS_OF_ONE + 1
        self.known[text] = 1  # until it is weighed; OmegaConf refuses a text that refers to itself
        total = 1
        for inner in text.split("${")[1:]:
            names = set(_NAMES.findall(inner.split("}")[0])[-1:])
            weights = [
                self.of(other, depth + 1) for name in names for other in self.texts.get(name, ()) if other != text
            ]
            total += max(weights, default=0)
            if total > MAX_STEPS_OF_ONE:
                break
        self.known[text] = min(total, MAX_STEPS_OF_ONE + 1)
        return self.known[text]
