"""Checks of verifiable instructions (IFEval), named as in the data that ROLL's GeneralRuleRewardWorker reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from roost.rollout.rewards.reward import TRUTH, Answer, Reads, RewardFailed, Scored, any_value, task_value
from roost.rollout.rewards.rules import after_thinking, repetition_penalty

TAG = "ifeval"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _paragraphs(text: str, between: str = "\n\n") -> list[str]:
    return [part.strip() for part in text.split(between) if part.strip()]


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if re.search(r"\w", part)])


def _counted(count: int, wanted: int, quantifier: str, spread: int = 0) -> bool:
    """Compare a count with the wanted one: "at least", "at most", or "around", which may differ by `spread`."""
    match quantifier:
        case "at least":
            return count >= wanted
        case "at most":
            return count <= wanted
        case "around":
            return abs(count - wanted) <= spread
    return False


def _tenth(number: int) -> int:
    return max(round(number * 0.1), 1)


def _language(text: str, language: str) -> bool:
    try:
        from langdetect import LangDetectException, detect  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise RewardFailed("validate_response_language needs langdetect; pip install langdetect") from error
    try:
        return bool(detect(text) == language)
    except LangDetectException:
        return False


def _json(text: str) -> bool:
    inner = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(inner)
    except ValueError:
        return False
    return True


def _nth_starts(text: str, count: int, first_word: str, number: int) -> bool:
    found = _paragraphs(text)
    return len(found) == count and 1 <= number <= count and found[number - 1].lower().startswith(first_word.lower())


def _postscript(text: str, marker: str) -> bool:
    place = text.lower().find(marker.lower())
    return place >= 0 and bool(text[place + len(marker) :].strip())


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    return len(parts) == 2 and all(part.strip() for part in parts) and parts[0].strip() != parts[1].strip()


def _sections(text: str, splitter: str) -> int:
    begins = re.findall(rf"^\W*{re.escape(splitter)}\b", text, re.MULTILINE)
    return len(begins) or text.count(splitter)


def _options(options: str | Sequence[str]) -> list[str]:
    return [one.strip(" ()'\"") for one in (re.split(r"/|,|\bor\b", options) if isinstance(options, str) else options)]


# Each takes the text and its arguments in the data.
CHECKS: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: _words(text).count(word.lower()) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "validate_response_language": lambda text, language: _language(text, language),
    "verify_paragraph_count": lambda text, N: len(_paragraphs(text.replace("* * *", "***"), "***")) == N,
    "validate_word_constraint": lambda text, N, quantifier: _counted(len(text.split()), N, quantifier, _tenth(N)),
    "verify_sentence_constraint": lambda text, N, quantifier: _counted(_sentences(text), N, quantifier),
    "validate_paragraphs": lambda text, N, first_word, i: _nth_starts(text, N, first_word, i),
    "verify_postscript": lambda text, postscript_marker: _postscript(text, postscript_marker),
    "validate_placeholders": lambda text, N: len(re.findall(r"\[[^\[\]]+\]", text)) >= N,
    "verify_bullet_points": lambda text, N: len(re.findall(r"^\s*[*-]\s+\S", text, re.MULTILINE)) == N,
    "validate_title": lambda text: bool(re.search(r"<<[^\n<>]+>>", text)),
    "validate_choice": lambda text, options: any(one and one.lower() in text.lower() for one in _options(options)),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*[^\n*]+\*", text)) >= N,
    "validate_sections": lambda text, N, section_splitter: _sections(text, section_splitter) == N,
    "validate_json_format": _json,
    "validate_repeat_prompt": lambda text, original_prompt: text.strip().startswith(original_prompt.strip()),
    "validate_two_responses": _two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _counted(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier
    ),
    "validate_end": lambda text, end_phrase: text.rstrip().endswith(end_phrase.strip()),
    "validate_quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "validate_no_commas": lambda text: "," not in text,
}
ARGUMENTS = {  # in the order of the checks' parameters
    name: check.__code__.co_varnames[1 : check.__code__.co_argcount] for name, check in CHECKS.items()
}


def follows(text: str, instruction: dict[str, Any]) -> bool:
    """Return True if a text follows an instruction: `func_name`, and the arguments of that check.

    >>> follows("No comma here.", {"func_name": "validate_no_commas"})
    True
    """
    name = str(instruction.get("func_name"))
    if name not in CHECKS:
        return False
    arguments = {key: instruction[key] for key in ARGUMENTS[name] if instruction.get(key) is not None}
    if len(arguments) < len(ARGUMENTS[name]):
        missing = [key for key in ARGUMENTS[name] if key not in arguments]
        raise RewardFailed(f"{name} needs {', '.join(missing)}, which the instruction does not have")
    return bool(CHECKS[name](text, **arguments))


class InstructionFollowing:
    """ROLL's GeneralRuleRewardWorker: 1 if the answer follows the instruction of its task, less repetition.

    Tasks with another tag than ifeval, and unknown checks, give 0.
    """

    reads: ClassVar[Reads] = {"answer": any_value}

    def __init__(self, answer: str = TRUTH) -> None:
        self._key = answer

    async def score(self, answer: Answer) -> Scored:
        text = after_thinking(answer.text).strip()
        instruction = _instruction(task_value(answer.task, self._key), answer)
        correct = float(answer.task.tag == TAG and follows(text, instruction))
        repetition = repetition_penalty(answer.text)
        return Scored(correct + repetition, {"correct": correct, "repetition": repetition})

    async def close(self) -> None:
        pass


def _instruction(written: Any, answer: Answer) -> dict[str, Any]:
    try:
        found = json.loads(written) if isinstance(written, str) else written
    except ValueError as error:
        raise RewardFailed(f"the instruction of task {answer.task.name[:60]!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RewardFailed(f"the instruction of task {answer.task.name[:60]!r} is {found!r}; a mapping is needed")
    return found
