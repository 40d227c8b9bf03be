"""A parser of bash scripts: from text to statements, with the line and column of every word."""

from __future__ import annotations

import re

from roost.config.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Case,
    Condition,
    For,
    Function,
    Group,
    If,
    Input,
    Loop,
    Pipeline,
    ShellError,
    Simple,
    Statement,
    Word,
)
from roost.config.shell.words import END_OF_WORD, RESERVED_WORD, WordParser

_KEYWORD = re.compile(r"(if|for|while|until|case|select|function|\{|\[\[)(?=[\s;(]|$)")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|&>>|&>|>>|>\||<(?!\()|>(?!\())")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?=\[|\+?=)")
_EQUALS = re.compile(r"(\+?)=")
_FUNCTION = re.compile(r"([\w.:-]+)[ \t]*\([ \t]*\)")
_FUNCTION_NAME = re.compile(r"[\w.:-]+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_IN = re.compile(r"in(?=\s|;)")
_CONDITION_END = re.compile(r"\]\](?=[\s;&|)]|$)")
_PIPELINE_PREFIX = re.compile(r"(!|time(?:[ \t]+-p)?)(?=\s)")
_DECLARING = ("declare", "export", "local", "readonly", "typeset")


Redirections = tuple[Input | None, Word | None, bool, bool, bool]


class Parser(WordParser):
    """Parses a script, or text within one."""

    stdin: Input | None = None  # of the command being parsed
    stdout: Word | None = None
    is_redirected = False
    appends: bool = False
    merges_stderr: bool = False

    def parse(self) -> tuple[tuple[Statement, ...], ShellError | None]:
        """The statements before the first syntax error, which bash runs too, and that error."""
        statements: list[Statement] = []
        try:
            while True:
                self._skip_lines()
                if self.at >= len(self.text):
                    return tuple(statements), None
                start = self.at
                statements += self._statement()
                if self.at == start:
                    raise self._error(f"{self._shown()} is not expected here")
        except ShellError as error:
            return tuple(statements), error

    def _body(self, *ends: str) -> tuple[Statement, ...]:
        """Statements up to one of these words, which is not consumed."""
        statements: list[Statement] = []
        while True:
            self._skip_lines()
            reserved = RESERVED_WORD.match(self.text, self.at)
            if reserved and reserved[1] in ends:
                return tuple(statements)
            if any(end in (")", ";;", ";&") and self._peek(end) for end in ends) or self.at >= len(self.text):
                return tuple(statements)
            start = self.at
            statements += self._statement()
            if self.at == start:
                raise self._error(f"{self._shown()} is not expected here")

    def _statement(self) -> list[Statement]:
        self._enter()
        if self._peek(";") and not self._peek(";;") and not self._peek(";&"):
            self.at += 1
            self.depth -= 1
            return []
        found = self._and_or()
        self._skip_blanks()
        if not any(self._peek(one) for one in ("&&", ";;", ";&")):
            if self._take("&"):
                found = Group((found,), is_subshell=True, is_background=True)
            else:
                self._take(";")
        self.depth -= 1
        return [found]

    def _and_or(self) -> Statement:
        first = self._pipeline()
        rest: list[tuple[str, Statement]] = []
        while True:
            self._skip_blanks()
            operator = next((one for one in ("&&", "||") if self._take(one)), None)
            if operator is None:
                return AndOr(first, tuple(rest)) if rest else first
            self._skip_lines()
            rest.append((operator, self._pipeline()))

    def _pipeline(self) -> Statement:
        self._skip_blanks()
        is_negated = False
        while prefix := _PIPELINE_PREFIX.match(self.text, self.at):
            is_negated ^= prefix[1] == "!"
            self.at = prefix.end()
            self._skip_blanks()
        commands = [self._command()]
        while True:
            self._skip_blanks()
            if self._peek("||") or not self._take("|"):
                return Pipeline(tuple(commands), is_negated) if is_negated or len(commands) > 1 else commands[0]
            if self._take("&"):
                commands[-1] = Group((commands[-1],), merges_stderr=True)
            self._skip_lines()
            commands.append(self._command())

    def _command(self) -> Statement:
        keyword = _KEYWORD.match(self.text, self.at)
        start = self.at
        compound: Statement
        if self._peek("(("):
            closed = self._matching(self.at + 2, "))")
            if closed is not None:
                compound = ArithmeticCommand(self._inner(self.at + 2, closed), self._position())
                self.at = closed + 2
                return self._redirected(compound)
        if self._take("("):
            body = self._body(")")
            self._expect(")", "(", start)
            return self._redirected(Group(body, is_subshell=True))
        if keyword is not None:
            self.at = keyword.end()
            return self._redirected(self._compound(keyword[1], start))
        function = _FUNCTION.match(self.text, self.at)
        if function is not None:
            self.at = function.end()
            self._skip_lines()
            return Function(function[1], self._command())
        return self._simple()

    def _compound(self, keyword: str, start: int) -> Statement:
        if keyword == "{":
            body = self._body("}")
            self._expect("}", "{", start)
            return Group(body)
        if keyword == "[[":
            return self._condition(start)
        if keyword == "if":
            return self._if(start)
        if keyword in ("while", "until"):
            condition = self._body("do")
            return Loop(condition, self._loop_body(keyword, start), keyword == "until", self._position(start))
        if keyword == "case":
            return self._case(start)
        if keyword == "function":
            self._skip_blanks()
            name = _FUNCTION_NAME.match(self.text, self.at)
            if name is None:
                raise self._error("function has no name", start)
            self.at = name.end()
            self._skip_blanks()
            if self._take("("):
                self._expect(")", "function", start)
            self._skip_lines()
            return Function(name[0], self._command())
        return self._for(keyword, start)

    def _loop_body(self, keyword: str, start: int) -> tuple[Statement, ...]:
        self._expect("do", keyword, start)
        body = self._body("done")
        self._expect("done", keyword, start)
        return body

    def _if(self, start: int) -> If:
        clauses = []
        otherwise: tuple[Statement, ...] = ()
        while True:
            condition = self._body("then")
            self._expect("then", "if", start)
            clauses.append((condition, self._body("elif", "else", "fi")))
            if self._take("elif"):
                continue
            if self._take("else"):
                otherwise = self._body("fi")
            self._expect("fi", "if", start)
            return If(tuple(clauses), otherwise, self._position(start))

    def _for(self, keyword: str, start: int) -> For:
        self._skip_blanks()
        if self._peek("(("):
            closed = self._matching(self.at + 2, "))")
            if closed is None:
                raise self._error("(( has no ))", start)
            ends = [at for at in range(self.at, closed) if self.text[at] == ";"]
            if len(ends) != 2:
                raise self._error("for (( has not two ;", start)
            bounds = ((self.at + 2, ends[0]), (ends[0] + 1, ends[1]), (ends[1] + 1, closed))
            header = tuple(self._inner(first, last) for first, last in bounds)
            self.at = closed + 2
            self._skip_lines()
            self._take(";")
            return For("", header, self._loop_body(keyword, start), self._position(start))
        name = _VARIABLE.match(self.text, self.at)
        if name is None:
            raise self._error(f"{keyword} has no variable", start)
        self.at = name.end()
        self._skip_lines()
        words: list[Word] | None = None
        if _IN.match(self.text, self.at):
            self.at += 2
            words = []
            self._skip_blanks()
            while self.at < len(self.text) and self.text[self.at] not in ";\n":
                words.append(self._some_word())
                self._skip_blanks()
        self._skip_blanks()
        self._take(";")
        return For(
            name[0],
            None if words is None else tuple(words),
            self._loop_body(keyword, start),
            self._position(start),
        )

    def _case(self, start: int) -> Case:
        self._skip_blanks()
        subject = self._word()
        self._skip_lines()
        if not self._take("in"):
            raise self._error("case has no in", start)
        clauses: list[tuple[tuple[Word, ...], tuple[Statement, ...], str]] = []
        while True:
            self._skip_lines()
            if RESERVED_WORD.match(self.text, self.at) and self._take("esac"):
                return Case(subject, tuple(clauses), self._position(start))
            if self.at >= len(self.text):
                raise self._error("case has no esac", start)
            self._take("(")
            patterns = []
            while True:
                self._skip_blanks()
                patterns.append(self._word(is_pattern=True))
                self._skip_blanks()
                if not self._take("|"):
                    break
            if not self._take(")"):
                raise self._error("a pattern of case has no )")
            body = self._body(";;", ";&", "esac")
            end = next((one for one in (";;&", ";;", ";&") if self._take(one)), ";;")
            clauses.append((tuple(patterns), body, end))

    def _condition(self, start: int) -> Condition:
        tokens: list[Word | str] = []
        while True:
            self._skip_lines()
            if self.at >= len(self.text):
                raise self._error("[[ has no ]]", start)
            if _CONDITION_END.match(self.text, self.at):
                self.at += 2
                return Condition(tuple(tokens), self._position(start))
            is_expression = tokens[-1:] == ["=~"]  # brackets and bars are part of a regular expression
            operators = () if is_expression else ("&&", "||", "(", ")", "<", ">")
            operator = next((one for one in operators if self._take(one)), None)
            if operator is not None:
                tokens.append(operator)
                continue
            is_pattern = tokens[-1:] in (["=="], ["="], ["!="])
            word = self._some_word("" if is_expression else END_OF_WORD, is_pattern)
            plain = word.text if len(word.parts) == 1 and not getattr(word.parts[0], "is_quoted", True) else None
            tokens.append(plain if plain in ("!", "=~", "==", "=", "!=") and plain is not None else word)

    def _redirected(self, compound: Statement) -> Statement:
        outer = self._begin_redirections()
        while self._redirection():
            pass
        stdin, stdout, is_redirected, _, merges_stderr = self._end_redirections(outer)
        if stdin is None and stdout is None and not is_redirected and not merges_stderr:
            return compound
        return Group((compound,), stdin=stdin, stdout=stdout, is_redirected=is_redirected, merges_stderr=merges_stderr)

    def _begin_redirections(self) -> Redirections:
        """Begin the redirections of a nested command; returns those of the command around it."""
        outer = self.stdin, self.stdout, self.is_redirected, self.appends, self.merges_stderr
        self.stdin, self.stdout, self.is_redirected, self.appends, self.merges_stderr = None, None, False, False, False
        return outer

    def _end_redirections(self, outer: Redirections) -> Redirections:
        """The redirections of the nested command; continues with those of the command around it."""
        found = self.stdin, self.stdout, self.is_redirected, self.appends, self.merges_stderr
        self.stdin, self.stdout, self.is_redirected, self.appends, self.merges_stderr = outer
        return found

    def _redirection(self) -> bool:
        """Parse a redirection; False if there is none here."""
        self._skip_blanks()
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        number = match[0].removesuffix(match[1])
        is_output = number == "1" or (not number and match[1].startswith((">", "&>")))
        self._skip_blanks()
        outer, is_other = self.stdin, re.match(r"[1-9{]", match[0]) is not None  # of another descriptor
        if match[1] in ("<<", "<<-"):
            delimiter = self._word()
            is_quoted = any(part.is_quoted for part in delimiter.parts)
            self.stdin = Input(None, delimiter.text or "", match[1] == "<<-", is_quoted)
            self.here_documents.append(self.stdin)
        elif match[1] == "<" and self._peek("<("):
            start = self.at
            self.at += 1
            output = self._command_substitution(start, is_quoted=True, is_input=True)
            self.stdin = Input(Word((output,), self._position(start)))
        elif self.at < len(self.text) and self.text[self.at] not in "\n;":
            word = self._word()
            is_output &= word.text not in ("/dev/stdout", "/dev/fd/1") and (match[1], word.text) != (">&", "1")
            self.merges_stderr |= number == "2" and (match[1], word.text) == (">&", "1")
            if match[1] in ("<", "<<<", "<>", "<&"):
                self.stdin = Input(word if match[1] == "<<<" else None)
            elif match[0] in (">", ">|", ">>"):
                self.stdout, self.appends = word, match[0] == ">>"
        if is_other:
            self.stdin = outer
        self.is_redirected |= is_output
        return True

    def _simple(self) -> Simple:
        start = self.at
        if RESERVED_WORD.match(self.text, start):
            raise self._error(f"{self._shown()} is not expected here")
        assignments: list[Assignment] = []
        words: list[Word] = []
        outer = self._begin_redirections()
        while True:
            if self._redirection():
                continue
            if self.at >= len(self.text):
                break
            character = self.text[self.at]
            if character in "\n;&|)" or (character == "(" and words):
                break
            may_assign = not words or words[0].text in _DECLARING
            assigned = self._assignment() if may_assign else None
            if assigned is not None:
                assignments.append(assigned)
                continue
            words.append(self._some_word())
        if not words and not assignments and self.at == start:
            raise self._error(f"{self._shown()} is not expected here")
        if self.at < len(self.text) and self.text[self.at] == "(":
            raise self._error("( is not expected here")
        redirected = self._end_redirections(outer)
        return Simple(tuple(assignments), tuple(words), self._position(start), *redirected)

    def _assignment(self) -> Assignment | None:
        """Parse an assignment; None if there is none here."""
        name = _ASSIGNED.match(self.text, self.at)
        if name is None:
            return None
        position, first = self._position(), name.end() + 1
        closed = self._index_end(first) if self.text[name.end()] == "[" else None
        equals = _EQUALS.match(self.text, name.end() if closed is None else closed + 1)
        if equals is None:
            return None
        index = None if closed is None else self._inner(first, closed, False)
        self.at = equals.end()
        appends = bool(equals[1])
        if self._take("("):
            items: list[tuple[Word | None, Word]] = []
            start = self.at
            while True:
                self._skip_lines()
                if self._take(")"):
                    return Assignment(name[1], tuple(items), position, index, appends)
                if self.at >= len(self.text):
                    raise self._error(f"the array {name[1]} has no )", start)
                closed = self._index_end(self.at + 1) if self._peek("[") else None
                key = None
                if closed is not None and self.text.startswith("=", closed + 1):
                    key = self._inner(self.at + 1, closed, False)
                    self.at = closed + 2
                before = self.at
                word = self._word()
                if self.at == before and key is None:
                    raise self._error(f"{self._shown()} is not expected in the array {name[1]}")
                items.append((key, word))
        if self.at < len(self.text) and self.text[self.at] not in END_OF_WORD:
            return Assignment(name[1], self._word(), position, index, appends)
        return Assignment(name[1], Word((), position), position, index, appends)
