"""Expansion of words: parameters, arithmetic, quotes, and splitting into arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from roost.config.findings import Position
from roost.config.shell.arithmetic import NotKnown, assigned_names, evaluate
from roost.config.shell.braces import with_braces
from roost.config.shell.patterns import compiled, with_classes
from roost.config.shell.state import (
    IFS,
    State,
    Unknown,
    Value,
    is_argument,
    next_index,
    of_unknown,
    text_value,
    unknown_elements,
    widened_gaps,
    without_gap,
)
from roost.config.shell.syntax import (
    Arithmetic,
    Literal,
    Parameter,
    Part,
    Substitution,
    Word,
    joined_text,
    placed,
    places_of,
)

MAX_WORDS = 5_000  # that one word may become
MAX_BRACES = 1_000_000  # of one word, times its characters
MAX_VALUE = 100_000  # characters of one value
MAX_MATCHED = 4_000  # characters of a value that a pattern is tried on
MAX_TRIES = 100_000_000  # characters that patterns are tried on in one reading
_GLOB = re.compile(r".*([*?]|/[^\s]*\[[^\]]+\])", re.DOTALL)
_NUMBER = re.compile(r"\s*[-+]?(?:[1-9]\d{0,17}|0)\s*")
OUTPUT = "the output of a command is known only where the script runs"
# Variables of bash whose values are known only at run time.
AT_RUN_TIME = frozenset(
    """RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME HOSTNAME BASHPID PPID UID EUID GROUPS LINENO FUNCNAME
    PIPESTATUS BASH_REMATCH BASH_COMMAND BASH_LINENO BASH_VERSION BASH_VERSINFO DIRSTACK HOSTTYPE MACHTYPE OSTYPE OLDPWD
    SHLVL SHELLOPTS BASHOPTS""".split()  # noqa: SIM905
)
FILES = "which files there are is known only where the script runs"
Outputs = Callable[[Substitution, State], Value | None]


class TooMuch(ValueError):
    """A limit on words or values was reached."""


class Expander:
    """Expands words in a state; `outputs` gives the output of a substitution, None if known only at run time."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.tries = 0
        self.reads_arguments = False  # outside functions, which have arguments of their own

    def words(self, word: Word, state: State) -> list[Value]:
        """The arguments that a word becomes: none, one or several."""
        found: list[Value] = []
        texts = [part.text for part in word.parts if isinstance(part, Literal) and not part.is_quoted]
        if sum(text.count("{") for text in texts) * sum(map(len, texts)) > MAX_BRACES:
            raise TooMuch("a word has too many braces")
        for count, part in enumerate(with_braces(word), 1):
            found += self._split(part, state)
            if max(count, len(found)) > MAX_WORDS:
                raise TooMuch(f"a word becomes more than {MAX_WORDS:,} arguments")
        return found

    def listed(self, word: Word, state: State) -> list[Value]:
        """The items of a list that a word expands to; those of a pattern of file names are unknown."""
        texts = [part.text for part in word.parts if isinstance(part, Literal) and not part.is_quoted]
        found = self.words(word, state)
        if not any(_GLOB.match(text) for text in texts) or any("=" in one.prefix for one in found):
            return found
        shown = self.one(word, state).shown
        return [of_unknown(Unknown(shown, FILES, word.position, is_list=True))]

    def arguments(self, words: Sequence[Word], state: State) -> list[Value]:
        """The arguments of a command; one before an unset variable notes it as dropped, for it may be a flag."""
        found: list[Value] = []
        for word in words:
            values = self.words(word, state)
            unset = self.one(word, state).unknown if found and not values else None
            if unset is not None and unset.is_unset:
                found[-1] = replace(found[-1], dropped=unset)
            found += values
        return found

    def one(self, word: Word, state: State) -> Value:
        """The value of a word that is not split, as in an assignment."""
        parts: list[str | Unknown] = []
        for at, part in enumerate(word.parts):
            if isinstance(part, Literal):
                text = part.text
                if at == 0 and not part.is_quoted and re.match(r"~(?=/|$)", text):
                    home = state.scalar("HOME")
                    parts += home.parts if home is not None else ()
                    text = text[1:]
                parts.append(text)
            else:
                values = self._values(part, state, word.position)
                values = [_placed(value, word.position) for value in values]
                parts += _joined(values, _separator(state, part) if _is_star(part) else " ")
        return merged(parts, word.position)

    def pattern(self, word: Word, state: State) -> str | None:
        """A word as a pattern of fnmatch; None where it is not known."""
        found = ""
        for part in word.parts:
            if isinstance(part, Literal):
                text: str | None = part.text
            else:
                text = self.one(Word((part,), word.position), state).tested
            if text is None:
                return None
            found += re.sub(r"([*?[])", r"[\1]", text) if part.is_quoted else text
        if re.search(r"[?*+@!]\(", "".join(part.text for part in word.parts if isinstance(part, Literal))):
            return None  # of extglob
        return with_classes(found)

    def number(self, word: Word, state: State) -> int:
        """The value of an arithmetic expression; raises NotKnown if it depends on a run."""
        value = self.one(word, state)
        text = value.tested
        try:
            if text is None:
                raise NotKnown(value.shown)
            return evaluate(text, lambda name: self.number_of(name, state), partial(self._set_number, state, word))
        except NotKnown:
            names = [one.variable for one in value.parts if isinstance(one, Unknown) and one.variable]
            for name, is_element in assigned_names(value.shown):
                if is_element:
                    state.variables[name] = {"0": unknown_elements(name, word.position)}
                    continue
                reason = "it is computed from what is not known"
                unknown = value.unknown or Unknown(value.shown, reason, word.position)
                self._assign(state, name, of_unknown(replace(unknown, variable=(names or [name])[0])))
            raise

    def _set_number(self, state: State, word: Word, name: str, number: int) -> None:
        self._assign(state, name, text_value(str(number), word.position))

    def _assign(self, state: State, name: str, value: Value) -> None:
        old = state.variables.get(name)
        state.variables[name] = {**old, "0": value} if isinstance(old, dict) else value

    def number_of(self, name: str, state: State, above: tuple[str, ...] = ()) -> int:
        """The number of a variable; its text may be an expression."""
        value = state.scalar(name)
        if value is None and name in AT_RUN_TIME:
            raise NotKnown(name)
        text = "" if value is None else value.tested
        if text is None or name in above or len(above) > 10:
            raise NotKnown(name)
        if _NUMBER.fullmatch(text):
            return int(text)
        return evaluate(text, lambda inner: self.number_of(inner, state, (*above, name))) if text else 0

    def key(self, name: str, index: Word, state: State) -> str | None:
        """The key of an array's element: text, or a number that is computed; None where it is not known."""
        name = state.target(name)
        if name in state.associative:
            return self.one(index, state).tested
        try:
            at = self.number(index, state)
        except NotKnown:
            return None
        return str(at if at >= 0 else next_index(state.array(name)) + at)

    # --- splitting

    def _split(self, word: Word, state: State) -> list[Value]:
        found: list[Value] = []
        current: list[str | Unknown] = []
        has_word = is_unsure = False
        dropped: Unknown | None = None  # after the value that `current` is from
        position = word.position

        def close() -> None:
            nonlocal current, has_word, is_unsure
            if has_word:
                found.append(replace(merged(current, position), dropped=dropped, is_split=is_unsure))
            current, has_word, is_unsure = [], False, False

        parts, separators = list(self._spliced(word.parts, state, position)), word_separators(state)
        splits_at_blanks = separators is not None and separators.pattern == "[ \t\n]+"
        is_alone = len(parts) == 1
        for at, (part, is_split) in enumerate(parts):
            if isinstance(part, Literal) and (part.is_quoted or not is_split):
                value = self.one(Word((part,), word.position), state) if at == 0 else text_value(part.text)
                current += value.parts
                has_word = True
                continue
            values = [text_value(part.text)] if isinstance(part, Literal) else self._values(part, state, word.position)
            values = [_placed(value, word.position) for value in values]
            if not part.is_quoted and (not is_alone or not splits_at_blanks):
                values = [without_gap(value) for value in values]  # what stands beside it may belong to its words
            if part.is_quoted:
                is_list = isinstance(part, Parameter) and part.is_list
                if not is_list:
                    has_word = True
                for index, value in enumerate(values):
                    if index:
                        close()
                    if is_alone and value.position[:2] != (None, None):
                        position = value.position
                    current += value.parts
                    has_word, dropped, is_unsure = True, value.dropped, is_unsure or (is_list and value.is_split)
                continue
            for index, value in enumerate(values):
                if index:
                    close()
                if is_alone and value.position[0] is not None:
                    position = value.position
                dropped = value.dropped
                for piece in value.parts:
                    if isinstance(piece, Unknown):
                        if piece.is_unset and is_alone and len(value.parts) == 1:
                            continue
                        current.append(piece)
                        has_word = True
                        is_unsure |= not piece.is_unset and _may_have_blanks(part)
                        continue
                    if separators is None:
                        current.append(Unknown(piece, "IFS, which splits it, is not known", position, is_list=True))
                        has_word = True
                        continue
                    start = 0
                    for delimiter in separators.finditer(piece):
                        if delimiter.start() > start:
                            current.append(piece[start : delimiter.start()])
                            has_word = True
                        has_word = has_word or bool(delimiter[0].strip(" \t\n"))
                        close()
                        start = delimiter.end()
                        position = places_of(piece[start:], position)[0][1] if is_alone else position
                    if piece[start:]:
                        current.append(piece[start:])
                        has_word = True
        close()
        return found

    def _spliced(
        self, parts: Sequence[Part], state: State, position: Position, is_split: bool = False
    ) -> Iterator[tuple[Part, bool]]:
        """The parts of a word, and whether their text is split; `${X:-"a b"}` gives the parts of its default."""
        for part in parts:
            argument = self._quoted_argument(part, state, position)
            if argument is None:
                yield part, is_split
            else:
                yield from self._spliced(argument.parts, state, position, is_split=True)

    def _quoted_argument(self, part: Part, state: State, position: Position) -> Word | None:
        """The default or alternative that an unquoted expansion becomes, if it has quotes; else None."""
        if not isinstance(part, Parameter) or part.is_quoted or part.is_list or part.is_length or part.is_indirect:
            return None
        if part.operator not in (":-", "-", ":+", "+") or part.argument is None or not _has_quotes(part.argument):
            return None
        if state.fallback_for(part.name) is not None:
            return None
        is_missing = _is_missing(part, self._plain(part, state, position))
        return part.argument if is_missing == (part.operator in (":-", "-")) else None

    def _values(self, part: Parameter | Substitution | Arithmetic, state: State, position: Position) -> list[Value]:
        if isinstance(part, Arithmetic):
            try:
                return [text_value(str(self.number(part.expression, state)), position)]
            except NotKnown:
                inner = self.one(part.expression, state).unknown
                names = re.findall(r"[A-Za-z_]\w*", part.raw)
                found = [value.unknown for name in names if (value := state.scalar(name)) is not None]
                unknown = inner or next((one for one in found if one is not None), None)
                if unknown is not None:
                    return [of_unknown(replace(unknown, text=part.raw))]
                return [of_unknown(Unknown(part.raw, "it cannot be computed from what the script says", position))]
        if isinstance(part, Substitution):
            known = self.outputs(part, state)
            return [known if known is not None else of_unknown(Unknown(part.raw, OUTPUT, position))]
        return self._parameter(part, state, position)

    # --- parameters

    def _parameter(self, part: Parameter, state: State, position: Position) -> list[Value]:
        if state.locals is None and is_argument(part.name):
            self.reads_arguments = True
        if part.is_indirect:
            return self._indirect(part, state, position)
        if part.is_list:
            values = self._list(part, state, position)
            if part.is_quoted and _is_star(part) and not part.is_length:
                return [merged(_joined(values, _separator(state, part)), position)]
            return values
        value = self._plain(part, state, position)
        if part.is_length:
            text = value.tested if value is not None else ""
            length = None if text is None else text_value(str(len(text)), position)
            return [_unknown_after(value or Value(), part) if length is None else length]
        return [self._with_operator(part, value, state, position)]

    def _list(self, part: Parameter, state: State, position: Position) -> list[Value]:
        values = list(state.arguments) if part.name in ("@", "*") else list(state.array(part.name).values())
        if part.name in AT_RUN_TIME and part.name not in state.variables:
            reason = "it is known only where the script runs"
            values = [of_unknown(Unknown(part.raw, reason, position, is_list=True))]
        if part.is_length:
            return [self._length(values, part, position)]
        if part.operator in (":-", "-", ":+", "+"):
            chosen = bool(values) == (part.operator in (":+", "+"))
            if not chosen:
                return values if part.operator in (":-", "-") else []
            return self.words(part.argument, state) if part.argument is not None else []
        if part.operator == ":":
            return self._slice(values, part, state, position)
        return [self._changed(value, part, state) for value in values]

    def _length(self, values: list[Value], part: Parameter, position: Position) -> Value:
        unknown = next((one.unknown for one in values if one.unknown is not None and len(one.parts) == 1), None)
        if unknown is not None and not unknown.is_unset:
            return of_unknown(replace(unknown, text=part.raw))
        return text_value(str(len(values)), position)

    def _plain(self, part: Parameter, state: State, position: Position) -> Value | None:
        """The value of a variable before its operator; None where it is not set."""
        name = part.name
        if name.isdigit():
            number = int(name)
            if number == 0:
                return text_value(state.script, position)
            found = state.arguments[number - 1] if number <= len(state.arguments) else None
            before = next((one.unknown for one in state.arguments[: number - 1] if one.is_open), None)
            return found if before is None else of_unknown(replace(before, text=part.raw, is_list=False))
        if name == "#":
            return self._length(list(state.arguments), part, position)
        if name in ("?", "$", "!", "-"):
            return of_unknown(Unknown(part.raw, "it is known only where the script runs", position))
        if name == "BASH_SOURCE":
            return text_value(state.file, position)
        if name == "PWD" and state.folder is not None:
            return text_value(str(state.folder), position)
        if part.index is not None:
            array, key = state.array(name), self.key(name, part.index, state)
            if key is None:
                return of_unknown(Unknown(part.raw, "its index is not known", position))
            several = next((one.unknown for one in array.values() if one.unknown and one.unknown.is_list), None)
            if several is not None and name not in state.associative:
                head = next(at for at, one in enumerate(array.values()) if one.unknown and one.unknown.is_list)
                if key not in list(array)[:head]:
                    return of_unknown(replace(several, is_list=False))
            if name in AT_RUN_TIME and name not in state.variables:
                return of_unknown(Unknown(part.raw, "it is known only where the script runs", position))
            return array.get(key)
        value = state.scalar(name)
        if value is None and name in AT_RUN_TIME:
            return of_unknown(Unknown(part.raw, "it is known only where the script runs", position, name))
        return value

    def _with_operator(self, part: Parameter, value: Value | None, state: State, position: Position) -> Value:
        operator = part.operator
        is_missing = _is_missing(part, value)
        argument = part.argument or Word((), position)
        if operator in (":-", "-", ":=", "="):
            if not is_missing and value is not None:
                return value
            found = self.one(argument, state)
            found = found if value is not None else state.default_of(part.name, part.index is not None, found)
            if operator in (":=", "=") and part.index is None:
                state.variables[part.name] = found
            return found
        if operator in (":+", "+"):
            if (open_value := state.fallback_for(part.name)) is not None:
                return open_value
            return Value((), position) if is_missing else self.one(argument, state)
        if value is None:
            if part.index is not None and state.array(part.name):
                reason = f"{part.name} has no element {self.one(part.index, state).shown}"
                return of_unknown(Unknown(part.raw, reason, position, is_unset=True))
            if not part.name.isdigit():
                return of_unknown(Unknown(part.raw, f"{part.name} is not set", position, part.name, is_unset=True))
            number = int(part.name) if state.locals is None else 0
            reason = f"argument {part.name} is not given"
            return of_unknown(Unknown(part.raw, reason, position, argument=number, is_unset=True))
        if operator in ("", ":?", "?"):
            return value
        if operator == ":":
            return self._substring(value, argument, part, state)
        return self._changed(value, part, state)

    def _substring(self, value: Value, argument: Word, part: Parameter, state: State) -> Value:
        text = value.tested
        if text is None:
            return _unknown_after(value, part)
        try:
            begin, count = self._bounds(argument, state)
        except NotKnown:
            return of_unknown(Unknown(part.raw, "its bounds are not known", value.position))
        begin = begin if begin >= 0 else len(text) + begin
        end = len(text) if count is None else begin + count if count >= 0 else len(text) + count
        return text_value(text[begin:end] if 0 <= begin <= end else "", value.position)

    def _bounds(self, argument: Word, state: State) -> tuple[int, int | None]:
        """Offset and length of `${X:offset:length}`; no length gives None. Raises NotKnown if they depend on a run."""
        bounds = self.one(argument, state).tested
        if bounds is None or "?" in bounds:
            raise NotKnown("bounds")
        start, colon, length = bounds.partition(":")
        begin = evaluate(start or "0", lambda name: self.number_of(name, state))
        return begin, evaluate(length or "0", lambda name: self.number_of(name, state)) if colon else None

    def _slice(self, values: list[Value], part: Parameter, state: State, position: Position) -> list[Value]:
        is_arguments = part.name in ("@", "*")
        unknown = Unknown(part.raw, "its bounds are not known", position, is_list=True)
        try:
            begin, count = self._bounds(part.argument or Word((), position), state)
        except NotKnown:
            return [of_unknown(unknown)]
        is_open = state.target(part.name) in state.associative and not is_arguments  # in an order of bash's own
        if is_open or any(one.is_open for one in values):
            return [of_unknown(replace(unknown, reason="its elements are not known"))]
        if count is not None and count < 0:
            return [of_unknown(unknown)]  # an error
        if is_arguments:  # they count from $0
            values = [text_value(state.script, position), *values]
        keys = list(range(len(values))) if is_arguments else [int(key) for key in state.array(part.name)]
        begin = begin if begin >= 0 else max(keys, default=0) + 1 + begin
        found = [value for key, value in zip(keys, values, strict=True) if 0 <= begin <= key]
        return found[:count]

    def _changed(self, value: Value, part: Parameter, state: State) -> Value:
        """`${X%pattern}`, `${X/pattern/text}`, `${X^^}` and the like."""
        operator, argument = part.operator, part.argument
        if not operator or argument is None:
            return value
        text = value.tested
        if text is None:
            return _unknown_after(value, part)
        if len(text) > MAX_VALUE:
            raise TooMuch(f"a value is longer than {MAX_VALUE:,} characters")
        if operator in ("^^", ",,"):
            return text_value(text.upper() if operator == "^^" else text.lower(), value.position)
        if operator in ("^", ","):
            changed = text[:1].upper() if operator == "^" else text[:1].lower()
            return text_value(changed + text[1:], value.position)
        if operator.startswith("/"):
            return self._replaced(value, text, part, state)
        pattern = self.pattern(argument, state)
        if pattern is None or operator == "@":
            return of_unknown(Unknown(part.raw, "its pattern is not known", value.position))
        self.tries += len(text) ** 2
        if len(text) > MAX_MATCHED or self.tries > MAX_TRIES:
            return of_unknown(Unknown(part.raw, "it is too long to try a pattern on", value.position))
        matches = compiled(pattern).match
        if operator in ("#", "##"):
            lengths = range(len(text) + 1) if operator == "#" else range(len(text), -1, -1)
            cut = next((length for length in lengths if matches(text[:length])), None)
            return value if cut is None else text_value(text[cut:], value.position)
        starts = range(len(text), -1, -1) if operator == "%" else range(len(text) + 1)
        begin = next((at for at in starts if matches(text[at:])), None)
        return value if begin is None else text_value(text[:begin], value.position)

    def _replaced(self, value: Value, text: str, part: Parameter, state: State) -> Value:
        argument = part.argument or Word((), value.position)
        before: list[Part] = []
        after: list[Part] = []
        is_after = False
        for piece in argument.parts:
            if isinstance(piece, Literal) and not is_after and "/" in piece.text and not piece.is_quoted:
                one, _, other = piece.text.partition("/")
                before.append(Literal(one, piece.is_quoted))
                after.append(Literal(other, piece.is_quoted))
                is_after = True
            else:
                (after if is_after else before).append(piece)
        pattern = self.pattern(Word(tuple(before), argument.position), state)
        new = self.one(Word(tuple(after), argument.position), state).tested
        is_anchored = part.operator in ("/#", "/%")
        if pattern is None or new is None or (not pattern and not is_anchored):
            return value if pattern == "" else of_unknown(Unknown(part.raw, "its pattern is not known", value.position))
        plain = re.sub(r"\[([*?[])\]", r"\1", pattern)
        if re.search(r"[*?[]", re.sub(r"\[[*?[]\]", "", pattern)):
            return of_unknown(Unknown(part.raw, "its pattern is not read", value.position))
        if part.operator == "/#":
            changed = new + text[len(plain) :] if text.startswith(plain) else text
        elif part.operator == "/%":
            changed = text[: len(text) - len(plain)] + new if text.endswith(plain) else text
        else:
            changed = text.replace(plain, new, -1 if part.operator == "//" else 1)
        if len(changed) > MAX_VALUE:
            raise TooMuch(f"a value is longer than {MAX_VALUE:,} characters")
        return text_value(changed, value.position)

    def _indirect(self, part: Parameter, state: State, position: Position) -> list[Value]:
        if part.is_list:
            return [text_value(key, position) for key in state.array(part.name)]
        if part.operator in ("*", "@") and part.argument is None:
            reason = "which variables there are is known only where the script runs"
            return [of_unknown(Unknown(part.raw, reason, position, is_list=True))]
        name = state.scalar(part.name)
        text = name.known if name is not None else None
        if not text or not re.fullmatch(r"[A-Za-z_]\w*", text):
            return [of_unknown(Unknown(part.raw, f"{part.name} names no variable", position))]
        return [self._with_operator(replace(part, name=text, is_indirect=False), state.scalar(text), state, position)]


def _is_missing(part: Parameter, value: Value | None) -> bool:
    return value is None or (part.operator.startswith(":") and value.tested == "")


def _has_quotes(word: Word) -> bool:
    """Return True if a part of a word is quoted, or one of the words inside its expansions."""
    inner = (part.argument for part in word.parts if isinstance(part, Parameter) and part.argument is not None)
    return any(part.is_quoted for part in word.parts) or any(_has_quotes(one) for one in inner)


def _is_star(part: Part) -> bool:
    """Return True for `$*` and `${A[*]}`, which are one word where they are quoted."""
    return isinstance(part, Parameter) and "*" in (part.name, part.index.text if part.index else "")


def _separator(state: State, part: Part) -> str | Unknown:
    """Separator of the elements of `"$*"`: the first character of IFS."""
    given = state.scalar("IFS")
    text = " " if given is None else given.tested
    raw = part.raw if isinstance(part, Parameter) else "$*"
    if text is None:
        return Unknown(raw, "IFS is not known", given.position if given else (None, None, None))
    return text[:1]


def _unknown_after(value: Value, part: Parameter) -> Value:
    """An unknown value after an operator, which may cut off its known text; unknown for the same reason."""
    unknown = next((one for one in value.parts if isinstance(one, Unknown) and not one.is_unset), None)
    return value if unknown is None or len(value.parts) == 1 else of_unknown(replace(unknown, text=part.raw))


def _may_have_blanks(part: Part) -> bool:
    """Return False for expansions that are numbers or names, and so one word."""
    is_name = isinstance(part, Parameter) and (part.is_length or part.name in (*AT_RUN_TIME, *"#?$!-"))
    return not is_name and not isinstance(part, Arithmetic)


def _placed(value: Value, position: Position) -> Value:
    """A value whose texts have source maps: their own, or the position of the value or the word."""
    start = value.position if value.position[0] is not None else position
    return replace(value, parts=tuple(placed(part, start) if isinstance(part, str) else part for part in value.parts))


def _joined(values: list[Value], between: str | Unknown) -> list[str | Unknown]:
    return [piece for at, one in enumerate(values) for piece in ([between] if at else []) + list(one.parts)]


def word_separators(state: State) -> re.Pattern[str] | None:
    """Separators of words as a regular expression; None if IFS is not known."""
    given = state.scalar("IFS")
    text = IFS if given is None else given.tested
    if text is None:
        return None
    blanks = "".join(one for one in IFS if one in text)
    others = "".join(re.escape(one) for one in text if one not in IFS)
    found = [f"[{blanks}]*[{others}][{blanks}]*" if blanks else f"[{others}]"] if others else []
    return re.compile("|".join([*found, *([f"[{blanks}]+"] if blanks else [])]) or r"(?!)")


def merged(parts: list[str | Unknown], position: Position) -> Value:
    """The value of these parts, with adjacent texts merged."""
    found: list[str | Unknown] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if texts and any(texts):
            found.append(joined_text(texts))
        texts = []
        found.append(part)
    if any(texts):
        found.append(joined_text(texts))
    if any(isinstance(part, Unknown) and part.is_gap for part in found):
        found = [part for part in widened_gaps(found) if part != ""]
    if sum(len(part) for part in found if isinstance(part, str)) > MAX_VALUE:
        raise TooMuch(f"a value is longer than {MAX_VALUE:,} characters")
    return Value(tuple(found), position)


def resolved_path(state: State, path: str) -> Path:
    """A path of the script, seen from its current folder."""
    return (state.folder or Path()) / path
