"""Scenarios, transcripts and episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from roost.engines.protocol import Completion, ContextFull, Finish, SamplingMasks
from roost.net.routing import Routing, joined_routing, padded_routing
from roost.vision.image import Image


class Split(StrEnum):
    """Training tasks and evaluation tasks."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Task:
    """One item to solve."""

    name: str  # shown in reports
    data: Mapping[str, Any] = field(default_factory=dict)  # read by the scenario and the rewards
    tag: str = ""  # kind of task; rewards select tasks by it


@dataclass(frozen=True, slots=True)
class EpisodeReward:
    """Reward of an episode, and how it is shown in reports."""

    reward: float
    shown: str = ""  # the answer as text
    # Reward of each turn in order, if known; a critic learns from these. `reward` is their sum plus the final reward.
    turn_rewards: tuple[float, ...] = ()
    # A limit ended the episode: its return is bootstrapped with the critic's value of the last state.
    is_truncated: bool = False
    answer: str | None = None  # text that rewards score, if it is not `shown`
    parts: Mapping[str, float] = field(default_factory=dict)  # value of each reward before weighting
    # ID of the state before each turn. GiGPO compares samples whose first turns have equal IDs: with one sample for the
    # whole episode, those of later turns are not used.
    turn_states: tuple[str, ...] = ()


class Scenario(Protocol):
    """Makes tasks and runs their episodes. Created once per process; many episodes run in it concurrently.

    class Echo:
        def size(self, split): return 10
        def task(self, split, index): return Task(f"say {index}", {"ids": [index]})
        async def run_episode(self, task, transcript):
            transcript.give(task.data["ids"])
            said = await transcript.take(max_tokens=1)
            return EpisodeReward(float(said == tuple(task.data["ids"])))
    """

    def size(self, split: Split) -> int:
        """Number of tasks."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index; the same index is always the same task."""
        ...

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        """Run an episode: give tokens to the transcript, take the policy's turns from it, and return the reward."""
        ...


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Further options of a turn: stop strings, a JSON schema for guided decoding, and images."""

    stop: tuple[str, ...] = ()
    json_schema: str | None = None
    images: tuple[Image, ...] = ()  # of the whole sequence; a transcript adds them

    def __bool__(self) -> bool:
        return bool(self.stop) or self.json_schema is not None or bool(self.images)


# Samples a turn from the token IDs so far, the turn's number, max_tokens, and a TurnOptions if there is one.
Sampler = Callable[..., Awaitable[Completion]]


class Transcript:
    """Token record of a running episode: the scenario gives tokens and takes the policy's turns.

    An episode starts with one sequence. `branch` opens another, when the next prompt does not continue the sequence.
    """

    def __init__(self, sample: Sampler, _first: Transcript | None = None) -> None:
        self._sample = sample
        self._first = _first or self
        self._token_ids: list[int] = []
        self._turns: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._masks = SamplingMasks.empty(0)
        self._parts: list[Part] = []
        self._has_masks = False
        self._images: list[Image] = []
        self._routing: Routing | None = None  # experts of the first tokens, if requested
        self.finish: Finish | None = None  # of the last turn
        if _first is None:
            self._branches: list[Transcript] = [self]
            self._begun_turns = 0  # over all branches: each turn is sampled with its own seed
            self._newest = self  # the branch that was extended last
            self._is_closed = False
            self.max_length: int | None = None  # tokens of a sequence; a turn gets at most those that are left
            self.max_response: int | None = None  # the same, of tokens after the sequence's first prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(self._images)

    def give(
        self, token_ids: Sequence[int], messages: Sequence[tuple[str, str]] = (), images: Sequence[Image] = ()
    ) -> None:
        """Append tokens that the policy is shown: a prompt or an observation.

        `messages` holds the same as (role, content) pairs, for readable samples; without it the tokens are decoded.
        `images` begin at positions counted from the first of these tokens.
        """
        self._images += [image.at(len(self._token_ids) + image.start) for image in images]
        self._add(
            token_ids, [0.0] * len(token_ids), [NOT_GENERATED] * len(token_ids), NOT_GENERATED, messages=tuple(messages)
        )

    async def take(self, max_tokens: int | None = None, options: TurnOptions | None = None) -> tuple[int, ...]:
        """Sample the policy's next turn; `max_tokens` can only lower the run's limit.

        Raise ContextFull if the engine has no room for another turn; the episode is then scored as it is.
        """
        if not self._token_ids:
            raise ValueError("the transcript is empty; give() a prompt before the first turn")
        first = self._first
        if first._is_closed:
            await asyncio.sleep(0)  # a loop of calls must let other tasks run
            raise asyncio.CancelledError("the episode is over; nothing more is sampled for it")
        shown, turn = self.token_ids, first._begun_turns
        if self._images:
            options = replace(options or TurnOptions(), images=self.images)
        first._begun_turns += 1
        try:
            completion = await self._sample(shown, turn, self._turn_limit(max_tokens), *([options] if options else []))
        except ContextFull:
            self.finish = Finish.LENGTH
            self._parts.append(Part(len(shown), len(shown), turn, self.finish))
            raise
        if len(self._token_ids) != len(shown):
            raise RuntimeError("tokens were added during a turn; wait for one turn before the next")
        versions, masks = token_versions(completion), completion.sampling_mask
        self._add(completion.token_ids, completion.logprobs, versions, turn, completion.finish, masks=masks)
        self._routing = joined_routing(self._routing, completion.routed_experts)
        self.finish = completion.finish
        return completion.token_ids

    def _turn_limit(self, max_tokens: int | None) -> int | None:
        """Limit of the next turn. Raise ContextFull if the sequence has no room for one."""
        left = self.room
        if left is None:
            return max_tokens
        if left < 1:
            size = len(self._token_ids)
            raise ContextFull(f"{size} tokens leave no room in a sequence of {size + left}")
        return left if max_tokens is None else min(max_tokens, left)

    @property
    def room(self) -> int | None:
        """Tokens that the sequence has left; None if it has no limit."""
        first = self._first
        prompt = first._parts[0].end if first._parts else 0  # in a branch, earlier turns are before its first part
        limits = [first.max_length, None if first.max_response is None else prompt + first.max_response]
        return min((limit - len(self._token_ids) for limit in limits if limit is not None), default=None)

    def leave_out(self, start: int, count: int) -> None:
        """Mark generated tokens as given, so that they are not learnt from."""
        end = start + count
        self._turns[start:end] = [NOT_GENERATED] * count
        self._logprobs[start:end] = [0.0] * count
        self._versions[start:end] = [NOT_GENERATED] * count
        parts = [self._masks[:start], SamplingMasks.empty(count), self._masks[end:]]
        self._masks = SamplingMasks.joined(parts)

    def take_back(self, start: int) -> None:
        """Remove the last turn, which begins at `start` and was not delivered; it may be sampled again."""
        for tokens in (self._token_ids, self._turns, self._logprobs, self._versions):
            del tokens[start:]
        self._masks = self._masks[:start]
        self._routing = None if self._routing is None else self._routing[:start]
        self._parts = [part for part in self._parts if part.start < start]
        self._images = [image for image in self._images if image.start < start]

    def branch(self) -> Transcript:
        """Open another, empty sequence of the same episode."""
        opened = Transcript(self._sample, self._first)
        self._first._branches.append(opened)
        return opened

    def close(self) -> None:
        """End the episode: a scenario that continues is cancelled at its next turn."""
        self._first._is_closed = True

    @property
    def turns(self) -> int:
        """Number of turns started, over all sequences."""
        return self._first._begun_turns

    def shown_last(self) -> Ints | None:
        """Tokens of the sequence extended last; None if it ends with the policy's own turn."""
        newest = self._first._newest
        was_shown = newest._turns[-1:] == [NOT_GENERATED]
        return np.array(newest._token_ids, np.int64) if was_shown else None

    def sequences(self) -> tuple[Tokens, ...]:
        """Sequences with generated tokens; the first one if there are none."""
        found = tuple(branch.tokens() for branch in self._first._branches)
        return tuple(each for each in found if len(each.completion_versions)) or found[:1]

    def tokens(self) -> Tokens:
        """Tokens of this sequence so far."""
        return Tokens(
            np.array(self._token_ids, np.int64),
            np.array(self._turns, np.int64),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int64),
            tuple(self._parts),
            self._masks.ids if self._has_masks else None,
            self._masks.sizes if self._has_masks else None,
            self.images,
            None if self._routing is None else padded_routing(self._routing, len(self._token_ids)),
        )

    def _add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        turn: int,
        finish: str = "",
        messages: tuple[tuple[str, str], ...] = (),
        masks: SamplingMasks | None = None,
    ) -> None:
        self._first._newest = self
        start = len(self._token_ids)
        self._parts.append(Part(start, start + len(token_ids), turn, finish, messages))
        self._token_ids += token_ids
        self._turns += [turn] * len(token_ids)
        self._logprobs += logprobs
        self._versions += versions
        new = SamplingMasks.empty(len(token_ids)) if masks is None else masks
        self._masks = SamplingMasks.joined([self._masks, new])
        self._has_masks = self._has_masks or masks is not None


def token_versions(completion: Completion) -> list[int]:
    """The policy version of each token.

    >>> from roost.engines.protocol import VersionSpan
    >>> token_versions(Completion((5, 6), (0.0, 0.0), Finish.STOP, (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))))
    [3, 4]
    """
    versions = [NOT_GENERATED] * len(completion.token_ids)
    for span in completion.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    if len(versions) != len(completion.token_ids) or NOT_GENERATED in versions:
        raise ValueError(f"the version spans {completion.versions} do not cover {len(completion.token_ids)} tokens")
    return versions


Ints = npt.NDArray[np.int64]
ROUNDING = 1e-9  # rewards summed in another order may differ by rounding
LENGTH = "length"  # the finish of a turn that a token limit or a full context ended
NOT_GENERATED = -1  # turn and version of a token that the policy did not generate


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens appended together: given to the policy, or generated in one turn."""

    start: int
    end: int
    turn: int = NOT_GENERATED
    finish: str = ""  # of a turn: stop, length or abort
    messages: tuple[tuple[str, str], ...] = ()  # given messages as (role, content), in a conversation


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence with the turn, log-prob and policy version of each token."""

    token_ids: Ints
    turns: Ints
    logprobs: npt.NDArray[np.float32]
    versions: Ints
    parts: tuple[Part, ...] = ()  # in order; for reports and metrics, not for learning
    mask_ids: npt.NDArray[np.int32] | None = None  # sampling masks of all tokens, one after the other, if requested
    mask_sizes: npt.NDArray[np.int32] | None = None  # ids of each token; 0: none, or too many to return
    images: tuple[Image, ...] = ()
    routed_experts: Routing | None = None  # of each token, padded with unknown ones, if requested

    @property
    def completion_versions(self) -> Ints:
        """Policy versions of the generated tokens."""
        completion: Ints = self.versions[self.turns != NOT_GENERATED]
        return completion


@dataclass(frozen=True, eq=False)
class Episode:
    """A finished episode."""

    sequences: tuple[Tokens, ...]  # several if a prompt did not continue an earlier sequence
    score: EpisodeReward
    seconds: float
    attempts: int = 1
    stopped_in: Ints | None = None  # last state of a truncated episode

    @property
    def completion_versions(self) -> Ints:
        """Policy versions of all generated tokens."""
        return np.concatenate([np.array([], np.int64), *(tokens.completion_versions for tokens in self.sequences)])

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.completion_versions)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens before the first turn."""
        firsts = [int(np.argmax(one.turns != NOT_GENERATED)) for one in self.sequences if len(one.completion_versions)]
        return firsts[0] if firsts else sum(len(one.token_ids) for one in self.sequences[:1])

    @property
    def finish(self) -> str:
        """Finish reason of the last turn; empty if not known."""
        turns = [part for tokens in self.sequences for part in tokens.parts if part.turn != NOT_GENERATED]
        return max(turns, key=lambda part: part.turn).finish if turns else ""

    @property
    def num_turns(self) -> int:
        """Number of turns that the policy had."""
        begun = [part.turn for tokens in self.sequences for part in tokens.parts]  # also one without tokens
        completion = [int(tokens.turns.max(initial=NOT_GENERATED)) for tokens in self.sequences]
        return 1 + max(begun + completion, default=NOT_GENERATED)

    @property
    def is_truncated(self) -> bool:
        """Return True if a token limit or a full context ended any turn."""
        return any(part.finish == LENGTH for tokens in self.sequences for part in tokens.parts)


@dataclass(frozen=True, eq=False)
class Group:
    """The finished episodes of one task, and counts of the others."""

    number: int  # position in the run's task order, from 0
    task: Task
    began_at: int  # policy version at its start
    episodes: tuple[Episode, ...]
    cancelled: int = 0
    failed: int = 0
    last_error: str = ""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(episode.score.reward for episode in self.episodes)

    @property
    def is_equal(self) -> bool:
        """Return True if all rewards are equal, so that group-relative advantages are 0."""
        return not self.rewards or max(self.rewards) - min(self.rewards) <= ROUNDING


Decode = Callable[[Sequence[int], bool], str]  # tokens as text, with or without special tokens
Message = dict[str, Any]
PROMPT, CONTEXT, POLICY = "prompt", "context", "assistant"


def token_numbers(token_ids: Sequence[int], has_special: bool) -> str:
    """Token IDs as text, used when no tokenizer is known."""
    return " ".join(map(str, token_ids))


def messages_of(episode: Episode, decode: Decode) -> list[Message]:
    """Messages given to the policy and generated by it, in order; with `sequence` if there are several."""
    found = [message for number, one in enumerate(episode.sequences) for message in _of_sequence(number, one, decode)]
    if len(episode.sequences) == 1:
        for message in found:
            del message["sequence"]
    return found


class LazyMessages(Sequence[Message]):
    """The messages of an episode, decoded when they are first read, or sent to another process."""

    def __init__(self, episode: Episode, decode: Decode) -> None:
        self._episode, self._decode = episode, decode

    @cached_property
    def _messages(self) -> tuple[Message, ...]:
        return tuple(messages_of(self._episode, self._decode))

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...

    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __reduce__(self) -> tuple[type[tuple[Message, ...]], tuple[tuple[Message, ...]]]:
        return tuple, (self._messages,)


def _of_sequence(number: int, tokens: Tokens, decode: Decode) -> Iterator[Message]:
    for part in tokens.parts or parts_by_turn(tokens):
        ids = tokens.token_ids[part.start : part.end].tolist()
        if part.turn != NOT_GENERATED:
            versions = tokens.versions[part.start : part.end]
            generated = {"turn": part.turn, "finish": part.finish, "tokens": len(ids)}
            if len(versions) and versions.min() >= 0:  # else the agent dropped it, and it is not learnt from
                generated["versions"] = [int(versions.min()), int(versions.max())]
            yield {"role": POLICY, "content": decode(ids, False), "generated": True, "sequence": number, **generated}
        else:
            given = part.messages or ((CONTEXT if part.start else PROMPT, decode(ids, True)),)
            for role, content in given:
                yield {"role": role, "content": content, "generated": False, "sequence": number}


def parts_by_turn(tokens: Tokens) -> list[Part]:
    """Split a sequence into parts by the turn of each token."""
    turns = tokens.turns.tolist()
    borders = [0, *(at for at in range(1, len(turns)) if turns[at] != turns[at - 1]), len(turns)]
    return [Part(start, end, turns[start]) for start, end in pairwise(borders) if end > start]
