"""Output of commands that is known without running them, and the text of files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from roost.config.shell.builtins import Assignments
from roost.config.shell.conditions import Status, is_folder_change, known_texts, output_of, piped
from roost.config.shell.effects import submits
from roost.config.shell.expand import folder_of
from roost.config.shell.filters import filtered
from roost.config.shell.state import State, Value, text_value
from roost.config.shell.syntax import Simple, Statement, Substitution, Word


class Outputs(Assignments):
    """The output of command substitutions, and the text of files that commands are given."""

    read_text: Callable[[Path], str | None]

    @abstractmethod
    def _apart(self, statements: Sequence[Statement], state: State) -> Status: ...

    @abstractmethod
    def _reads(self, *words: Word) -> None: ...

    def _content(self, path: str, state: State) -> Value | None:
        """The text of a file, with its place; None if it does not exist."""
        file = folder_of(state, path)
        text = self.read_text(file) if file not in state.written else None
        return state.written.get(file) if text is None else text_value(text, (path, 1, 1))

    def _output(self, part: Substitution, state: State) -> Value | None:
        """The output of `$(...)` where it need not be run to be known."""
        if part.body is not None and any(submits(statement) for statement in part.body):
            self._apart(part.body, state)  # the number that it prints is not known
            return None
        if part.body is None or len(part.body) != 1:
            return None
        inner = state.copy()
        statement = part.body[0]
        changed = is_folder_change(statement)
        if changed is not None:
            change, statement = changed
            words = [value for word in change.words[1:] for value in self.expander.words(word, inner)]
            self._do_cd(words, change.position, inner)
        first, *filters = piped(statement)
        text: str | None = None
        if isinstance(first, Simple) and not first.is_redirected:
            self._reads(*first.words)
            words = [value for word in first.words for value in self.expander.words(word, inner)]
            texts = known_texts(words)
            if texts and texts[0] not in inner.functions:
                text = output_of(texts, inner) if first.stdin is None else self._of_input(first.stdin, texts, inner)
        for one in filters:
            texts = None
            if isinstance(one, Simple) and not one.is_redirected and one.stdin is None:
                texts = known_texts([value for word in one.words for value in self.expander.words(word, inner)])
            text = filtered(text, texts) if text is not None and texts is not None else None
        return None if text is None else text_value(text.rstrip("\n"))
