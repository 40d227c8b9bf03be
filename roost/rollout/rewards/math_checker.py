"""Program that compares mathematical answers, one JSON line in, one out; it may be killed at any time.

It runs by its path, so that it does not depend on where Roost is installed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin\{")


def as_math(text: str) -> str:
    r"""Mark a right answer as math for the parser.

    >>> as_math("1/2"), as_math(r"it is $\frac12$")
    ('$1/2$', 'it is $\\frac12$')
    """
    return text if MARKED.search(text) else f"${text}$"


def compare(text: str, right: list[str]) -> bool | None:
    """Return True if the answer in `text` equals one of `right`; None if none of these parses as math."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    # The library's own timeouts are off: the caller kills this process when it takes too long.
    wanted = [part for one in right for part in parse(as_math(one), parsing_timeout=None)]
    if not wanted:
        return None
    return bool(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None))


def compare_first(text: str, right: list[str]) -> bool | None:
    """ROLL's math rule: compare the first expression found, without searching plain text."""
    from math_verify import parse, verify

    wanted = [parse(f"${one}$", parsing_timeout=None)[:1] for one in right]
    answer = parse(text, fallback_mode="no_fallback", parsing_timeout=None)[:1]
    if not any(wanted):
        return None
    return bool(answer) and any(bool(verify(one[0], answer[0], timeout_seconds=None)) for one in wanted if one)


def math_text() -> Any:
    """Load the module from the file beside this one, as Roost may not be importable here."""
    path = Path(__file__).resolve().with_name("math_text.py")
    spec = importlib.util.spec_from_file_location("math_text", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bound_cpu(limit_s: float) -> None:
    """Limit the CPU time, so that the process ends even if the caller has died."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def main(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep output of libraries out of the answers
    logging.disable(logging.CRITICAL)
    compare("$x=1$", ["1"])  # trigger lazy imports now
    hows = {"any": compare, "first": compare_first, "rlinf": math_text().is_right}
    _answer(answers, "ready")
    for line in sys.stdin:
        question = json.loads(line)
        bound_cpu(question["limit_s"])
        _answer(answers, hows[question["how"]](question["text"], question["right"]))


def _answer(answers: Any, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
