"""Output of the few commands that is known without running them: names of folders and files, counts of words."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from roost.config.shell.state import State
from roost.config.shell.syntax import AndOr, Pipeline, Simple, Statement
from roost.config.shell.values import Value

_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def echoed(arguments: Sequence[str]) -> str | None:
    """Output of `echo`; None for escapes that are not known."""
    words, options = list(arguments), ""
    while words and re.fullmatch(r"-[neE]+", words[0]):
        options += words.pop(0)[1:]
    text: str | None = " ".join(words)
    if re.search("e[^E]*$", options):
        text = _unescaped(" ".join(words))
    return None if text is None else text if "n" in options else f"{text}\n"


def _unescaped(text: str) -> str | None:
    if any(one not in _ESCAPES for one in re.findall(r"\\(.?)", text, re.DOTALL)):
        return None
    return re.sub(r"\\(.)", lambda match: _ESCAPES[match[1]], text)


def printed(arguments: Sequence[str]) -> str | None:
    """Output of `printf` with `%s` and `%d`; None for other formats."""
    if not arguments:
        return None
    form, *words = arguments
    spelled = _unescaped(form)
    fields = re.findall(r"%(.?)", form)
    if spelled is None or len(fields) != len(words) or any(one not in ("s", "d") for one in fields):
        return None
    if any(one == "d" and not re.fullmatch(r"-?[1-9]\d*|0", word) for one, word in zip(fields, words, strict=True)):
        return None
    waiting = iter(words)
    return re.sub("%.", lambda _: next(waiting), spelled)


def output_of(words: Sequence[str], state: State) -> str | None:
    """Output of a command whose words are known; None where only a run tells it."""
    name, *arguments = words or ("",)
    if name == "echo":
        return echoed(arguments)
    if name == "printf":
        return printed(arguments)
    text = _line_of(name, [word for word in arguments if not re.fullmatch(r"-\w|--", word)], state)
    return None if text is None else f"{text}\n"


def _line_of(name: str, paths: Sequence[str], state: State) -> str | None:
    if name == "pwd":
        return str(state.folder) if state.folder is not None else None
    if name == "dirname" and len(paths) == 1:
        return str(PurePosixPath(paths[0]).parent)
    if name == "basename" and paths:
        base = PurePosixPath(paths[0]).name
        return base.removesuffix(paths[1]) if len(paths) > 1 and paths[1] != base else base
    if name in ("realpath", "readlink") and len(paths) == 1:
        return os.path.normpath((state.folder or Path()) / paths[0])
    if name == "seq" and 1 <= len(paths) <= 3 and all(re.fullmatch(r"\d{1,4}", word) for word in paths):
        numbers = [int(word) for word in paths]
        first, step = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) > 2 else 1
        return "\n".join(map(str, range(first, numbers[-1] + 1, max(1, step))))
    return None


def filtered(text: str, words: Sequence[str]) -> str | None:
    """Output of a filter such as `wc -w`; None for one that is not known."""
    if words in (["wc", "-w"], ["wc", "--words"]):
        return str(len(text.split()))
    if words in (["wc", "-l"], ["wc", "--lines"]):
        return str(text.count("\n"))
    if len(words) == 3 and words[:2] == ["tr", "-d"] and re.fullmatch(r"[ ,\"']+", words[2]):
        return re.sub(f"[{re.escape(words[2])}]", "", text)
    if len(words) == 3 and words[0] == "tr":
        old, new = _unescaped(words[1]), _unescaped(words[2])
        return text.replace(old, new) if old is not None and new is not None and len(old) == len(new) == 1 else None
    joined, lines = " ".join(words), text.splitlines()
    if found := re.fullmatch(r"awk -F ?'?([^\s\\|.*+?^$()\[\]{}])'? \{ ?print NF;? ?\}", joined):
        return "".join(f"{len(line.split(found[1])) if line else 0}\n" for line in lines)
    if found := re.fullmatch(r"cut -d ?(.) -f ?(\d)", joined):
        return "".join(f"{_field(line, found[1], int(found[2]))}\n" for line in lines)
    return None


def _field(line: str, delimiter: str, number: int) -> str:
    parts = line.split(delimiter)
    if len(parts) == 1:
        return line  # as cut does
    return parts[number - 1] if 0 < number <= len(parts) else ""


def is_folder_change(statement: Statement) -> tuple[Simple, Statement] | None:
    """The `cd` and the rest of `cd folder && command`, a usual way to find where a script is."""
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
