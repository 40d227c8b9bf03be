"""Turn groups of episodes into samples with advantages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roost.config.data import Teacher, words
from roost.config.train import (
    AdvantageEstimator,
    AdvantageLevel,
    AdvantageSettings,
    DiscountLevel,
    RewardScope,
    Whitening,
)
from roost.learner.advantages import (
    Doubles,
    Flags,
    Selection,
    TokenAdvantages,
    advantages,
    are_learnt_from,
    discounted,
    discounted_turns,
    downsample_group,
    is_alone,
    kl_estimates,
    normalised_rewards,
    overlong_penalties,
    rewards_of_tokens,
    scope_keys,
    select,
    step_returns,
    token_advantages,
    whitened_by,
)
from roost.learner.sample import NOT_GENERATED, Floats, Ints, Sample, predicted
from roost.rollout.episode import Episode, EpisodeReward, Group, Tokens

NO_TAGS: Mapping[str, str] = {}
TOOL = "tool"  # role of the messages that tools answer with


@dataclass(frozen=True, slots=True)
class Source:
    """The episode of a sample. Samples of one episode share its reward."""

    episode: int  # index within the batch
    group: int
    score: EpisodeReward
    tag: str = ""
    is_truncated: bool = False  # a token limit or a full context ended a turn of the episode
    task_tag: str = ""  # of the row or task itself; `tag` may be a domain or the reward that scores it
    generated: int | None = None  # predicted tokens of a sample that was cut, before it was; None: it was not cut
    longest_turn: int | None = None  # tokens of the episode's longest turn, if a sample of it was cut
    versions: Ints | None = field(default=None, compare=False, repr=False)  # policy version of each token


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of a step in the order of their groups, with the source of each."""

    samples: tuple[Sample, ...]
    sources: tuple[Source, ...]
    stopped_in: Mapping[int, Ints] = field(default_factory=dict)  # episode: last state of a cut-off episode
    values_after: Mapping[int, float] = field(default_factory=dict)  # episode: the critic's value of that state
    teacher_kl: Mapping[str, Floats] = field(default_factory=dict)  # teacher: k1 of all tokens that it scored
    cut: int = 0  # samples cut to the longest length that is learnt

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


def down_sampled(groups: Sequence[Group], settings: AdvantageSettings) -> list[Group]:
    """The groups to learn from, each with the episodes to learn from."""
    kept = [group for group in groups if not (settings.drop_equal_groups and group.is_equal)]
    if not settings.keep_generations:
        return kept
    found = []
    for group in kept:
        by_errors = settings.keep_by_tool_errors
        penalties = [tool_error_share(episode) if by_errors else 0.0 for episode in group.episodes]
        chosen = downsample_group(group.rewards, penalties, settings)
        found.append(replace(group, episodes=tuple(group.episodes[index] for index in chosen)))
    return found


def tool_error_share(episode: Episode) -> float:
    """Share of tool answers that mention an error; 0.5 without tool calls."""
    answers = [
        text for tokens in episode.sequences for part in tokens.parts for role, text in part.messages if role == TOOL
    ]
    return sum("error" in text.lower() for text in answers) / len(answers) if answers else 0.5


def batch_of(groups: Sequence[Group], tags: Mapping[str, str] = NO_TAGS, longest: int | None = None) -> Batch:
    """Turn every sequence of every finished episode into a sample, without an advantage yet.

    `tags` maps tags of tasks to those that they count as, so that tasks of one reward count as of one kind. Sequences
    are cut to their first `longest` tokens.
    """
    episodes = [(group, episode) for group in groups for episode in group.episodes]
    samples: list[Sample] = []
    sources: list[Source] = []
    for index, (group, episode) in enumerate(episodes):
        tag = group.task.tag
        own = str(group.task.data.get("row_tag", tag))
        source = Source(index, group.number, episode.score, tags.get(tag, tag), episode.is_truncated, own)
        uncut = [_sample(tokens, None) for tokens in episode.sequences]
        if any(longest and len(sample) > longest for sample in uncut):
            source = replace(source, longest_turn=_longest_turn(uncut))
        samples += [_sample(tokens, longest) for tokens in episode.sequences]
        sources += [
            replace(
                source,
                generated=_count(sample) if longest and len(sample) > longest else None,
                versions=tokens.versions[:longest],
            )
            for sample, tokens in zip(uncut, episode.sequences, strict=True)
        ]
    stops = {index: each.stopped_in for index, (_, each) in enumerate(episodes) if each.stopped_in is not None}
    cut = sum(source.generated is not None for source in sources)
    return Batch(tuple(samples), tuple(sources), stops, cut=cut)


def reward_of_tag(rewards: Mapping[str, Any]) -> dict[str, str]:
    """Name of the reward that scores the tasks of each tag, for rewards that select tasks by tag.

    >>> reward_of_tag({"math": {"tags": ["aime", "gsm8k"]}, "code": {"tags": "lcb"}, "length": {}})
    {'aime': 'math', 'gsm8k': 'math', 'lcb': 'code'}
    """
    found: dict[str, str] = {}
    for name, reward in rewards.items():
        for tag in words(reward.get("tags")) if isinstance(reward, Mapping) else ():
            found.setdefault(tag, name)
    return found


def with_advantages(
    batch: Batch, settings: AdvantageSettings, kl_coef: float | None = None
) -> tuple[Batch, Selection, int]:
    """Return the samples to learn from with advantages, the selection, and how many episodes were alone in a group.

    The latter are counted where rewards are compared within groups: such an episode has an advantage of 0. With GAE
    the samples must have values already; they get returns as well. `kl_coef` is the coefficient of the KL penalty at
    this step, where it adapts; samples must then have reference log-probs.
    """
    among = unmasked(batch, settings)
    rewards = reward_of_samples(batch, settings)
    returns: list[Doubles] | None = None
    is_by_token = _is_by_token(batch, settings)
    if is_by_token:
        tokens = token_rewards(batch, rewards, settings, settings.kl_penalty_coef if kl_coef is None else kl_coef)
        found, returns = from_token_rewards(batch, tokens, settings, among)
    else:
        constant = [np.full(_count(sample), value) for sample, value in zip(batch.samples, rewards, strict=True)]
        found = _whiten_and_clip(batch, constant, settings, among)
    largest = _largest_advantages(found, rewards, settings)
    chosen = select(largest, settings, among)
    if is_by_token:
        samples = [
            _filled(sample, found[index] + settings.advantage_offset, None if returns is None else returns[index])
            for index, sample in enumerate(batch.samples)
        ]
    else:
        samples = [
            replace(sample, advantages=np.full(len(sample), value + settings.advantage_offset, np.float32))
            for sample, value in zip(batch.samples, largest, strict=True)
        ]
    rewarded = [replace(sample, reward=reward) for sample, reward in zip(samples, batch.rewards, strict=True)]
    selected = replace(batch, samples=tuple(rewarded)).choose(chosen.kept)
    groups = [batch.sources[indices[0]].group for indices in batch.by_episode()]
    alone = int(is_alone(groups).sum()) if settings.compared_among is RewardScope.GROUP else 0
    return selected, chosen, alone


def from_token_rewards(
    batch: Batch, rewards: Sequence[Doubles], settings: AdvantageSettings, among: Flags
) -> tuple[list[Doubles], list[Doubles] | None]:
    """Return advantages of the predicted tokens of each sample, and with a critic its targets."""
    if settings.whiten_rewards:
        rewards = _whitened(batch, rewards, Whitening.TOKENS, settings, among)
    returns: list[Doubles] | None = None
    if settings.advantage_estimator is AdvantageEstimator.GAE:
        along = _from_critic(batch, rewards, settings)
        found, returns = [each.advantages for each in along], [each.returns for each in along]
    else:
        found = [_discounted(sample, each, settings) for sample, each in zip(batch.samples, rewards, strict=True)]
    return _whiten_and_clip(batch, _less_teacher_penalty(batch, found), settings, among), returns


def reward_of_samples(batch: Batch, settings: AdvantageSettings) -> Doubles:
    """Each sample's reward or return: normalised, made an advantage unless GAE does that later, and clipped.

    At the level of episodes an episode counts once, and its samples have the same value.
    """
    whole = np.array(batch.rewards, dtype=np.float64) - overlong_penalties(_longest_turns(batch), settings)
    values = whole if settings.step_gamma is None else _step_returns(batch, settings.step_gamma, whole)
    if settings.advantage_level is AdvantageLevel.SAMPLE:
        units = [[index] for index in range(len(batch))]
    else:
        units = batch.by_episode()
    own = settings.step_gamma is not None  # otherwise all samples of an episode have one value
    of_units = [float(values[indices].mean() if own else values[indices[0]]) for indices in units]
    groups = [batch.sources[indices[0]].group for indices in units]
    tags = [batch.sources[indices[0]].tag for indices in units]
    scopes = settings.reward_baseline, settings.reward_std
    means_over, stds_over = (scope_keys(scope, groups, tags) for scope in scopes)
    if settings.advantage_estimator is AdvantageEstimator.GIGPO:
        states = [_state(batch, indices[0], settings.state_scope) for indices in units]
        episodes = normalised_rewards([float(whole[indices[0]]) for indices in units], means_over, stds_over)
        found = settings.episode_reward_weight * episodes
        found = found + settings.step_reward_weight * state_advantages(of_units, states, settings.state_normalization)
    else:
        if scopes != (RewardScope.NONE, RewardScope.NONE):
            of_units = normalised_rewards(of_units, means_over, stds_over).tolist()
        is_gae = settings.advantage_estimator is AdvantageEstimator.GAE
        found = np.array(of_units) if is_gae else advantages(of_units, groups, settings)
    if settings.reward_clip is not None:
        found = found.clip(-settings.reward_clip, settings.reward_clip)
    spread = np.zeros(len(batch))
    for indices, value in zip(units, found, strict=True):
        spread[indices] = value
    return spread


def state_advantages(returns: Sequence[float], states: Sequence[Hashable], kind: str) -> Doubles:
    """GiGPO's advantage of each step: (return - mean) / (std with n - 1, plus 1e-6) of the steps in its state.

    >>> state_advantages([3.0, 1.0, 5.0], ["room", "room", "hall"], "mean").tolist()
    [1.0, -1.0, 0.0]
    """
    return normalised_rewards(returns, None if kind == "none" else states, states if kind == "mean_std" else None)


LARGEST_WEIGHT = 10.0  # so that no single token decides the coefficient


def mean_kl(batch: Batch, settings: AdvantageSettings, version: int | None = None) -> float:
    """Mean over the samples of the mean KL of their generated tokens, to which the penalty's coefficient adapts.

    Tokens from before `version` are weighted by the ratio of the policy to the engine: as the policy moves away from
    the one that sampled them, their mean of log p - log p_ref falls, whatever the KL from the reference does.
    """
    total = weight = 0.0
    for sample, source in zip(batch.samples, batch.sources, strict=True):
        where = predicted(sample)
        if where.any():
            ratios = np.exp(np.minimum(_own_logprobs(sample)[where] - sample.logprobs[where], np.log(LARGEST_WEIGHT)))
            is_stale = version is not None and source.versions is not None and source.versions[where] < version
            weights = np.where(is_stale, ratios, 1.0)
            total += float((weights * _kl(sample, settings)).mean())
            weight += float(weights.mean())
    return total / weight if weight else 0.0


def _count(sample: Sample) -> int:
    return int(predicted(sample).sum())


def _filled(sample: Sample, values: Doubles, returns: Doubles | None) -> Sample:
    """The sample with the advantages and returns of its predicted tokens."""
    advantage = np.zeros(len(sample), np.float32)
    advantage[predicted(sample)] = values
    if returns is None:
        return replace(sample, advantages=advantage)
    outcome = np.zeros(len(sample), np.float32)
    outcome[predicted(sample)] = returns
    return replace(sample, advantages=advantage, returns=outcome)


def unmasked(batch: Batch, settings: AdvantageSettings) -> Flags:
    """Mask of the samples that no setting excludes from learning."""
    counts = [
        _count(sample) if source.generated is None else source.generated
        for sample, source in zip(batch.samples, batch.sources, strict=True)
    ]
    are_truncated = [source.is_truncated for source in batch.sources]
    return are_learnt_from(batch.rewards, batch.groups, counts, are_truncated, settings)


def _is_by_token(batch: Batch, settings: AdvantageSettings) -> bool:
    """Return True if the tokens of a sample may have different advantages."""
    if settings.advantage_estimator is AdvantageEstimator.GAE or batch.teacher_kl:
        return True
    return settings.gamma != 1 or settings.kl_penalty_coef != 0 or settings.whiten_rewards


def _largest_advantages(found: Sequence[Doubles], rewards: Doubles, settings: AdvantageSettings) -> Doubles:
    """The advantage by which each sample is selected: the largest of its tokens; with GAE, without its sign."""
    is_gae = settings.advantage_estimator is AdvantageEstimator.GAE
    largest = [
        float(each[np.abs(each).argmax()]) if len(each) else 0.0 if is_gae else float(reward)
        for each, reward in zip(found, rewards, strict=True)
    ]
    return np.abs(largest) if is_gae else np.array(largest)


def _whitened(
    batch: Batch, values: Sequence[Doubles], whitening: Whitening, settings: AdvantageSettings, among: Flags
) -> list[Doubles]:
    tags = [source.tag if settings.whiten_by_tag else "" for source in batch.sources]
    return whitened_by(values, whitening, tags, among)


def _whiten_and_clip(
    batch: Batch, values: Sequence[Doubles], settings: AdvantageSettings, among: Flags
) -> list[Doubles]:
    """Advantages, whitened and clipped as the settings say."""
    found = _whitened(batch, values, settings.whiten_advantages, settings, among)
    limit = settings.advantage_clip
    return found if limit is None else [each.clip(-limit, limit) for each in found]


def _less_teacher_penalty(batch: Batch, values: Sequence[Doubles]) -> list[Doubles]:
    """Advantages less the penalty of the teachers, token by token; it is not discounted."""
    return [
        each if sample.teacher_penalty is None else each - sample.teacher_penalty[predicted(sample)]
        for sample, each in zip(batch.samples, values, strict=True)
    ]


def _longest_turns(batch: Batch) -> list[int]:
    """Tokens of the longest turn of each sample's episode, as it was generated."""
    found = [0] * len(batch)
    for indices in batch.by_episode():
        known = batch.sources[indices[0]].longest_turn
        longest = _longest_turn([batch.samples[index] for index in indices]) if known is None else known
        for index in indices:
            found[index] = longest
    return found


def _longest_turn(samples: Sequence[Sample]) -> int:
    turns = np.concatenate([sample.turns for sample in samples])
    return int(np.bincount(turns[turns != NOT_GENERATED], minlength=1).max())


def _step_returns(batch: Batch, gamma: float, rewards: Doubles) -> Doubles:
    """Return of each sample from the rewards of its turns and, discounted, of later samples of its episode.

    The rest of the episode's reward goes to its last sample. Without turn rewards and with a gamma of 0, all samples of
    an episode have its reward.
    """
    own, firsts = np.zeros(len(batch)), [_first_turn(sample) for sample in batch.samples]
    for indices in batch.by_episode():
        score, reward = batch.sources[indices[0]].score, rewards[indices[0]]
        if not score.turn_rewards and gamma == 0:
            own[indices] = reward
            continue
        for index in indices:
            turns = np.unique(batch.samples[index].turns[batch.samples[index].is_generated])
            own[index] = sum(score.turn_rewards[turn] for turn in turns if turn < len(score.turn_rewards))
        last = max(indices, key=lambda index: firsts[index])
        own[last] += reward - own[indices].sum()
    return step_returns(own.tolist(), [source.episode for source in batch.sources], firsts, gamma)


def _first_turn(sample: Sample) -> int:
    return int(sample.turns[sample.is_generated].min(initial=np.iinfo(np.int64).max))


def _state(batch: Batch, index: int, scope: str) -> Hashable:
    """The state in which a sample begins: as its episode names it, else the tokens that the policy was given.

    In the scope of groups, equal states of different groups are different ones.
    """
    sample, source = batch.samples[index], batch.sources[index]
    turn, states = _first_turn(sample), source.score.turn_states
    shown = states[turn] if turn < len(states) else sample.token_ids[: int(np.argmax(sample.is_generated))].tobytes()
    return (source.group, shown) if scope == "group" else shown


def _kl(sample: Sample, settings: AdvantageSettings) -> Doubles:
    """KL of the policy from the reference at each predicted token of a sample."""
    if sample.reference_logprobs is None:
        raise ValueError("kl_penalty_coef is not 0, but the samples have no reference log-probs")
    where = predicted(sample)
    return kl_estimates(_own_logprobs(sample)[where], sample.reference_logprobs[where], settings.kl_penalty_estimator)


def _own_logprobs(sample: Sample) -> Floats:
    """The policy's log-probs: the learner's old ones, else the engine's."""
    return sample.logprobs if sample.old_logprobs is None else sample.old_logprobs


def token_rewards(batch: Batch, rewards: Doubles, settings: AdvantageSettings, kl_coef: float) -> list[Doubles]:
    """Reward of each predicted token: the sample's on its last token, less the KL penalty, and clipped.

    A critic takes the rewards of turns where they are known and nothing has changed the episode's reward.
    """
    found = [np.zeros(_count(sample)) for sample in batch.samples]
    scopes = settings.reward_baseline, settings.reward_std
    is_plain = scopes == (RewardScope.NONE, RewardScope.NONE) and settings.reward_clip is None
    is_gae = settings.advantage_estimator is AdvantageEstimator.GAE
    if is_gae and settings.advantage_level is AdvantageLevel.EPISODE:
        for indices in batch.by_episode():
            score, value = batch.sources[indices[0]].score, float(rewards[indices[0]])
            turns = np.concatenate([batch.samples[index].turns[predicted(batch.samples[index])] for index in indices])
            order = np.argsort(turns, kind="stable")
            token_rewards = rewards_of_tokens(turns[order], value, score.turn_rewards if is_plain else ())
            borders = np.cumsum([len(found[index]) for index in indices])[:-1]
            parts = np.split(token_rewards[np.argsort(order, kind="stable")], borders)
            for index, part in zip(indices, parts, strict=True):
                found[index] = part
    else:
        for each, value in zip(found, rewards, strict=True):
            each[-1:] = value
    if kl_coef or settings.kl_penalty_coef:
        found = [each - kl_coef * _kl(sample, settings) for each, sample in zip(found, batch.samples, strict=True)]
    limit = settings.reward_clip
    return found if limit is None else [each.clip(-limit, limit) for each in found]


def _discounted(sample: Sample, rewards: Doubles, settings: AdvantageSettings) -> Doubles:
    where = predicted(sample)
    if settings.discount_level is DiscountLevel.TURN:
        return discounted_turns(rewards, sample.turns[where], settings.gamma)
    return discounted(rewards, np.flatnonzero(where), settings.gamma)


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


def taught_by(batch: Batch, teacher: Teacher) -> list[int]:
    """Indices of the samples that a teacher scores."""
    return [i for i, source in enumerate(batch.sources) if not teacher.tags or source.task_tag in teacher.tags]


def with_teachers(batch: Batch, scores: Mapping[Teacher, Sequence[Floats]]) -> Batch:
    """Return the batch with the penalty of each token: the KL from each teacher, times its coefficient.

    `scores` are each teacher's log-probs of the samples that it teaches. Add the learner's old log-probs first, if it
    has any.
    """
    penalties = [np.zeros(len(sample), np.float32) for sample in batch.samples]
    apart: dict[str, Floats] = {}
    for teacher, logprobs in scores.items():
        found = [np.zeros(0, np.float32)]
        for index, array in zip(taught_by(batch, teacher), logprobs, strict=True):
            where, own = predicted(batch.samples[index]), _own_logprobs(batch.samples[index])
            penalties[index][where] += teacher.coef * kl_estimates(own[where], array[where], teacher.estimator)
            found.append(own[where] - array[where])
        apart[teacher.name] = np.concatenate(found)
    samples = zip(batch.samples, penalties, strict=True)
    return replace(
        batch, samples=tuple(replace(each, teacher_penalty=array) for each, array in samples), teacher_kl=apart
    )


def continuations(batch: Batch) -> list[Sample]:
    """Return the states in which episodes were cut off, as samples for the critic with one token appended.

    Any token will do, as the critic's value is that before it.
    """
    return [
        Sample(
            np.append(shown, shown[-1]),
            np.append(np.full(len(shown), NOT_GENERATED), 0),
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


def minibatches(batch: Batch, count: int, seed: int, shuffles: bool = True) -> list[tuple[Sample, ...]]:
    """Shuffle the samples and split them into `count` near-equal parts; fewer if there are fewer samples."""
    order = np.random.default_rng(seed).permutation(len(batch)) if shuffles else np.arange(len(batch))
    parts = np.array_split(order, min(count, max(1, len(batch))))
    return [tuple(batch.samples[int(index)] for index in sorted(part)) for part in parts]


def _sample(tokens: Tokens, longest: int | None) -> Sample:
    arrays = (tokens.token_ids[:longest], tokens.turns[:longest], tokens.logprobs[:longest])
    images = tuple(image for image in tokens.images if longest is None or image.start < longest)
    routing = None if tokens.routed_experts is None else tokens.routed_experts[:longest]
    sample = Sample(*arrays, np.zeros(len(arrays[0]), np.float32), images=images, routed_experts=routing)
    if tokens.mask_ids is None or tokens.mask_sizes is None:
        return sample
    sizes = tokens.mask_sizes[:longest]
    return replace(sample, mask_sizes=sizes, mask_ids=tokens.mask_ids[: int(sizes.sum())])


def _from_critic(batch: Batch, rewards: Sequence[Doubles], settings: AdvantageSettings) -> list[TokenAdvantages]:
    """Compute GAE along each episode, turn by turn across all its samples, or along each sample."""
    is_by_sample = settings.advantage_level is AdvantageLevel.SAMPLE
    found: dict[int, TokenAdvantages] = {}
    for indices in [[index] for index in range(len(batch))] if is_by_sample else batch.by_episode():
        after = 0.0 if is_by_sample else batch.values_after.get(batch.sources[indices[0]].episode, 0.0)
        along = _along(
            [batch.samples[index] for index in indices], [rewards[index] for index in indices], settings, after
        )
        found |= dict(zip(indices, along, strict=True))
    return [found[index] for index in range(len(batch))]


def _along(
    samples: Sequence[Sample], rewards: Sequence[Doubles], settings: AdvantageSettings, value_after: float
) -> list[TokenAdvantages]:
    """Return advantages of the predicted tokens of an episode's samples, ordered by turn."""
    values = [sample.values[predicted(sample)] for sample in samples if sample.values is not None]
    if len(values) < len(samples):
        raise ValueError("advantages by GAE need a critic's values; give the job a critic")
    order = np.argsort(np.concatenate([sample.turns[predicted(sample)] for sample in samples]), kind="stable")
    along = token_advantages(np.concatenate(rewards)[order], np.concatenate(values)[order], settings, value_after)
    back = np.argsort(order, kind="stable")
    borders = np.cumsum([len(each) for each in values])[:-1]
    parts = zip(np.split(along.advantages[back], borders), np.split(along.returns[back], borders), strict=True)
    return [TokenAdvantages(advantage, outcome) for advantage, outcome in parts]


FRESH_LEAST = 0.1  # share of the tokens; a mean over fewer says little


def fresh(samples: Sequence[Sample], sources: Sequence[Source], version: int, least: float = 0.0) -> list[Sample]:
    """Samples that engines generated with this policy version alone; none if they have less than a share of the tokens.

    Samples with older tokens do not count: an engine may have kept their KV cache, computed with older weights.
    """
    found = [
        sample
        for sample, source in zip(samples, sources, strict=True)
        if source.versions is not None and (source.versions[sample.is_generated] == version).all()
    ]
    counts = [sum(sample.num_generated for sample in some) for some in (found, samples)]
    return found if counts[0] >= least * counts[1] else []


def staleness_of(groups: Sequence[Group], version: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Staleness of each generated token, in policy versions."""
    versions = [episode.completion_versions for group in groups for episode in group.episodes]
    return version - np.concatenate([np.zeros(0, np.int64), *versions])
