"""From groups of episodes to samples with advantages, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roost.learner.advantages import advantages, is_alone
from roost.learner.gae import token_advantages, whitened
from roost.learner.packing import predicted
from roost.learner.sample import Floats, Sample
from roost.learner.selection import Selection, select
from roost.rollout.episode import Episode, Group
from roost.spec.training import AdvantageSettings, Estimator


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of a step in the order of their groups, and who each is."""

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    groups: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.samples)


def batch_of(groups: Sequence[Group]) -> Batch:
    """Every finished episode as a sample, without an advantage yet."""
    episodes = [(group.number, episode) for group in groups for episode in group.episodes]
    return Batch(
        tuple(_sample(episode) for _, episode in episodes),
        tuple(episode.score.reward for _, episode in episodes),
        tuple(number for number, _ in episodes),
    )


def with_advantages(batch: Batch, settings: AdvantageSettings) -> tuple[Batch, Selection, int]:
    """The samples to learn from, each with its advantage; what was left out; how many were alone in their group.

    With a critic the samples have its values already, and get what it should have said.
    """
    if settings.estimator is Estimator.GAE:
        samples = _from_critic(batch, settings)
        scalars = np.array([float(np.abs(sample.advantages).max(initial=0.0)) for sample in samples])
    else:
        scalars = advantages(batch.rewards, batch.groups, settings)
        samples = [
            replace(sample, advantages=np.full(len(sample), value, np.float32))
            for sample, value in zip(batch.samples, scalars, strict=True)
        ]
    chosen = select(scalars, settings)
    kept = [int(index) for index in chosen.kept]
    selected = Batch(
        tuple(samples[index] for index in kept),
        tuple(batch.rewards[index] for index in kept),
        tuple(batch.groups[index] for index in kept),
    )
    alone = int(is_alone(batch.groups).sum()) if settings.estimator is Estimator.LEAVE_ONE_OUT else 0
    return selected, chosen, alone


def with_scores(
    batch: Batch,
    old: Sequence[Floats] | None = None,
    reference: Sequence[Floats] | None = None,
    values: Sequence[Floats] | None = None,
) -> Batch:
    """The same samples with what models said of them."""
    samples = list(batch.samples)
    if old is not None:
        samples = [replace(each, old_logprobs=array) for each, array in zip(samples, old, strict=True)]
    if reference is not None:
        samples = [replace(each, reference_logprobs=array) for each, array in zip(samples, reference, strict=True)]
    if values is not None:
        samples = [replace(each, values=array) for each, array in zip(samples, values, strict=True)]
    return replace(batch, samples=tuple(samples))


def minibatches(batch: Batch, count: int, seed: int) -> list[tuple[Sample, ...]]:
    """The samples shuffled and cut into so many parts, as even as can be; fewer where there are fewer samples."""
    order = np.random.default_rng(seed).permutation(len(batch))
    parts = np.array_split(order, min(count, max(1, len(batch))))
    return [tuple(batch.samples[int(index)] for index in sorted(part)) for part in parts]


def _sample(episode: Episode) -> Sample:
    tokens = episode.tokens
    return Sample(tokens.token_ids, tokens.turns, tokens.logprobs, np.zeros(len(tokens.token_ids), np.float32))


def _from_critic(batch: Batch, settings: AdvantageSettings) -> list[Sample]:
    found = []
    for sample, reward in zip(batch.samples, batch.rewards, strict=True):
        if sample.values is None:
            raise ValueError("advantages by GAE need a critic's values; give the job a critic")
        found.append(token_advantages(reward, sample.values[predicted(sample)], settings))
    even = whitened([each.advantages for each in found])
    samples = []
    for sample, each, white in zip(batch.samples, found, even, strict=True):
        advantage, outcome = np.zeros(len(sample), np.float32), np.zeros(len(sample), np.float32)
        advantage[predicted(sample)], outcome[predicted(sample)] = white, each.returns
        samples.append(replace(sample, advantages=advantage, returns=outcome))
    return samples


def lags(groups: Sequence[Group], version: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many versions behind the learner each made token was."""
    made = [episode.tokens.made_by for group in groups for episode in group.episodes]
    return version - np.concatenate([np.zeros(0, np.int64), *made])
