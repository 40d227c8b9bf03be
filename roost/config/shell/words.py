"""A parser of the words of a bash script: quotes and expansions."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from roost.config.findings import Position
from roost.config.shell.syntax import (
    Arithmetic,
    Input,
    Literal,
    Parameter,
    Part,
    Places,
    ShellError,
    SourceText,
    Statement,
    Substitution,
    Word,
    joined_text,
    line_places,
    places_between,
    places_of,
    position_in,
    word_of,
)

MAX_DEPTH = 30  # of statements and expansions within each other; each level is some frames of Python's stack
END_OF_WORD = " \t\n;&|()<>"
RESERVED_WORD = re.compile(r"(then|else|elif|fi|do|done|esac|\})(?=[\s;&|)]|$)")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|##?|%%?|//|/[#%]?|\^\^?|,,?|:|@(?=[A-Za-z]\})")
_ESCAPES = dict(zip("abeEfnrtv\\'\"?", "\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))
_ESCAPE = re.compile(
    r"((?:\\(?:x[\da-fA-F]{1,2}|[0-7]{1,3}))+)|\\(?:u([\da-fA-F]{1,4})|U([\da-fA-F]{1,8})|c(.)|(.))|[^\\]+", re.DOTALL
)


class WordParser(ABC):
    """Parses the words of a text; `places` is the source map of a text that is not a whole file."""

    def __init__(self, text: str, file: str | None, places: Places | None = None, depth: int = 0) -> None:
        self.text, self.file, self.places = text, file, places or line_places(text, file)
        self.at, self.depth = 0, depth
        self.here_documents: list[Input] = []  # whose bodies begin on the next line

    @abstractmethod
    def parse(self) -> tuple[tuple[Statement, ...], ShellError | None]: ...

    @abstractmethod
    def _body(self, *ends: str) -> tuple[Statement, ...]: ...

    # --- positions and characters

    def _position(self, at: int | None = None) -> Position:
        return position_in(self.places, self.at if at is None else at)

    def _source(self, start: int, end: int) -> SourceText:
        return SourceText(self.text[start:end], places_between(self.places, start, end))

    def _error(self, what: str, at: int | None = None) -> ShellError:
        return ShellError(what, self._position(at))

    def _shown(self) -> str:
        word = re.compile(r"\S{1,20}").match(self.text, self.at)
        return repr(word[0]) if word else "the end of the script"

    def _peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def _take(self, text: str) -> bool:
        if self._peek(text):
            self.at += len(text)
            return True
        return False

    def _expect(self, text: str, what: str, start: int) -> None:
        self._skip_lines()
        is_word = text[-1].isalpha()
        if not self._peek(text) or (is_word and not RESERVED_WORD.match(self.text, self.at)):
            raise self._error(f"{what} has no {text}", start)
        self.at += len(text)

    def _enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"commands are nested more than {MAX_DEPTH} deep")

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self._peek("\\\n"):
                self.at += 2
            elif self.at == len(self.text) - 1 and self._peek("\\"):  # alone at the end of a script
                self.at += 1
            elif self._peek("\\\r\n"):
                self.at += 3
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _skip_lines(self) -> None:
        """Skip blanks, comments and line ends, and the here-documents after a line end."""
        self._skip_blanks()
        while self._take("\n"):
            self._skip_here_documents()
            self._skip_blanks()

    def _skip_here_documents(self) -> None:
        for document in self.here_documents:
            start = self.at
            lines: list[str] = [self._source(start, start)]
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                begin, self.at = self.at, min(end + 1, len(self.text))
                while document.strips_tabs and self.text.startswith("\t", begin, end):
                    begin += 1
                if self.text[begin:end].rstrip("\r") == document.delimiter:
                    break
                lines += [self._source(begin, end), "\n"]
            document.body = self._document(joined_text(lines), document.is_quoted, start)
        self.here_documents = []

    def _document(self, text: str, is_quoted: bool, start: int) -> Word | None:
        """The text of a here-document, with its expansions unless the delimiter is quoted."""
        position = self._position(start)
        parser = type(self)(text, self.file, places_of(text, position), self.depth)
        parts: list[Part] = [Literal(text, True)] if is_quoted else []
        try:
            while not is_quoted and parser.at < len(text):
                plain = re.compile(r"[^\\$`]+|\\[^$`\\\n]").match(text, parser.at)
                if plain is None:
                    parser._piece(parts, is_quoted=True)
                else:
                    parts.append(Literal(parser._source(*plain.span()), True))
                    parser.at = plain.end()
        except ShellError:
            return None
        return word_of(parts, position)

    # --- words

    def _word(self, ends: str = END_OF_WORD, is_pattern: bool = False) -> Word:
        """The word up to one of the characters `ends`, or up to a blank if `ends` is empty, as for regular expressions.

        A pattern may have `@(a|b)` and the like.
        """
        position, start = self._position(), self.at
        parts: list[Part] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if is_pattern and character == "(" and self.at > start and self.text[self.at - 1] in "?*+@!":
                self._choices(parts)
                continue
            if character in (ends or " \t\n"):
                if character in "<>" and self.text.startswith("(", self.at + 1):
                    self.at += 1
                    parts.append(self._command_substitution(self.at - 1, is_quoted=True))
                    continue
                break
            self._piece(parts, is_quoted=False)
        return word_of(parts, position)

    def _choices(self, parts: list[Part]) -> None:
        """Add the `(a|b)` of a pattern, whose blanks and bars are part of it."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            character = self.text[self.at]
            self._piece(parts, is_quoted=False)
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0:
                return
        raise self._error("( is not closed", start)

    def _some_word(self, ends: str = END_OF_WORD, is_pattern: bool = False) -> Word:
        """A word that must be here."""
        start = self.at
        word = self._word(ends, is_pattern)
        if self.at == start:
            raise self._error(f"{self._shown()} is not expected here")
        return word

    def _inner(self, start: int, end: int, is_quoted: bool = True) -> Word:
        """The text between two offsets as one word."""
        parser = type(self)(self.text[:end], self.file, self.places, self.depth)
        parser.at = start
        parser._enter()
        parts: list[Part] = []
        while parser.at < end:
            parser._piece(parts, is_quoted)
        return word_of(parts, self._position(start))

    def _piece(self, parts: list[Part], is_quoted: bool) -> None:
        """Add the literal or expansion that begins here."""
        character = self.text[self.at]
        if character == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            if following == "\n":
                return
            if is_quoted and following not in '$`"\\':
                parts.append(Literal(self._source(self.at - 2, self.at), True))
            else:
                parts.append(Literal(self._source(self.at - 1, self.at), True))
        elif character == "'" and not is_quoted:
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise self._error("a single quote is not closed")
            parts.append(Literal(self._source(self.at + 1, end), True))
            self.at = end + 1
        elif character == '"':
            self._double_quoted(parts)
        elif character == "`":
            parts.append(self._backquoted(is_quoted))
        elif character == "$":
            self._expansion(parts, is_quoted)
        else:
            match = re.compile(r"[^\\'\"`$ \t\n;&|()<>}]+").match(self.text, self.at)
            end = match.end() if match and not is_quoted else self.at + 1
            parts.append(Literal(self._source(self.at, end), is_quoted))
            self.at = end

    def _double_quoted(self, parts: list[Part]) -> None:
        start, before = self.at, len(parts)
        self.at += 1
        while self.at < len(self.text):
            if self._take('"'):
                if len(parts) == before:
                    parts.append(Literal("", True))  # "" is a word, though an empty one
                return
            if self.text[self.at] == "'":
                parts.append(Literal(self._source(self.at, self.at + 1), True))
                self.at += 1
                continue
            plain = re.compile(r'[^\\"`$\']+').match(self.text, self.at)
            if plain is not None:
                parts.append(Literal(self._source(*plain.span()), True))
                self.at = plain.end()
            else:
                self._piece(parts, is_quoted=True)
        raise self._error("a double quote is not closed", start)

    def _backquoted(self, is_quoted: bool) -> Substitution:
        match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise self._error("a backquote is not closed")
        self.at = match.end()
        places = places_between(self.places, *match.span(1))
        text = re.sub(r"\\([$`\\])", r"\1", match[1])  # other backslashes stay for the command
        inner = type(self)(text, self.file, places, self.depth)
        inner._enter()
        body, error = inner.parse()
        return Substitution(None if error else body, match[0], is_quoted)

    def _command_substitution(self, start: int, is_quoted: bool, is_input: bool = False) -> Substitution:
        """Parse `$(...)` or `<(...)`, which begins at `start`; the parser is at its `(`."""
        self._enter()
        outer, self.here_documents = self.here_documents, []
        self.at += 1
        body = self._body(")")
        self._skip_lines()
        if not self._take(")"):
            raise self._error("$( is not closed", start)
        self.here_documents = outer
        self.depth -= 1
        is_output = self.text[start] == "$" or is_input
        return Substitution(body if is_output else None, self.text[start : self.at], is_quoted)

    def _expansion(self, parts: list[Part], is_quoted: bool) -> None:
        start = self.at
        if self._peek("$(("):
            closed = self._matching(self.at + 3, "))")
            if closed is not None:
                expression = self._inner(self.at + 3, closed)
                self.at = closed + 2
                parts.append(Arithmetic(expression, self.text[start : self.at], is_quoted))
                return
        if self._peek("$("):
            self.at += 1
            parts.append(self._command_substitution(start, is_quoted))
        elif self._peek("$[") and (closed := self._matching(self.at + 2, "]")) is not None:
            expression = self._inner(self.at + 2, closed)
            self.at = closed + 1
            parts.append(Arithmetic(expression, self.text[start : self.at], is_quoted))
        elif self._peek("${"):
            parts.append(self._parameter(is_quoted))
        elif self._peek("$'") and not is_quoted:
            match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
            if match is None:
                raise self._error("a single quote is not closed")
            parts.append(Literal("", True))
            for one in _ESCAPE.finditer(self.text, *match.span(1)):
                text, null, _ = _unescaped(one).partition("\0")
                parts.append(Literal(SourceText(text, self._source(*one.span()).places), True))
                if null:
                    break  # as bash does
            self.at = match.end()
        elif self._peek('$"') and not is_quoted:
            self.at += 1
        else:
            name = _NAME.match(self.text, self.at + 1)
            self.at = name.end() if name else self.at + 1
            if name is None:
                parts.append(Literal(self._source(start, self.at), is_quoted))
            else:
                parts.append(Parameter(name[0], self.text[start : self.at], is_quoted))

    def _parameter(self, is_quoted: bool) -> Parameter:
        self._enter()
        start = self.at
        self.at += 2
        is_length = self._peek("#") and not re.compile(r"#[}:?-]").match(self.text, self.at) and self._take("#")
        is_indirect = not is_length and not self._peek("!}") and self._take("!")
        name = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]").match(self.text, self.at)
        if name is None:
            raise self._error("${ is not followed by a name", start)
        self.at = name.end()
        index = None
        if is_indirect and (listed := re.compile(r"[*@](?=\})").match(self.text, self.at)):  # ${!PREFIX*}
            self.at += 2
            self.depth -= 1
            return Parameter(name[0], self.text[start : self.at], is_quoted, None, listed[0], is_indirect=True)
        if self._peek("["):
            closed = self._matching(self.at + 1, "]")
            if closed is None:
                raise self._error("[ is not closed", start)
            index = self._inner(self.at + 1, closed, False)
            self.at = closed + 1
        operator = _OPERATOR.match(self.text, self.at)
        argument = None
        if operator is not None:
            self.at = operator.end()
            is_pattern = operator[0][0] in "#%/^,"  # special characters of a pattern stay special inside quotes
            argument = self._argument(is_quoted and not is_pattern, start)
        if not self._take("}"):
            raise self._error("${ is not closed", start)
        self.depth -= 1
        return Parameter(
            name[0],
            self.text[start : self.at],
            is_quoted,
            index,
            operator[0] if operator else "",
            argument,
            is_length,
            is_indirect,
        )

    def _argument(self, is_quoted: bool, start: int) -> Word:
        """The word inside `${X:-...}`; blanks and operators are part of it."""
        position = self._position()
        parts: list[Part] = []
        while self.at < len(self.text):
            if self._peek("}"):
                return word_of(parts, position)
            if self.text[self.at] in " \t\n;&|()<>" or (is_quoted and self.text[self.at] == "'"):
                parts.append(Literal(self._source(self.at, self.at + 1), is_quoted))
                self.at += 1
            else:
                self._piece(parts, is_quoted)
        raise self._error("${ is not closed", start)

    def _matching(self, start: int, end: str) -> int | None:
        """Offset of the `))` or `]` that closes what opened just before `start`; None if nothing does."""
        if end == "]":
            return self._index_end(start)
        depth, at = 0, start
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif character == "(":
                depth += 1
            elif character == ")":
                if depth == 0:
                    return at if self.text.startswith(end, at) else None
                depth -= 1
            at += 1
        return None

    def _index_end(self, start: int) -> int | None:
        """Offset of the `]` that closes an index, past those in quotes, expansions and inner brackets, or None."""
        ends, at = ["]"], start
        while at < len(self.text) and len(ends) < MAX_DEPTH and self.text[at] != "\n":
            character, end = self.text[at], ends[-1]
            if character == "\\":
                at += 1
            elif character == end:
                ends.pop()
                if not ends:
                    return at
            elif character == "'" and end != '"':
                at = self.text.find("'", at + 1)
                if at < 0:
                    return None
            elif character in '"`':
                ends.append(character)
            elif self.text.startswith(("${", "$("), at):
                at += 1
                ends.append(")" if self.text[at] == "(" else "}")
            elif (character, end) in (("[", "]"), ("(", ")")):
                ends.append(end)
            at += 1
        return None


def _unescaped(match: re.Match[str]) -> str:
    """The text of an escape in `$'...'`; unknown escapes stay as they are."""
    numbers, short, long, control, letter = match.groups()
    if numbers:
        codes = re.findall(r"x[\da-fA-F]+|\d+", numbers)
        return bytes(
            int(f"0{one}" if one[0] == "x" else one, 16 if one[0] == "x" else 8) % 256 for one in codes
        ).decode(errors="surrogateescape")
    if short or long:
        code = int(short or long, 16)
        return chr(code) if code <= 0x10FFFF else match[0]
    return chr(ord(control) & 0x1F) if control else _ESCAPES.get(letter, match[0])
