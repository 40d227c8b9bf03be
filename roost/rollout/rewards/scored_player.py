"""Episodes that others than their scenario score."""

from __future__ import annotations

from dataclasses import replace

from roost.rollout.episode import Episode
from roost.rollout.place import leave_place
from roost.rollout.playing import Play, Player, PlayFailed, whole_traceback
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.reward import Answer
from roost.rollout.rewards.scoring import Rewards


class ScoredPlayer:
    """Plays as another does, and then lets rewards score what came of it."""

    def __init__(self, player: Player, rewards: Rewards) -> None:
        self._player, self._rewards = player, rewards

    async def play(self, asked: Play) -> Episode:
        episode = await self._player.play(asked)
        given = episode.score
        leave_place()  # engines play others meanwhile
        try:
            text = given.shown if given.answer is None else given.answer
            scored = await self._rewards.score(Answer(asked.task, text, given.reward))
        except RewardFailed as error:
            raise PlayFailed(f"it could not be scored: {error}", whole_traceback(error)) from error
        weight = self._rewards.routing.own_weight(asked.task.tag)
        of_turns = tuple(weight * reward for reward in given.of_turns) if weight else ()
        return replace(episode, score=replace(given, reward=scored.reward, of_turns=of_turns, parts=scored.parts))
