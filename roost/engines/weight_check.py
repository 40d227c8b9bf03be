"""Whether engines still have the weights they were given: their answers to a probe, against those of the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roost.engines.crew import Crew
from roost.engines.errors import EngineError
from roost.engines.member import Member, Standing
from roost.engines.weights.probe import Probe
from roost.engines.weights.verify import Expected, judge_answers


@dataclass(frozen=True, slots=True)
class WrongWeights:
    """An engine that no longer answers with the weights of its version."""

    name: str
    why: str


class WeightCheck:
    """Compares engines with the learner, relative to how far they are apart with equal weights."""

    def __init__(self, crew: Crew, report: Callable[[str], None]) -> None:
        self._crew, self._report = crew, report
        self.first_probe: Probe | None = None  # of the weights that servers are started with

    async def calibrate(self, probe: Probe) -> None:
        """Note how far each engine is from the learner now, while both have the weights of the start."""
        self.first_probe = probe
        for member, answers in await self._answers(probe):
            member.probe, member.baseline = probe, probe.difference(answers)
            if not member.baseline <= probe.tolerance:
                apart = f"log-probabilities differ by up to {member.baseline:.3g}; {probe.tolerance:g} is usual"
                self._report(
                    f"{member.name} and the learner have the same weights, but their {apart}. The model is sensitive "
                    "to rounding: updates are judged relative to this, and float32 would be closer"
                )

    async def wrong(self) -> list[WrongWeights]:
        """The engines that answer otherwise than their version does; one that does not answer is not judged."""
        members = [member for member in self._crew.standing(Standing.READY) if member.probe is not None]
        by_probe: dict[Probe, list[Member]] = {}
        for member in members:
            if member.probe is not None:
                by_probe.setdefault(member.probe, []).append(member)
        found = []
        for probe, some in by_probe.items():
            for member, answers in await self._answers(probe, some):
                why = judge_answers(Expected(probe, member.baseline), answers)
                if why and member.probe is probe:
                    found.append(WrongWeights(member.name, why))
        return found

    async def _answers(
        self, probe: Probe, members: Sequence[Member] | None = None
    ) -> list[tuple[Member, tuple[float, ...]]]:
        ready = self._crew.standing(Standing.READY) if members is None else members
        answers = await asyncio.gather(*(_answer(probe, member) for member in ready), return_exceptions=True)
        found = []
        for member, answer in zip(ready, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, EngineError):
                    raise answer
                continue  # whether it is lost is the supervisor's to find out
            found.append((member, answer))
        return found


async def _answer(probe: Probe, member: Member) -> tuple[float, ...]:
    """What a member answers; one that has been disconnected meanwhile raises as one does that is lost under it."""
    return await member.engine.score(probe.token_ids, member.adapter)
