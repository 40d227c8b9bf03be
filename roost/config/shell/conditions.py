"""`[ ... ]`, `test` and `[[ ... ]]`, as far as their values are known: True, False, or None."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from roost.config.shell.arithmetic import NotKnown, evaluate
from roost.config.shell.expand import Expander
from roost.config.shell.patterns import matches_pattern, regular
from roost.config.shell.state import State
from roost.config.shell.syntax import Condition, Word
from roost.config.shell.values import Value

Status = bool | None
MAX_DEPTH = 20
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, two: one == two,
    "-ne": lambda one, two: one != two,
    "-lt": lambda one, two: one < two,
    "-le": lambda one, two: one <= two,
    "-gt": lambda one, two: one > two,
    "-ge": lambda one, two: one >= two,
}
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
_UNARY = re.compile(r"-[a-zA-Z]")
MAX_PATTERN = 200  # of a regular expression, and of the text that it is tried on
_QUANTIFIER = re.compile(r"[*+?{]")


def negated(status: Status) -> Status:
    return None if status is None else not status


def both(one: Status, other: Status) -> Status:
    """`and` of conditions that may be unknown (None)."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def either(one: Status, other: Status) -> Status:
    return negated(both(negated(one), negated(other)))


def bracket_status(arguments: Sequence[Value], state: State, expander: Expander) -> Status:
    """`[ ... ]` and `test`, whose words are already split."""
    tokens: list[str | Value] = [
        text if (text := value.known) in ("!", "(", ")", "-a", "-o", *_TEXTS, *_NUMBERS) and text is not None else value
        for value in arguments
    ]
    return _Reader(tokens, state, expander, ("-a", "-o")).whole()


def condition_status(condition: Condition, state: State, expander: Expander) -> Status:
    """`[[ ... ]]`, whose words are not split, and whose right sides are patterns."""
    tokens: list[str | Value | Word] = []
    for token in condition.tokens:
        if isinstance(token, str):
            tokens.append(token)
        elif token.text in _NUMBERS and token.text is not None:
            tokens.append(token.text)
        else:
            tokens.append(token)
    return _Reader(tokens, state, expander, ("&&", "||")).whole()


class _Reader:
    def __init__(
        self,
        tokens: Sequence[str | Value | Word],
        state: State,
        expander: Expander,
        joiners: tuple[str, str],
    ) -> None:
        self.tokens, self.state, self.expander, self.joiners = tokens, state, expander, joiners
        self.at, self.depth = 0, 0

    def whole(self) -> Status:
        if not self.tokens:
            return False
        status = self._or()
        return status if self.at == len(self.tokens) else None

    def _next(self) -> str | Value | Word | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _or(self) -> Status:
        status = self._and()
        while self._next() == self.joiners[1]:
            self.at += 1
            status = either(status, self._and())
        return status

    def _and(self) -> Status:
        status = self._not()
        while self._next() == self.joiners[0]:
            self.at += 1
            status = both(status, self._not())
        return status

    def _not(self) -> Status:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.at = len(self.tokens)
            return None
        if self._next() == "!":
            self.at += 1
            return negated(self._not())
        if self._next() == "(":
            self.at += 1
            status = self._or()
            if self._next() == ")":
                self.at += 1
            return status
        return self._primary()

    def _primary(self) -> Status:
        left = self._next()
        self.at += 1
        operator = self._next()
        if isinstance(operator, str) and (operator in _TEXTS or operator in _NUMBERS):
            self.at += 1
            right = self._next()
            self.at += 1
            return None if left is None or right is None else self._binary(left, operator, right)
        text = self._text(left)
        if text is not None and _UNARY.fullmatch(text) and operator is not None and operator not in self.joiners:
            self.at += 1
            return self._unary(text, operator)
        return None if text is None else bool(text)

    def _text(self, token: str | Value | Word | None) -> str | None:
        if isinstance(token, Word):
            token = self.expander.one(token, self.state)
        return token.tested if isinstance(token, Value) else token

    def _unary(self, operator: str, token: str | Value | Word) -> Status:
        text = self._text(token)
        if operator == "-v":
            return None if text is None else text in self.state.variables
        if operator not in ("-z", "-n"):
            return None  # files and terminals, which are those of the machine that runs the script
        if text is None:
            value = self.expander.one(token, self.state) if isinstance(token, Word) else token
            has_text = isinstance(value, Value) and any(isinstance(part, str) for part in value.parts)
            return (operator == "-n") if has_text else None
        return (text == "") == (operator == "-z")

    def _binary(self, left: str | Value | Word, operator: str, right: str | Value | Word) -> Status:
        one = self._text(left)
        if operator in _NUMBERS:
            two = self._text(right)
            if one is None or two is None:
                return None
            try:
                return _NUMBERS[operator](self._number(one), self._number(two))
            except NotKnown:
                return None
        if operator in ("==", "=", "!=") and isinstance(right, Word):
            pattern = self.expander.pattern(right, self.state)
            if one is None or pattern is None:
                return None
            is_equal = matches_pattern(one, pattern)
            return is_equal if operator != "!=" else not is_equal
        two = self._text(right)
        if one is None or two is None:
            return None
        if operator == "=~":
            is_quoted = isinstance(right, Word) and any(part.is_quoted for part in right.parts)
            if is_quoted and re.escape(two) != two:
                return None  # what is quoted stands for itself
            return _matches(one, two)
        if operator in ("<", ">"):
            return one < two if operator == "<" else one > two
        return (one == two) == (operator != "!=")

    def _number(self, text: str) -> int:
        if self.joiners[0] == "-a":  # [ knows decimal numbers only
            if re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text) is None:
                raise NotKnown(text)
            return int(text)
        return evaluate(text, lambda name: self.expander.number_of(name, self.state))


def _matches(text: str, pattern: str) -> Status:
    """A regular expression with few enough repetitions to be tried."""
    if len(text) > MAX_PATTERN or len(pattern) > MAX_PATTERN or len(_QUANTIFIER.findall(pattern)) > 3:
        return None
    expression = regular(pattern)
    if re.search(r"[)][*+?{]", pattern) or expression is None:
        return None
    try:
        return re.search(expression, text) is not None
    except (re.error, RecursionError):
        return None
