"""Expansion of words: parameters, arithmetic, quotes, and splitting into arguments."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roost.config.shell.arithmetic import NotKnown, evaluate
from roost.config.shell.state import State
from roost.config.shell.syntax import Arithmetic, Literal, Parameter, Part, Substitution, Word
from roost.config.shell.values import Unknown, Value, of_unknown, text_value
from roost.config.yaml_events import Position

MAX_WORDS = 5_000  # that one word may become
MAX_VALUE = 100_000  # characters of one value
_BRACES = re.compile(r"\{([^{},\s]*(?:,[^{},\s]*)+|-?\d{1,6}\.\.-?\d{1,6})\}")
_NUMBER = re.compile(r"\s*[-+]?\d{1,18}\s*")
OUTPUT = "the output of a command is known only where the script runs"
# Variables that only a run has a value for.
_AT_RUN_TIME = ("RANDOM", "SECONDS", "EPOCHSECONDS", "HOSTNAME", "BASHPID", "PPID", "UID", "LINENO")
Outputs = Callable[[Substitution, State], Value | None]


class TooMuch(ValueError):
    """A word would become longer than any that a script is written for."""


class Expander:
    """Expands words in a state; `outputs` gives the output of commands that need not be run to know it."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    def words(self, word: Word, state: State) -> list[Value]:
        """The arguments that a word becomes: none, one or several."""
        found: list[Value] = []
        for part in _with_braces(word):
            found += self._split(part, state)
            if len(found) > MAX_WORDS:
                raise TooMuch(f"a word becomes more than {MAX_WORDS:,} arguments")
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
                for index, value in enumerate(values):
                    parts += ([" "] if index else []) + list(value.parts)
        return _merged(parts, word.position)

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
        return found

    def number(self, word: Word, state: State) -> int:
        """The value of an arithmetic expression; NotKnown where it depends on a run."""
        value = self.one(word, state)
        text = value.tested
        if text is None:
            raise NotKnown(value.shown)
        return evaluate(text, lambda name: self._number_of(name, state, ()))

    def _number_of(self, name: str, state: State, above: tuple[str, ...]) -> int:
        value = state.scalar(name)
        text = "" if value is None else value.tested
        if text is None or name in above or len(above) > 10:
            raise NotKnown(name)
        if _NUMBER.fullmatch(text):
            return int(text)
        return evaluate(text, lambda inner: self._number_of(inner, state, (*above, name))) if text else 0

    # --- splitting

    def _split(self, word: Word, state: State) -> list[Value]:
        found: list[Value] = []
        current: list[str | Unknown] = []
        has_word = False
        position = word.position

        def close() -> None:
            nonlocal current, has_word
            if has_word:
                found.append(_merged(current, position))
            current, has_word = [], False

        is_alone = len(word.parts) == 1
        for at, part in enumerate(word.parts):
            if isinstance(part, Literal):
                value = self.one(Word((part,), word.position), state) if at == 0 else text_value(part.text)
                current += value.parts
                has_word = True
                continue
            values = self._values(part, state, word.position)
            if part.is_quoted:
                is_list = isinstance(part, Parameter) and part.is_list
                if not is_list:
                    has_word = True
                for index, value in enumerate(values):
                    if index:
                        close()
                    if (is_alone and value.position[1] is not None) or (is_alone and value.position[0] is not None):
                        position = value.position
                    current += value.parts
                    has_word = True
                continue
            for index, value in enumerate(values):
                if index:
                    close()
                if is_alone and value.position[0] is not None:
                    position = value.position
                for piece in value.parts:
                    if isinstance(piece, Unknown):
                        if piece.is_unset and is_alone:
                            continue
                        current.append(piece)
                        has_word = True
                        continue
                    for number, text in enumerate(re.split(r"[ \t\n]+", piece)):
                        if number:
                            close()
                        if text:
                            current.append(text)
                            has_word = True
        close()
        return found

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
        if part.is_indirect:
            return self._indirect(part, state, position)
        if part.is_list:
            values = list(state.arguments) if part.name in ("@", "*") else list(state.array(part.name).values())
            if part.is_length:
                return [self._length(values, part, position)]
            if part.operator in (":-", "-", ":+", "+"):
                chosen = bool(values) == (part.operator in (":+", "+"))
                if not chosen:
                    return values if part.operator in (":-", "-") else []
                return self.words(part.argument, state) if part.argument is not None else []
            if part.operator == ":":
                return self._slice(values, part, state, position)
            values = [self._changed(value, part, state) for value in values]
            if part.is_quoted and ("*" in (part.name, part.index.text if part.index else "")):
                return (
                    [
                        _merged(
                            [
                                piece
                                for at, one in enumerate(values)
                                for piece in ([" "] if at else []) + list(one.parts)
                            ],
                            position,
                        )
                    ]
                    if values
                    else []
                )
            return values
        value = self._plain(part, state, position)
        if part.is_length:
            text = value.tested if value is not None else ""
            return [text_value(str(len(text)), position) if text is not None else value or Value()]
        return [self._with_operator(part, value, state, position)]

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
            return state.arguments[number - 1] if number <= len(state.arguments) else None
        if name == "#":
            return self._length(list(state.arguments), part, position)
        if name in ("?", "$", "!", "-"):
            return of_unknown(Unknown(part.raw, "it is known only where the script runs", position))
        if name == "BASH_SOURCE":
            return text_value(state.file, position)
        if name == "PWD" and state.folder is not None:
            return text_value(str(state.folder), position)
        if part.index is not None:
            array = state.array(name)
            key = self.one(part.index, state).tested
            if key is None:
                return of_unknown(Unknown(part.raw, "its index is not known", position))
            if key not in array:
                try:
                    at = self.number(part.index, state)
                except NotKnown:
                    return array.get(key)
                return array.get(str(at if at >= 0 else len(array) + at))
            return array[key]
        value = state.scalar(name)
        if value is None and name in _AT_RUN_TIME:
            return of_unknown(Unknown(part.raw, "it is known only where the script runs", position, name))
        return value

    def _with_operator(self, part: Parameter, value: Value | None, state: State, position: Position) -> Value:
        operator = part.operator
        is_missing = value is None or (operator.startswith(":") and value.tested == "")
        argument = part.argument or Word((), position)
        if operator in (":-", "-", ":=", "="):
            if not is_missing and value is not None:
                return value
            found = self.one(argument, state)
            if operator in (":=", "=") and part.index is None:
                state.variables[part.name] = found
            return found
        if operator in (":+", "+"):
            return Value((), position) if is_missing else self.one(argument, state)
        if value is None:
            fix = part.name if not part.name.isdigit() else ""
            what = f"{part.name} is not set" if fix else f"argument {part.name} is not given"
            return of_unknown(Unknown(part.raw, what, position, fix, is_unset=True))
        if operator in ("", ":?", "?"):
            return value
        if operator == ":":
            return self._substring(value, argument, part, state)
        return self._changed(value, part, state)

    def _substring(self, value: Value, argument: Word, part: Parameter, state: State) -> Value:
        text, bounds = value.tested, self.one(argument, state).tested
        if text is None or bounds is None:
            return value
        start, _, length = bounds.partition(":")
        try:
            begin = evaluate(start or "0", lambda name: self._number_of(name, state, ()))
            count = evaluate(length, lambda name: self._number_of(name, state, ())) if length else None
        except NotKnown:
            return of_unknown(Unknown(part.raw, "its bounds are not known", value.position))
        begin = begin if begin >= 0 else max(0, len(text) + begin)
        end = None if count is None else begin + count if count >= 0 else count
        return text_value(text[begin:end], value.position)

    def _slice(self, values: list[Value], part: Parameter, state: State, position: Position) -> list[Value]:
        bounds = self.one(part.argument or Word((), position), state).tested
        start, _, length = (bounds or "").partition(":")
        try:
            begin = evaluate(start or "0", lambda name: self._number_of(name, state, ()))
            count = evaluate(length, lambda name: self._number_of(name, state, ())) if length else None
        except NotKnown:
            return [of_unknown(Unknown(part.raw, "its bounds are not known", position))]
        if part.name in ("@", "*"):  # they count from 1
            begin = max(0, begin - 1)
        begin = begin if begin >= 0 else max(0, len(values) + begin)
        return values[begin : None if count is None else begin + max(0, count)]

    def _changed(self, value: Value, part: Parameter, state: State) -> Value:
        """`${X%pattern}`, `${X/pattern/text}`, `${X^^}` and their like."""
        operator, argument = part.operator, part.argument
        if not operator or argument is None:
            return value
        text = value.tested
        if text is None:
            return value  # its unknown part is what a finding is about
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
        matches = re.compile(fnmatch.translate(pattern), re.DOTALL).match
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
        if not pattern or new is None:
            return value if pattern == "" else of_unknown(Unknown(part.raw, "its pattern is not known", value.position))
        plain = re.sub(r"\[([*?[])\]", r"\1", pattern)
        if re.search(r"[*?[]", re.sub(r"\[[*?[]\]", "", pattern)):
            return of_unknown(Unknown(part.raw, "its pattern is not read", value.position))
        changed = text.replace(plain, new, -1 if part.operator == "//" else 1)
        if len(changed) > MAX_VALUE:
            raise TooMuch(f"a value is longer than {MAX_VALUE:,} characters")
        return text_value(changed, value.position)

    def _indirect(self, part: Parameter, state: State, position: Position) -> list[Value]:
        if part.is_list:
            return [text_value(key, position) for key in state.array(part.name)]
        name = state.scalar(part.name)
        text = name.known if name is not None else None
        if not text or not re.fullmatch(r"[A-Za-z_]\w*", text):
            return [of_unknown(Unknown(part.raw, f"{part.name} names no variable", position))]
        return [self._with_operator(replace(part, name=text, is_indirect=False), state.scalar(text), state, position)]


def _merged(parts: list[str | Unknown], position: Position) -> Value:
    """The value of parts, with texts that follow each other as one."""
    merged: list[str | Unknown] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if texts and any(texts):
            merged.append("".join(texts))
        texts = []
        merged.append(part)
    if any(texts):
        merged.append("".join(texts))
    if sum(len(part) for part in merged if isinstance(part, str)) > MAX_VALUE:
        raise TooMuch(f"a value is longer than {MAX_VALUE:,} characters")
    return Value(tuple(merged), position)


def _with_braces(word: Word, depth: int = 0) -> list[Word]:
    """The words that `{a,b}` and `{1..4}` stand for; a brace that is quoted is none."""
    for at, part in enumerate(word.parts):
        match = _BRACES.search(part.text) if isinstance(part, Literal) and not part.is_quoted else None
        if match is None or not isinstance(part, Literal) or depth > 4:
            continue
        if ".." in match[1] and "," not in match[1]:
            first, last = (int(number) for number in match[1].split(".."))
            step = 1 if last >= first else -1
            if abs(last - first) > MAX_WORDS:
                raise TooMuch(f"a word becomes more than {MAX_WORDS:,} arguments")
            choices = [str(number) for number in range(first, last + step, step)]
        else:
            choices = match[1].split(",")
        found: list[Word] = []
        for choice in choices:
            text = part.text[: match.start()] + choice + part.text[match.end() :]
            parts = (*word.parts[:at], Literal(text), *word.parts[at + 1 :])
            found += _with_braces(replace(word, parts=parts), depth + 1)
            if len(found) > MAX_WORDS:
                raise TooMuch(f"a word becomes more than {MAX_WORDS:,} arguments")
        return found
    return [word]


def folder_of(state: State, path: str) -> Path:
    """A path as the script means it."""
    return (state.folder or Path()) / path
