"""Compares mathematical answers: a program that answers each line of JSON with one, and may be killed at any time.

It is run by its path, so that it depends on nothing of where Roost is installed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from typing import Any

MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin\{")


def as_math(text: str) -> str:
    r"""A right answer as the parser knows it for mathematics.

    >>> as_math("1/2"), as_math(r"it is $\frac12$")
    ('$1/2$', 'it is $\\frac12$')
    """
    return text if MARKED.search(text) else f"${text}$"


def compare(text: str, right: list[str]) -> bool | None:
    """Whether the answer in the text equals one of the right ones; None where none of these is mathematics."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    # The limits of the library itself are off: whoever asks ends this process when it takes too long.
    wanted = [part for one in right for part in parse(as_math(one), parsing_timeout=None)]
    if not wanted:
        return None
    return bool(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None))


def bound_cpu(limit_s: float) -> None:
    """End by itself soon after the limit: nobody is left to kill it when the one who asked has died."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def main(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.disable(logging.CRITICAL)
    compare("$x=1$", ["1"])  # what is imported at the first use is imported now
    _tell(answers, "ready")
    for line in sys.stdin:
        question = json.loads(line)
        bound_cpu(question["limit_s"])
        _tell(answers, compare(question["text"], question["right"]))


def _tell(answers: Any, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
