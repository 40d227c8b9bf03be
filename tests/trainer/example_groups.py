"""Groups of episodes that were never played: a prompt of two tokens, and answers of any versions."""

import numpy as np

from roost.rollout.episode import NOT_GENERATED, Episode, EpisodeReward, Group, Task, Tokens


def example_episode(reward, versions=(0,), first=100, seconds=1.0, attempts=1):
    """The answer's tokens are numbered from `first`, and the log-probability of each is minus its place."""
    count = len(versions)
    tokens = Tokens(
        np.array([1, 2, *range(first, first + count)]),
        np.array([NOT_GENERATED, NOT_GENERATED] + [0] * count),
        np.array([0.0, 0.0, *(-float(place) for place in range(1, count + 1))], np.float32),
        np.array([NOT_GENERATED, NOT_GENERATED, *versions]),
    )
    return Episode((tokens,), EpisodeReward(reward, f"answer {first}"), seconds, attempts)


def example_group(number, rewards, versions=(0,), began_at=0, **more):
    episodes = tuple(
        example_episode(reward, versions, first=100 * (number + 1) + 10 * index) for index, reward in enumerate(rewards)
    )
    return Group(number, Task(f"task {number}"), began_at, episodes, **more)
