"""Python in fenced blocks, found in what a policy said; and output, cut to what is shown of it."""

from __future__ import annotations

FENCE = "```"
PYTHON = ("python", "py", "python3")


def python_in(text: str) -> str:
    """The code of all fenced blocks of Python, also of a last one that does not end; or an empty text.

    Blocks without a language count where none is said to be Python.

    >>> fence = "`" * 3
    >>> python_in(f"First\\n{fence}python\\na = 1\\n{fence}\\nthen\\n{fence}py\\nprint(a)")
    'a = 1\\nprint(a)'
    >>> python_in("a = 1")
    ''
    """
    blocks = fenced(text)
    chosen = [code for language, code in blocks if language in PYTHON]
    chosen = chosen or [code for language, code in blocks if not language]
    return "\n".join(code for code in chosen if code.strip())


def fenced(text: str) -> list[tuple[str, str]]:
    """All fenced blocks, each with its language."""
    blocks: list[tuple[str, list[str]]] = []
    is_inside = False
    for line in text.splitlines():
        mark = line.strip()
        if is_inside and mark == FENCE:
            is_inside = False
        elif is_inside:
            blocks[-1][1].append(line)
        elif mark.startswith(FENCE) and FENCE not in mark[len(FENCE) :]:
            is_inside = True
            blocks.append((mark[len(FENCE) :].strip().lower(), []))
    return [(language, "\n".join(lines)) for language, lines in blocks]


def cut_at_line(text: str, limit: int) -> str:
    """As many whole lines as fit into so many characters, and how much is left out.

    >>> print(cut_at_line("one\\ntwo\\nthree", 9))
    one
    two
    [6 of 13 characters are not shown]
    """
    if len(text) <= limit:
        return text
    end = text.rfind("\n", 0, limit + 1)
    kept = text[: limit if end < 0 else end]  # a single long line is cut where it must be
    return f"{kept}\n[{len(text) - len(kept)} of {len(text)} characters are not shown]"
