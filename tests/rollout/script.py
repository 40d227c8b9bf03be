"""Episodes that do what a test says, and engines that answer at once: each episode is told who it is by its tokens."""

import asyncio

from roost.engines.protocol import Completion, Finish, VersionSpan
from roost.rollout.episode import EpisodeReward, Task
from roost.rollout.episode_runner import LocalEpisodeRunner
from tests.limits import HANG_S


def completion(token_ids, version=0, finish=Finish.STOP):
    spans = (VersionSpan(version, 0, len(token_ids)),) if token_ids else ()
    return Completion(tuple(token_ids), tuple(-0.5 for _ in token_ids), finish, spans)


class Script:
    """A scenario: `reward_of(number, episode, attempt)` is awaited, and gives the reward."""

    def __init__(self, reward_of, size=1000, is_truncated=False):
        self._reward, self._size, self._goes_on = reward_of, size, is_truncated
        self.version = 0  # of the engines

    def size(self, split):
        return self._size

    def task(self, split, index):
        return Task(f"{split} {index}", {"index": index})

    async def run_episode(self, task, transcript):
        transcript.give([7])
        reward = await self._reward(*await transcript.take())
        if self._goes_on:
            transcript.branch().give([8, 9])
        return EpisodeReward(reward, is_truncated=self._goes_on)

    def runner(self, settings):
        return LocalEpisodeRunner(self, self.open_policy, settings.episode_timeout_s)

    def open_policy(self, number, episode, attempt):
        async def sample(token_ids, turn, max_tokens):
            return completion((number, episode, attempt), self.version)

        return sample


def ran(coroutine):
    """Result of a coroutine, in an event loop of its own."""

    async def bounded():
        async with asyncio.timeout(HANG_S):
            return await coroutine

    return asyncio.run(bounded())


async def settled():
    """Everything that can happen now has happened."""
    for _ in range(100):
        await asyncio.sleep(0)


async def for_ever():
    await asyncio.Event().wait()


def others_running():
    """The tasks beside that of the test."""
    return asyncio.all_tasks() - {asyncio.current_task()}


def who(group):
    """The episodes of a group, by number."""
    return [int(episode.sequences[0].token_ids[2]) for episode in group.episodes]
