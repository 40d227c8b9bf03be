"""Answers that are right when they are written as the right one is."""

from __future__ import annotations

import re
from decimal import Decimal
from enum import StrEnum

from roost.rollout.rewards.reward import Answer
from roost.rollout.rewards.task_data import right_answers

NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,6})?")
BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Find(StrEnum):
    """Where in a text its answer stands."""

    TEXT = "text"  # it is the whole text
    LAST_LINE = "last_line"  # the last one that is not blank
    MARKER = "marker"  # after the last marker, to the end of its line
    BOXED = "boxed"  # in the last \\boxed{}


class ExactAnswer:
    """Compares the answer in the text with the right one in the task's data, as written but for what is ignored."""

    def __init__(
        self,
        answer: str = "answer",
        find: str = "text",
        marker: str = "####",
        ignore_case: bool = True,
        ignore_spaces: bool = True,
        read_numbers: bool = True,
        right: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        if find not in list(Find):
            raise ValueError(f"find is {find!r}; write one of {', '.join(Find)}")
        if not marker:
            raise ValueError("marker is empty; write what stands before the answer, such as '####'")
        self._key, self._find, self._marker = answer, Find(find), marker
        self._ignore_case, self._ignore_spaces, self._read_numbers = ignore_case, ignore_spaces, read_numbers
        self._right, self._wrong = right, wrong

    async def score(self, answer: Answer) -> float:
        said = found_answer(answer.text, self._find, self._marker)
        is_right = said is not None and any(self._same(said, one) for one in right_answers(answer.task, self._key))
        return self._right if is_right else self._wrong

    async def close(self) -> None:
        pass

    def _same(self, one: str, other: str) -> bool:
        if self._read_numbers:
            numbers = as_number(one), as_number(other)
            if None not in numbers:
                return numbers[0] == numbers[1]
        return self._normal(one) == self._normal(other)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self._ignore_spaces else text
        return text.casefold() if self._ignore_case else text


def found_answer(text: str, find: Find, marker: str = "####") -> str | None:
    """The answer in a text; None where there is none.

    >>> found_answer("2 and 2\\n#### 4\\n", Find.MARKER), found_answer("2 and 2 is 4", Find.MARKER)
    ('4', None)
    """
    match find:
        case Find.LAST_LINE:
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case Find.MARKER:
            _, mark, after = text.rpartition(marker)
            return after.strip(" \t").partition("\n")[0].strip() if mark else None
        case Find.BOXED:
            return last_boxed(text)
    return text


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{} of a text that is closed.

    >>> last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', None)
    """
    opened: list[int | None] = []  # where the braces that are open began, if they are a box's
    last, content = -1, None
    for part in BRACES.finditer(text):
        if part[0].endswith("{") and part[0] != r"\{":
            opened.append(None if part[0] == "{" else part.end())
        elif part[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None and begin > last:
                last, content = begin, text[begin : part.start()]
    return content


def as_number(text: str) -> Decimal | None:
    """A number as people write it, exactly; None where a text is none.

    >>> as_number(" 1,234.50 ") == as_number("1234.5"), as_number("1,2"), as_number("four")
    (True, None, None)
    """
    plain = text.strip()
    if not NUMBER.fullmatch(plain) or not re.search("[0-9]", plain.lower().partition("e")[0]):
        return None
    return Decimal(plain.replace(",", ""))
