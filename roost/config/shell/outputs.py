"""Output of the few commands that is known without running them: names of folders and files, counts of words."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from roost.config.shell.state import State
from roost.config.shell.syntax import AndOr, Pipeline, Simple, Statement
from roost.config.shell.values import Value


def echoed(arguments: Sequence[str]) -> str:
    """Output of `echo`."""
    words = list(arguments)
    while words and re.fullmatch(r"-[neE]+", words[0]):
        words.pop(0)
    return " ".join(words)


def output_of(words: Sequence[str], state: State) -> str | None:
    """Output of a command whose words are known, without the newline at its end; None where only a run tells it."""
    name, *arguments = words or ("",)
    paths = [word for word in arguments if not re.fullmatch(r"-\w|--", word)]
    if name == "echo":
        return echoed(arguments)
    if name == "pwd":
        return str(state.folder) if state.folder is not None else None
    if name == "dirname" and len(paths) == 1:
        return str(PurePosixPath(paths[0]).parent)
    if name == "basename" and paths:
        base = PurePosixPath(paths[0]).name
        return base.removesuffix(paths[1]) if len(paths) > 1 and paths[1] != base else base
    if name in ("realpath", "readlink") and len(paths) == 1:
        return os.path.normpath((state.folder or Path()) / paths[0])
    if name == "printf" and len(paths) == 2 and paths[0] in ("%s", "%s\\n"):
        return paths[1]
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
        return str(text.count("\n") + 1)
    if len(words) == 3 and words[0] == "tr" and len(words[2].replace("\\n", "\n")) == 1 and len(words[1]) == 1:
        return text.replace(words[1], words[2].replace("\\n", "\n"))
    if len(words) == 3 and words[:2] == ["tr", "-d"] and re.fullmatch(r"[ ,\"']+", words[2]):
        return re.sub(f"[{re.escape(words[2])}]", "", text)
    joined = " ".join(words)
    if found := re.fullmatch(r"awk -F ?'?(\S)'? \{ ?print NF;? ?\}", joined):
        return str(len(text.split(found[1])))
    if found := re.fullmatch(r"cut -d ?(.) -f ?(\d)", joined):
        parts = text.split(found[1])
        return parts[int(found[2]) - 1] if 0 < int(found[2]) <= len(parts) else ""
    return None


def is_folder_change(statement: Statement) -> tuple[Simple, Statement] | None:
    """The `cd` and the rest of `cd folder && command`, a usual way to find where a script is."""
    if isinstance(statement, AndOr) and len(statement.rest) == 1 and statement.rest[0][0] == "&&":
        first, (_, second) = statement.first, statement.rest[0]
        if isinstance(first, Simple) and first.words and first.words[0].text == "cd":
            return first, second
    return None


def piped(statement: Statement) -> Sequence[Statement]:
    """The commands of a pipeline, or the one that there is."""
    return statement.commands if isinstance(statement, Pipeline) and not statement.is_negated else (statement,)


def known_texts(values: Sequence[Value]) -> list[str] | None:
    texts = [value.tested for value in values]
    return None if None in texts else [text for text in texts if text is not None]
