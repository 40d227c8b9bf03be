"""Conditions (True, False, or None if unknown), and outputs of commands whose words are known."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from roost.config.shell.arithmetic import NotKnown, evaluate
from roost.config.shell.expand import AT_RUN_TIME, MAX_TRIES, Expander
from roost.config.shell.filters import computed, unescaped
from roost.config.shell.patterns import matches_pattern, regular
from roost.config.shell.state import State, Value, text_value
from roost.config.shell.syntax import AndOr, Condition, Literal, Pipeline, Simple, Statement, Word, joined_text, placed

_OPTIONS = {"pwd": "-P -L", "realpath": "-e -m -s -q", "readlink": "-f -e -m"}


def echoed(arguments: Sequence[str]) -> str | None:
    """Output of `echo`; None for escapes that are not supported."""
    words, options = list(arguments), ""
    while words and re.fullmatch(r"-[neE]+", words[0]):
        options += words.pop(0)[1:]
    text: str | None = " ".join(words)
    if re.search("e[^E]*$", options):
        text = unescaped(" ".join(words))
    return None if text is None else text if "n" in options else f"{text}\n"


def printed(arguments: Sequence[str]) -> str | None:
    """Output of `printf` with `%s` and `%d`; None for other formats."""
    if not arguments:
        return None
    form, *words = arguments
    spelled = unescaped(form)
    fields = re.findall(r"%(.?)", form)
    if spelled is None or len(fields) != len(words) or any(one not in ("s", "d") for one in fields):
        return None
    if any(one == "d" and not re.fullmatch(r"-?[1-9]\d*|0", word) for one, word in zip(fields, words, strict=True)):
        return None
    waiting = iter(words)
    return re.sub("%.", lambda _: next(waiting), spelled)


def output_of(words: Sequence[str], state: State) -> str | None:
    """Output of a command; None if it is known only at run time."""
    name, *arguments = words or ("",)
    if name == "echo":
        return echoed(arguments)
    if name == "printf":
        return printed(arguments)
    if name == "expr":
        return computed(" ".join(arguments))
    operands = _operands(name, arguments)
    text = None if operands is None else _line_of(name, operands, state)
    return None if text is None else f"{text}\n" if text else ""


def _operands(name: str, arguments: Sequence[str]) -> list[str] | None:
    """Arguments without options that do not change the output; None for other options."""
    words, allowed = list(arguments), _OPTIONS.get(name, "").split()
    if name == "basename" and words[:1] == ["-s"] and len(words) == 3:
        words = [words[2], words[1]]
    options = [words.pop(0) for word in arguments if word in allowed and word == words[0]]
    if name == "readlink" and not options:
        return None  # what a link holds
    if words[:1] == ["--"]:
        return words[1:]
    return None if any(word.startswith("-") for word in words) else words


def echo_of(words: Sequence[Value], state: State) -> Value | None:
    """Output of `echo` and `printf`; words of `echo` may have unknown parts."""
    texts = known_texts(words)
    if texts is not None:
        text = output_of(texts, state)
        own = joined_text([part for one in words[1:] for part in (*one.parts, " ") if isinstance(part, str)])
        if text is not None and text.rstrip("\n") == own[:-1]:  # as it is written
            return text_value(joined_text([own[:-1], text[len(own) - 1 :]]), words[0].position)
        return None if text is None else text_value(placed(text, words[0].position), words[0].position)
    if words[0].known != "echo" or words[1].prefix.startswith("-"):
        return None
    parts = [part for at, one in enumerate(words[1:]) for part in ([" "] if at else []) + list(one.parts)]
    return Value(tuple(parts), words[0].position)


def _line_of(name: str, paths: Sequence[str], state: State) -> str | None:
    if name == "pwd":
        return str(state.folder) if state.folder is not None else None
    if name == "dirname" and len(paths) == 1:
        folder, slash, _ = paths[0].rstrip("/").rpartition("/")
        return folder.rstrip("/") or ("/" if slash or paths[0].startswith("/") else ".")
    if name == "basename" and paths:
        base = paths[0].rstrip("/").rpartition("/")[2] or paths[0][:1]
        return None if len(paths) > 2 else base.removesuffix(paths[1]) if paths[1:] not in ([], [base]) else base
    if name in ("realpath", "readlink") and len(paths) == 1 and paths[0]:
        is_known = state.folder is not None or paths[0].startswith("/")
        return os.path.normpath((state.folder or Path()) / paths[0]) if is_known else None
    if name == "seq" and 1 <= len(paths) <= 3 and all(re.fullmatch(r"\d{1,4}", word) for word in paths):
        numbers = [int(word) for word in paths]
        first, step = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) > 2 else 1
        return "\n".join(map(str, range(first, numbers[-1] + 1, max(1, step))))
    return None


def is_folder_change(statement: Statement) -> tuple[Simple, Statement] | None:
    """The `cd` and the command of `cd folder && command`, a usual way to find the folder of a script."""
    if isinstance(statement, AndOr) and len(statement.rest) == 1 and statement.rest[0][0] == "&&":
        first, (_, second) = statement.first, statement.rest[0]
        if isinstance(first, Simple) and first.words and first.words[0].text == "cd":
            return first, second
    return None


def piped(statement: Statement) -> Sequence[Statement]:
    """Commands of a pipeline; a single command is a pipeline of one."""
    return statement.commands if isinstance(statement, Pipeline) and not statement.is_negated else (statement,)


def known_texts(values: Sequence[Value]) -> list[str] | None:
    texts = [value.tested for value in values]
    return None if None in texts else [text for text in texts if text is not None]


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
            return None if text is None else self._is_set(text)
        if operator not in ("-z", "-n"):
            return None  # files and terminals, which are those of the machine that runs the script
        if text is None:
            value = self.expander.one(token, self.state) if isinstance(token, Word) else token
            has_text = isinstance(value, Value) and any(isinstance(part, str) for part in value.parts)
            return (operator == "-n") if has_text else None
        return (text == "") == (operator == "-z")

    def _is_set(self, text: str) -> Status:
        """Return True if a variable, or an element `A[i]`, has a value; None if that is not known."""
        match = re.fullmatch(r"(\w+)(?:\[(.+)\])?", text, re.DOTALL)
        if match is None:
            return None
        name, index = match.groups()
        if name in AT_RUN_TIME and name not in self.state.variables:
            return None
        array = self.state.array(name)
        key: str | None = index
        if index in ("@", "*"):
            key = next(iter(array), "")
        elif self.state.target(name) not in self.state.associative:
            key = self.expander.key(name, Word((Literal(index or "0", True),), (None, None, None)), self.state)
        elif index is None:
            key = "0"
        value = None if key is None else array.get(key)
        is_open = any(one.unknown is not None and one.unknown.is_list for one in array.values())
        if self.state.fallback_for(name) is not None:
            return None
        if key is None or is_open or (value is not None and value.unknown is not None and value.unknown.is_unset):
            return None
        return value is not None

    def _binary(self, left: str | Value | Word, operator: str, right: str | Value | Word) -> Status:
        one = self._text(left)
        if operator == "=~":
            self.state.variables.pop("BASH_REMATCH", None)
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
            return self._matches(one, two)
        if operator in ("<", ">"):
            return one < two if operator == "<" else one > two
        return (one == two) == (operator != "!=")

    def _number(self, text: str) -> int:
        if self.joiners[0] == "-a":  # [ knows decimal numbers only
            if re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text) is None:
                raise NotKnown(text)
            return int(text)
        return evaluate(text, lambda name: self.expander.number_of(name, self.state))

    def _matches(self, text: str, pattern: str) -> Status:
        """A regular expression with few enough repetitions to be tried; what its groups match is BASH_REMATCH."""
        expression, count = regular(pattern), len(_QUANTIFIER.findall(pattern))
        if len(text) > MAX_PATTERN or len(pattern) > MAX_PATTERN or count > 3 or expression is None:
            return None
        self.expander.tries += (len(text) + 1) ** (1 + count)
        if re.search(r"[)][*+?{]", pattern) or self.expander.tries > MAX_TRIES:
            return None
        try:
            found = re.search(expression, text)
        except (re.error, RecursionError):
            return None
        if "|" not in pattern:  # of several choices bash takes the longest
            groups = (found[0], *found.groups(default="")) if found is not None else ()
            self.state.variables["BASH_REMATCH"] = {str(at): text_value(one) for at, one in enumerate(groups)}
        return found is not None
