"""The policy as it is asked to go on with a text, without messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roost.rollout.agents.chat import ChatPolicy, RecordedReply, recorded_turn
from roost.rollout.transcript import Transcript

LOOKED_BACK = 40  # characters: how a text goes on depends on little of what is before


@dataclass(frozen=True, slots=True)
class _Written:
    """A sequence that the policy has gone on with, and its text without the token that ended it."""

    transcript: Transcript
    text: str
    ending: int | None


class TextPolicy:
    """Prompts over the record of an episode. One that begins with what is recorded goes on in its sequence."""

    def __init__(self, policy: ChatPolicy) -> None:
        self._policy, self._format = policy, policy.format
        self._written: list[_Written] = []

    async def complete(self, prompt: str | Sequence[int], max_tokens: int | None = None) -> RecordedReply:
        """What the policy makes of a prompt, given as a text or as tokens."""
        if not prompt:
            raise ValueError("the prompt is empty")
        transcript = self._shown(prompt)
        before = prompt if isinstance(prompt, str) else self._format.text(prompt)
        try:
            reply = await recorded_turn(self._format, transcript, max_tokens)
        except BaseException:
            self._written.append(_Written(transcript, before, None))  # its turn may be asked for again
            raise
        self._written.append(_Written(transcript, before + reply.text, reply.ending))
        self._policy.last_reply = reply
        return reply

    def _shown(self, prompt: str | Sequence[int]) -> Transcript:
        """The sequence that ends with the prompt."""
        source = self._source(prompt)
        if source is None:
            return self._opened(self._format.ids(prompt) if isinstance(prompt, str) else prompt)
        known = source.transcript.token_ids
        if isinstance(prompt, str):
            rest = prompt[len(source.text) :]
            end = "" if source.ending is None else self._format.token(source.ending)
            if not rest.startswith(end):  # it goes on from what was said, not from its end
                return self._opened((*known[:-1], *self._format.ids_after(source.text[-LOOKED_BACK:], rest)))
            new = self._format.ids_after(end or source.text[-LOOKED_BACK:], rest.removeprefix(end))
        else:
            new = tuple(prompt[len(known) :])
        self._written.remove(source)  # nobody else goes on with it meanwhile
        source.transcript.give(new)
        return source.transcript

    def _opened(self, token_ids: Sequence[int]) -> Transcript:
        opened = self._policy.open_sequence()
        opened.give(token_ids)
        return opened

    def _source(self, prompt: str | Sequence[int]) -> _Written | None:
        """The longest recorded text that the prompt begins with."""
        known = [each for each in self._written if self._begins(prompt, each)]
        return max(known, key=lambda each: len(each.transcript.token_ids), default=None)

    def _begins(self, prompt: str | Sequence[int], written: _Written) -> bool:
        if isinstance(prompt, str):
            return prompt.startswith(written.text)
        known = written.transcript.token_ids
        return tuple(prompt[: len(known)]) == known
