"""Turn groups of episodes into samples with advantages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roost.config.train import AdvantageEstimator, AdvantageSettings
from roost.learner.advantages import (
    Doubles,
    Selection,
    TokenAdvantages,
    advantages,
    is_alone,
    rewards_of_tokens,
    select,
    token_advantages,
    whitened,
)
from roost.learner.packing import predicted
from roost.learner.sample import NOT_MADE, Floats, Ints, Sample
from roost.rollout.episode import EpisodeReward, Group, Tokens


@dataclass(frozen=True, slots=True)
class Source:
    """The episode of a sample. Samples of one episode share its reward."""

    episode: int  # index within the batch
    group: int
    score: EpisodeReward


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of a step in the order of their groups, with the source of each."""

    samples: tuple[Sample, ...]
    sources: tuple[Source, ...]
    stopped_in: Mapping[int, Ints] = field(default_factory=dict)  # episode: last state of a cut-off episode
    values_after: Mapping[int, float] = field(default_factory=dict)  # episode: the critic's value of that state

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(source.score.reward for source in self.sources)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(source.group for source in self.sources)

    def choose(self, indices: Iterable[int]) -> Batch:
        """Return a batch of the samples at these indices."""
        chosen = [int(index) for index in indices]
        samples = tuple(self.samples[index] for index in chosen)
        return replace(self, samples=samples, sources=tuple(self.sources[index] for index in chosen))

    def by_episode(self) -> list[list[int]]:
        """Indices of the samples of each episode."""
        found: dict[int, list[int]] = {}
        for index, source in enumerate(self.sources):
            found.setdefault(source.episode, []).append(index)
        return list(found.values())


def batch_of(groups: Sequence[Group]) -> Batch:
    """Turn every sequence of every finished episode into a sample, without an advantage yet."""
    episodes = [(group.number, episode) for group in groups for episode in group.episodes]
    found = [
        (_sample(tokens), Source(index, number, episode.score))
        for index, (number, episode) in enumerate(episodes)
        for tokens in episode.sequences
    ]
    stops = {index: each.stopped_in for index, (_, each) in enumerate(episodes) if each.stopped_in is not None}
    return Batch(tuple(sample for sample, _ in found), tuple(source for _, source in found), stops)


def with_advantages(batch: Batch, settings: AdvantageSettings) -> tuple[Batch, Selection, int]:
    """Return the samples to learn from with advantages, the selection, and how many episodes were alone in a group.

    With GAE the samples must have values already; they get returns as well.
    """
    if settings.advantage_estimator is AdvantageEstimator.GAE:
        samples = _from_critic(batch, settings)
        scalars = np.array([float(np.abs(sample.advantages).max(initial=0.0)) for sample in samples])
    else:
        scalars = _scaled(batch, _of_episodes(batch, settings), settings)
        samples = [
            replace(sample, advantages=np.full(len(sample), value, np.float32))
            for sample, value in zip(batch.samples, scalars, strict=True)
        ]
    chosen = select(scalars, settings)
    selected = replace(batch, samples=tuple(samples)).choose(chosen.kept)
    groups = [batch.sources[indices[0]].group for indices in batch.by_episode()]
    alone = int(is_alone(groups).sum()) if settings.advantage_estimator is AdvantageEstimator.LEAVE_ONE_OUT else 0
    return selected, chosen, alone


def _scaled(batch: Batch, scalars: Doubles, settings: AdvantageSettings) -> Doubles:
    """Whiten, weighting each sample by its number of generated tokens, and clip."""
    counts = [int(predicted(sample).sum()) for sample in batch.samples]
    tokens = [np.full(count, value) for count, value in zip(counts, scalars, strict=True)]
    even = whitened(tokens, settings.whiten_advantages)
    found = np.array([part[0] if len(part) else value for part, value in zip(even, scalars, strict=True)])
    return found if settings.advantage_clip is None else found.clip(-settings.advantage_clip, settings.advantage_clip)


def _of_episodes(batch: Batch, settings: AdvantageSettings) -> Doubles:
    """Return the advantage of each sample: that of its episode, which counts once in its group."""
    episodes = batch.by_episode()
    firsts = [batch.sources[indices[0]] for indices in episodes]
    found = advantages([first.score.reward for first in firsts], [first.group for first in firsts], settings)
    scalars = np.zeros(len(batch))
    for indices, value in zip(episodes, found, strict=True):
        scalars[indices] = value
    return scalars


def with_scores(
    batch: Batch,
    old: Sequence[Floats] | None = None,
    reference: Sequence[Floats] | None = None,
) -> Batch:
    """Return the batch with old and reference log-probs."""
    samples = list(batch.samples)
    if old is not None:
        samples = [replace(each, old_logprobs=array) for each, array in zip(samples, old, strict=True)]
    if reference is not None:
        samples = [replace(each, reference_logprobs=array) for each, array in zip(samples, reference, strict=True)]
    return replace(batch, samples=tuple(samples))


def continuations(batch: Batch) -> list[Sample]:
    """Return the states in which episodes were cut off, as samples for the critic with one token appended.

    The value is the expectation before that token, so the token does not matter.
    """
    return [
        Sample(
            np.append(shown, shown[-1]),
            np.append(np.full(len(shown), NOT_MADE), 0),
            *np.zeros((2, len(shown) + 1), np.float32),
        )
        for shown in batch.stopped_in.values()
    ]


def with_values(batch: Batch, values: Sequence[Floats]) -> Batch:
    """Return the batch with the critic's values of the samples, then of their continuations."""
    own, after = values[: len(batch)], values[len(batch) :]
    samples = [replace(sample, values=array) for sample, array in zip(batch.samples, own, strict=True)]
    ends = {episode: float(array[-1]) for episode, array in zip(batch.stopped_in, after, strict=True)}
    return replace(batch, samples=tuple(samples), values_after=ends)


def minibatches(batch: Batch, count: int, seed: int) -> list[tuple[Sample, ...]]:
    """Shuffle the samples and split them into `count` near-equal parts; fewer if there are fewer samples."""
    order = np.random.default_rng(seed).permutation(len(batch))
    parts = np.array_split(order, min(count, max(1, len(batch))))
    return [tuple(batch.samples[int(index)] for index in sorted(part)) for part in parts]


def _sample(tokens: Tokens) -> Sample:
    return Sample(tokens.token_ids, tokens.turns, tokens.logprobs, np.zeros(len(tokens.token_ids), np.float32))


def _from_critic(batch: Batch, settings: AdvantageSettings) -> list[Sample]:
    """Compute GAE along each episode, turn by turn, across all its samples."""
    found: dict[int, TokenAdvantages] = {}
    for indices in batch.by_episode():
        source = batch.sources[indices[0]]
        after = batch.values_after.get(source.episode, 0.0)
        along = _along([batch.samples[index] for index in indices], source.score, settings, after)
        found |= dict(zip(indices, along, strict=True))
    even = whitened([found[index].advantages for index in range(len(batch))], settings.whiten_advantages)
    samples = []
    for index, (sample, values) in enumerate(zip(batch.samples, even, strict=True)):
        advantage, outcome = np.zeros(len(sample), np.float32), np.zeros(len(sample), np.float32)
        advantage[predicted(sample)], outcome[predicted(sample)] = values, found[index].returns
        if settings.advantage_clip is not None:
            advantage = advantage.clip(-settings.advantage_clip, settings.advantage_clip)
        samples.append(replace(sample, advantages=advantage, returns=outcome))
    return samples


def _along(
    samples: Sequence[Sample], score: EpisodeReward, settings: AdvantageSettings, value_after: float
) -> list[TokenAdvantages]:
    """Return advantages of the predicted tokens of an episode's samples, ordered by turn."""
    values = [sample.values[predicted(sample)] for sample in samples if sample.values is not None]
    if len(values) < len(samples):
        raise ValueError("advantages by GAE need a critic's values; give the job a critic")
    turns = np.concatenate([sample.turns[predicted(sample)] for sample in samples])
    order = np.argsort(turns, kind="stable")
    rewards = rewards_of_tokens(turns[order], score.reward, score.turn_rewards)
    along = token_advantages(rewards, np.concatenate(values)[order], settings, value_after)
    back = np.argsort(order, kind="stable")
    borders = np.cumsum([len(each) for each in values])[:-1]
    parts = zip(np.split(along.advantages[back], borders), np.split(along.returns[back], borders), strict=True)
    return [TokenAdvantages(advantage, outcome) for advantage, outcome in parts]


def staleness_of(groups: Sequence[Group], version: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Staleness of each generated token, in policy versions."""
    made = [episode.made_by for group in groups for episode in group.episodes]
    return version - np.concatenate([np.zeros(0, np.int64), *made])
