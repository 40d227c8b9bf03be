"""The policy as it is asked to go on with a text, without messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roost.rollout.agents.chat import ChatPolicy, RecordedReply, recorded_turn
from roost.rollout.transcript import Transcript


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
        source = self._source(prompt)
        transcript = self._policy.open_sequence() if source is None else source.transcript
        if source is not None:
            self._written.remove(source)  # nobody else goes on with it meanwhile, nor after a turn that failed
        transcript.give(self._new(prompt, source))
        reply = await recorded_turn(self._format, transcript, max_tokens)
        before = prompt if isinstance(prompt, str) else self._format.text(prompt)
        self._written.append(_Written(transcript, before + reply.text, reply.ending))
        return reply

    def _source(self, prompt: str | Sequence[int]) -> _Written | None:
        """The longest recorded text that the prompt begins with."""
        known = [each for each in self._written if self._begins(prompt, each)]
        return max(known, key=lambda each: len(each.transcript.token_ids), default=None)

    def _begins(self, prompt: str | Sequence[int], written: _Written) -> bool:
        if isinstance(prompt, str):
            return prompt.startswith(written.text)
        known = written.transcript.token_ids
        return tuple(prompt[: len(known)]) == known

    def _new(self, prompt: str | Sequence[int], source: _Written | None) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt[len(source.transcript.token_ids) if source else 0 :])
        if source is None:
            return self._format.ids(prompt)
        rest = prompt[len(source.text) :]
        end = "" if source.ending is None else self._format.token(source.ending)
        return self._format.ids(rest.removeprefix(end))
