"""Shell arithmetic on whole numbers, with the operators and precedence of bash; nothing else is evaluated."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

MAX_EXPRESSION = 2000  # characters
MAX_SHIFT = 62
MAX_DEPTH = 60
_BITS = 64  # of a number in bash
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|(?:\$?\{?([A-Za-z_]\w*)\}?)"
    r"|(<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^<>=!~?:,()]))"
)
# Binary operators by rising precedence.
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda one, two: one << _exponent(two), ">>": lambda one, two: one >> _exponent(two)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda one, two: _divided(one, two), "%": lambda one, two: _remainder(one, two)},
)
_BINARY = {name: function for level in _LEVELS for name, function in level.items()}
_ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_ASSIGNED = re.compile(
    r"([A-Za-z_]\w*)(\[[^\]]*\])?\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)(\[)?"
)


class NotKnown(ValueError):
    """The result depends on something that is not known."""


def assigned_names(expression: str) -> list[tuple[str, bool]]:
    """Names that an expression may assign to; True for an element of an array."""
    return [(match[1] or match[3], bool(match[2] or match[4])) for match in _ASSIGNED.finditer(expression)]


def evaluate(expression: str, number_of: Callable[[str], int], assign: Callable[[str, int], None] | None = None) -> int:
    """The value of an expression; `number_of` gives that of a variable, or raises NotKnown.

    >>> evaluate("(4 + x) / 2 > 3 && 1", {"x": 5}.__getitem__)
    1
    """
    if len(expression) > MAX_EXPRESSION:
        raise NotKnown("the expression is too long")
    if not expression.strip():
        return 0
    try:
        return _Evaluator(_tokens(expression), number_of, assign).whole()
    except (ValueError, ZeroDivisionError, RecursionError, OverflowError, MemoryError, KeyError) as error:
        raise NotKnown(f"{expression.strip()} cannot be computed") from error


def _tokens(expression: str) -> list[str | int]:
    """Operators and names as text, numbers as numbers."""
    found: list[str | int] = []
    at = 0
    while expression[at:].strip():
        match = _TOKEN.match(expression, at)
        if match is None:
            raise NotKnown("the expression has an unknown operator")
        found.append(_literal(match[1]) if match[1] else match[2] or match[3])
        at = match.end()
    return found


def _literal(text: str) -> int:
    base, _, digits = text.rpartition("#")
    if base:
        if not 2 <= int(base) <= 36:
            raise NotKnown("the base is not read")
        return int(digits, int(base))
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    return int(text, 8 if text.startswith("0") else 10)


def _limited(number: int) -> int:
    if number.bit_length() > _BITS - 1:
        raise NotKnown("the number is too large")
    return int(number)


def _exponent(number: int) -> int:
    if not 0 <= number <= MAX_SHIFT:
        raise NotKnown("the number is too large")
    return number


def _divided(one: int, two: int) -> int:
    return abs(one) // abs(two) * (1 if (one < 0) == (two < 0) else -1)  # bash rounds towards zero


def _remainder(one: int, two: int) -> int:
    return abs(one) % abs(two) * (1 if one >= 0 else -1)


class _Evaluator:
    """Parses and computes in one pass; while `skips` is above 0, an operand is parsed without effect."""

    def __init__(
        self,
        tokens: Sequence[str | int],
        number_of: Callable[[str], int],
        assign: Callable[[str, int], None] | None,
    ) -> None:
        self.tokens, self.number_of, self.assign = tokens, number_of, assign
        self.at, self.skips, self.depth = 0, 0, 0

    def whole(self) -> int:
        number = self._list()
        if self.at != len(self.tokens):
            raise NotKnown("the expression is not complete")
        return number

    def _next(self) -> str | int | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _take(self, *texts: str) -> str | None:
        token = self._next()
        if isinstance(token, str) and token in texts:
            self.at += 1
            return token
        return None

    def _expect(self, text: str) -> None:
        if self._take(text) is None:
            raise NotKnown(f"{text} is missing")

    def _list(self) -> int:
        number = self._assignment()
        while self._take(","):
            number = self._assignment()
        return number

    def _assignment(self) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotKnown("the expression is nested too deep")
        name = self._next()
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else None
        if isinstance(name, str) and _is_name(name) and following in _ASSIGNING:
            self.at += 2
            number = self._assignment()
            if following != "=":
                number = self._computed(str(following)[:-1], self._value(name), number)
            self._set(name, number)
        else:
            number = self._choice()
        self.depth -= 1
        return number

    def _choice(self) -> int:
        condition = self._or()
        if not self._take("?"):
            return condition
        one = self._skipping(self._list, condition == 0)
        self._expect(":")
        other = self._skipping(self._assignment, condition != 0)
        return one if condition else other

    def _or(self) -> int:
        number = self._and()
        while self._take("||"):
            right = self._skipping(self._and, number != 0)
            number = int(bool(number or right))
        return number

    def _and(self) -> int:
        number = self._level(0)
        while self._take("&&"):
            right = self._skipping(lambda: self._level(0), number == 0)
            number = int(bool(number and right))
        return number

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        number = self._level(level + 1)
        while (sign := self._take(*_LEVELS[level])) is not None:
            number = self._computed(sign, number, self._level(level + 1))
        return number

    def _power(self) -> int:
        number = self._unary()
        if self._take("**"):
            exponent = self._power()
            return 0 if self.skips else _limited(number ** _exponent(exponent))
        return number

    def _unary(self) -> int:
        sign = self._take("++", "--", "!", "~", "-", "+")
        if sign is None:
            return self._primary()
        if sign in ("++", "--"):
            name = self._next()
            if isinstance(name, str) and _is_name(name):
                self.at += 1
                number = _limited(self._value(name) + (1 if sign == "++" else -1))
                self._set(name, number)
                return number
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotKnown("the expression is nested too deep")
        number = self._unary()
        self.depth -= 1
        return {"!": int(not number), "~": ~number, "-": -number}.get(sign, number)

    def _primary(self) -> int:
        token = self._next()
        self.at += 1
        if isinstance(token, int):
            return token
        if token == "(":
            number = self._list()
            self._expect(")")
            return number
        if token is None or not _is_name(token):
            raise NotKnown("a number is missing")
        number = self._value(token)
        step = self._take("++", "--")
        if step is not None:
            self._set(token, _limited(number + (1 if step == "++" else -1)))
        return number

    def _skipping(self, read: Callable[[], int], is_skipped: bool) -> int:
        self.skips += is_skipped
        number = read()
        self.skips -= is_skipped
        return number

    def _computed(self, sign: str, one: int, two: int) -> int:
        return 0 if self.skips else _limited(int(_BINARY[sign](one, two)))

    def _value(self, name: str) -> int:
        return 0 if self.skips else self.number_of(name)

    def _set(self, name: str, number: int) -> None:
        if self.skips:
            return
        if self.assign is None:
            raise NotKnown(f"{name} is assigned")
        self.assign(name, number)


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"
