"""Rewards by rule with the semantics of RLinf's and ROLL's: choices, exact match, formats and penalties."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from roost.config.findings import shown
from roost.rollout.episode import Split
from roost.rollout.rewards.math_answer import last_boxed
from roost.rollout.rewards.reward import (
    ANSWER,
    TRUTH,
    Answer,
    Reads,
    RewardFailed,
    Scored,
    any_value,
    right_answers,
    task_value,
    wrong_answer,
)

ARTICLES = re.compile(r"\b(a|an|the)\b")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CHOICE = re.compile(r"<answer>\s*([A-E])\s*\.\s*(.*?)\s*</answer>", re.DOTALL)


def after_thinking(text: str) -> str:
    """The text after the last `</think>`; all of it if there is none."""
    return text.rpartition("</think>")[2]


def repetition_penalty(text: str, size: int = 3, most: float = 0.5) -> float:
    """From 0 to -`most`: the share of repeated n-grams of words.

    >>> repetition_penalty("a b c d"), repetition_penalty("a a a a a a")
    (0.0, -0.375)
    """
    words = text.lower().split()
    grams = [tuple(words[begin : begin + size]) for begin in range(len(words) - size + 1)]
    return most * (len(set(grams)) / len(grams) - 1) if grams else 0.0


def length_penalty(tokens: int, short: int = 100, enough: int = 400, most: float = 0.5) -> float:
    """-`most` for answers of up to `short` tokens, rising to 0 at `enough`.

    >>> length_penalty(50), length_penalty(250), length_penalty(1000)
    (-0.5, -0.25, 0.0)
    """
    return most * max(-1.0, min(0.0, (tokens - enough) / (enough - short)))


def plain_words(text: str) -> str:
    """Lower case, without punctuation and articles.

    >>> plain_words("The  Eiffel-Tower.")
    'eiffeltower'
    """
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", kept).split())


class _Rule:
    """A reward without processes or connections."""

    async def close(self) -> None:
        pass


class SearchAnswer(_Rule):
    """RLinf's `searchr1`: the last `<answer>` equals a right answer; 0.25 with more than 10 opening or closing tags."""

    reads: ClassVar[Reads] = {"answer": lambda value: wrong_answer(_target(value))}

    def __init__(self, answer: str = "answer", max_tags: int = 10) -> None:
        self._key, self._max_tags = answer, max_tags

    async def score(self, answer: Answer) -> float:
        right = _target(task_value(answer.task, self._key))
        if wrong := wrong_answer(right):
            raise RewardFailed(f"{self._key!r} of task {answer.task.name[:60]!r} {wrong}")
        wanted = [str(one) for one in (right if isinstance(right, list | tuple) else [right])]
        found = TAGGED.findall(answer.text)
        if not found or plain_words(found[-1]) not in map(plain_words, wanted):
            return 0.0
        tags = max(answer.text.count("<answer>"), answer.text.count("</answer>"))
        return 0.25 if tags > self._max_tags else 1.0


def _target(right: Any) -> Any:
    """The right answers, which Search-R1's own data has under `target`."""
    return right["target"] if isinstance(right, Mapping) and "target" in right else right


class VqaAnswer(_Rule):
    """RLinf's `vqa`: the weighted sum of three scores of 0 or 1, for the choice and the two formats."""

    reads: ClassVar[Reads] = {"answer": any_value}

    def __init__(self, weights: Mapping[str, float], answer: str = "answer") -> None:
        known = ("qa_accuracy", "think_format", "answer_format")
        if set(weights) != set(known) or any(weight < 0 for weight in weights.values()):
            raise ValueError(f"weights has {dict(weights)}; it needs {', '.join(known)}, each at least 0")
        self._weights, self._key = dict(weights), answer

    async def score(self, answer: Answer) -> Scored:
        text, letter_and_content = answer.text, _choice(task_value(answer.task, self._key), answer)
        found = CHOICE.search(text)
        is_thinking = text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text
        parts = {
            "qa_accuracy": float(found is not None and _is_choice(found[1], found[2], *letter_and_content)),
            "think_format": float(is_thinking),
            "answer_format": float(found is not None and bool(found[2])),
        }
        return Scored(sum(self._weights[name] * part for name, part in parts.items()), parts)


def _choice(right: Any, answer: Answer) -> tuple[str, str]:
    """The letter and the text of the right choice, from `{choices, correct_answer}` or "B. text"."""
    if isinstance(right, Sequence) and not isinstance(right, str) and len(right) == 1:
        right = right[0]
    if isinstance(right, Mapping) and {"choices", "correct_answer"} <= set(right):
        choices, number = right["choices"], right["correct_answer"]
        try:
            choices = ast.literal_eval(choices) if isinstance(choices, str) else choices
            return chr(ord("A") + int(number)), str(list(choices)[int(number)])
        except (ValueError, SyntaxError, IndexError, TypeError) as error:
            raise RewardFailed(f"the choices of task {answer.task.name[:60]!r} are {shown(right)}") from error
    letter, _, content = str(right).partition(".")
    return letter.strip(), content.strip()


def _is_choice(letter: str, content: str, right_letter: str, right_content: str) -> bool:
    one, other = content.strip().lower(), right_content.strip().lower()
    return letter == right_letter and (one == other or (bool(one and other) and (one in other or other in one)))


class CrossThink(_Rule):
    """ROLL's CrossThinkQA: a choice, which should be boxed, less repetition and short answers.

    Right and boxed gives 1. `loose`: right 1, else -1. `soft`: right but not boxed 0.5, wrong but boxed -0.5, else -1.
    `strict`: -1.
    """

    reads = ANSWER

    REWARDS: ClassVar = {  # by whether it is right and boxed
        "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
        "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
        "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
    }

    def __init__(self, reward_type: str, length_penalty_coef: float = 0.0, answer: str = TRUTH) -> None:
        if reward_type not in self.REWARDS:
            raise ValueError(f"reward_type is {reward_type!r}; write one of {', '.join(self.REWARDS)}")
        self._rewards, self._length, self._key = self.REWARDS[reward_type], length_penalty_coef, answer

    async def score(self, answer: Answer) -> Scored:
        text = after_thinking(answer.text)
        boxed = last_boxed(text)
        found = boxed if boxed is not None else text.rpartition("answer is")[2]
        letter, right = _first_capital(found), right_answers(answer.task, self._key)[0].strip()[:1]
        rule = self._rewards[bool(letter) and letter == right, boxed is not None]
        repetition = repetition_penalty(answer.text)
        length = self._length * length_penalty(answer.tokens)
        parts = {"rule": rule, "repetition": repetition, "length": length, "correct": float(rule > 0)}
        return Scored(rule + repetition + length, parts)


def _first_capital(text: str) -> str:
    found = re.search("[A-Z]", text)
    return found[0] if found else ""


class BoxedAnswer(_Rule):
    """ROLL's rewards for evaluation alone: 0 in training; in evaluations 1 if the boxed answer is right, else 0.

    `choices`: compare the first capital letter; otherwise the text, without case, blanks and punctuation.
    """

    reads = ANSWER

    def __init__(self, choices: bool = False, answer: str = TRUTH) -> None:
        self._choices, self._key = choices, answer

    async def score(self, answer: Answer) -> Scored:
        found = last_boxed(after_thinking(answer.text)) or ""
        read = _first_capital if self._choices else plain_words
        is_right = bool(read(found)) and any(read(found) == read(one) for one in right_answers(answer.task, self._key))
        correct = float(is_right)
        return Scored(correct if answer.split is Split.EVALUATION else 0.0, {"correct": correct})
