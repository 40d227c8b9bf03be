"""Samples of a step as people read them: the whole conversation, what was generated, and what it earned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from roost.rollout.episode import NOT_MADE, Episode, Group, Part, Tokens

Decode = Callable[[Sequence[int], bool], str]  # tokens as text, with or without special tokens
Message = dict[str, Any]

SHOWN_SAMPLES = 4  # of each training step
MOST_MESSAGES = 100  # of a sample; the first and the last ones are kept
MOST_CHARACTERS = 16_000  # of one message
MOST_OF_SAMPLE = 64_000  # characters of all its messages
PROMPT, CONTEXT, POLICY = "prompt", "context", "assistant"


def token_numbers(token_ids: Sequence[int], has_special: bool) -> str:
    """Tokens as they are, where no tokenizer is known."""
    return " ".join(map(str, token_ids))


def samples_of(
    groups: Sequence[Group], kind: str, step: int, version: int, decode: Decode, count: int = SHOWN_SAMPLES
) -> list[dict[str, Any]]:
    """The first episode of each of the first groups."""
    return [
        {"step": step, "version": version, "kind": kind, "group": group.number, **_sample(group, one, version, decode)}
        for group in groups[:count]
        for one in group.episodes[:1]
    ]


def _sample(group: Group, episode: Episode, version: int, decode: Decode) -> dict[str, Any]:
    score, made_by = episode.score, episode.made_by
    messages = conversation(episode, decode)
    said = [message["content"] for message in messages if message["generated"]]
    return {
        "task": group.task.name,
        **({"tag": group.task.tag} if group.task.tag else {}),
        # What the environment or the scenario shows may be nothing, where the policy said something all the same.
        "completion": score.shown or score.answer or (said[-1] if said else ""),
        "reward": score.reward,
        **({"parts": dict(score.parts)} if score.parts else {}),
        **({"turn_rewards": list(score.turn_rewards)} if score.turn_rewards else {}),
        **({"answer": score.answer} if score.answer else {}),
        "finish": episode.finish,
        "truncated": episode.is_truncated,
        "staleness": int(version - made_by.min()) if episode.made else 0,
        "versions": [int(made_by.min()), int(made_by.max())] if episode.made else [],
        "tokens": episode.made,
        "prompt_tokens": episode.given,
        "messages": messages,
    }


def conversation(episode: Episode, decode: Decode) -> list[Message]:
    """What the policy was given and what it generated, in order, within the limits of a sample."""
    found = [message for number, one in enumerate(episode.sequences) for message in _of_sequence(number, one, decode)]
    if len(episode.sequences) == 1:
        for message in found:
            del message["sequence"]
    return _bounded(found)


def _of_sequence(number: int, tokens: Tokens, decode: Decode) -> Iterator[Message]:
    for part in tokens.parts or parts_by_turn(tokens):
        ids = tokens.token_ids[part.start : part.end].tolist()
        if part.turn != NOT_MADE:
            versions = tokens.versions[part.start : part.end]
            made = {"turn": part.turn, "finish": part.finish, "tokens": len(ids)}
            if len(versions) and versions.min() >= 0:  # else the agent has dropped it, and nothing is learnt from it
                made["versions"] = [int(versions.min()), int(versions.max())]
            yield {"role": POLICY, "content": decode(ids, False), "generated": True, "sequence": number, **made}
        else:
            given = part.messages or ((CONTEXT if part.start else PROMPT, decode(ids, True)),)
            for role, content in given:
                yield {"role": role, "content": content, "generated": False, "sequence": number}


def parts_by_turn(tokens: Tokens) -> list[Part]:
    """The parts of a sequence of which only the turn of each token is known."""
    turns = tokens.turns.tolist()
    borders = [0, *(at for at in range(1, len(turns)) if turns[at] != turns[at - 1]), len(turns)]
    return [Part(start, end, turns[start]) for start, end in pairwise(borders) if end > start]


def _bounded(messages: list[Message]) -> list[Message]:
    """Fewer messages, and shorter ones, where a conversation is very long; what is cut out is said."""
    left_out = len(messages) - MOST_MESSAGES
    if left_out > 0:
        half = MOST_MESSAGES // 2
        note: Message = {"role": "note", "content": f"[{left_out:,} messages left out]", "generated": False}
        messages = [*messages[:half], note, *messages[-half:]]
    most = min(MOST_CHARACTERS, max(200, MOST_OF_SAMPLE // max(1, len(messages))))
    total = sum(len(message["content"]) for message in messages)
    limit = MOST_CHARACTERS if total <= MOST_OF_SAMPLE else most
    return [{**message, "content": shortened(message["content"], limit)} for message in messages]


def shortened(text: str, most: int) -> str:
    """A text cut in the middle where it is too long.

    >>> shortened("abcdefghij", 6)
    'abc\\n[... 4 characters left out ...]\\nhij'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
