"""Metrics of a step, as one flat mapping that is written, shown and plotted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.config.train import LossAggregation, LossSettings, RewardScope
from roost.learner.advantages import Selection
from roost.learner.losses import MEAN_RATIO, SEQUENCE_KL
from roost.learner.sample import APART, LARGEST_LOG_RATIO, POSITIONS, Floats, Ints, Sample, predicted
from roost.rollout.episode import Episode, Group
from roost.trainer.batch import FRESH_LEAST, Source, fresh, staleness_of
from roost.trainer.feed import Tally
from roost.trainer.guards import MISMATCH, SKIPPED

LARGEST_EXPONENT = 700.0  # beyond it exp is infinite
NO_REWARDS: Mapping[str, Any] = {}


def mismatch(engine: npt.NDArray[np.floating], learner: npt.NDArray[np.floating]) -> dict[str, float]:
    """Statistics of the difference over sampled tokens; empty without tokens.

    `kl_k3` estimates KL(engine || learner), `chi2` the chi-square divergence E[w²] - 1 of the ratios w of learner to
    engine, and `ess` is their effective sample size (Σ w)² / (n Σ w²). Maximum and 99th percentile cannot be combined
    over ranks: pass all tokens.

    >>> found = mismatch(np.log([0.5, 0.5]), np.log([0.5, 0.25]))
    >>> {name: round(found[name], 4) for name in ("logprob_mean", "logprob_max", "kl_k3", "chi2", "ess")}
    {'logprob_mean': 0.3466, 'logprob_max': 0.6931, 'kl_k3': 0.0966, 'chi2': -0.375, 'ess': 0.9}
    """
    if len(engine) != len(learner):
        raise ValueError(f"{len(engine)} log-probabilities of the engine, but {len(learner)} of the learner")
    if len(engine) == 0:
        return {}
    engine, learner = engine.astype(np.float64), learner.astype(np.float64)
    apart = np.abs(engine - learner)
    above = np.minimum(learner - engine, LARGEST_EXPONENT)
    return {
        "logprob_mean": float(apart.mean()),
        "logprob_max": float(apart.max()),
        "logprob_p99": float(np.percentile(apart, 99)),
        "probability_mean": float(np.abs(np.exp(engine) - np.exp(learner)).mean()),
        "kl_k3": float((np.expm1(above) - above).mean()),
        **_spread_of_ratios(learner - engine),
    }


def _spread_of_ratios(log_ratios: npt.NDArray[np.floating]) -> dict[str, float]:
    """Chi-square divergence and effective sample size, as a share, of importance ratios."""
    found = np.exp(np.clip(log_ratios, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    second = float((found**2).mean())
    return {"chi2": second - 1, "ess": float(found.mean()) ** 2 / second}


PHASES = ("read", "generate", "switch", "score", "learn", "sync")
PERCENTILES = (50, 90, 99)
COUNTED = "steps/"  # prefix of counts of optimizer steps
DRIFT = "drift"  # like mismatch, but the learner's weights have moved since generation
CRITIC = "critic/"  # prefix of the critic's statistics
ROUNDING = 1e-6  # of a mean square in float32: a smaller variance is none
BALANCE = "experts/balance_loss"
OF_SAMPLES = ("rejected_sequences", SEQUENCE_KL)
LOSS = LossSettings()
RENAMED = {"loss": "loss/total", "policy_loss": "loss/policy", "kl": "loss/kl", "lr": "learning_rate"}


def group_metrics(
    groups: Sequence[Group], version: int, tally: Tally, compared_among: RewardScope = RewardScope.GROUP
) -> dict[str, float]:
    """Rewards, staleness and counts of the collected groups.

    Pass rates, shares of groups and generated tokens include the groups that dynamic sampling replaced.
    """
    of_all = [*groups, *tally.equal_groups]
    is_by_group = compared_among is RewardScope.GROUP
    rewards = np.array([reward for group in groups for reward in group.rewards] or [np.nan])
    behind = staleness_of(groups, version)
    episodes = [episode for group in groups for episode in group.episodes]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        **(equal_metrics(of_all) if is_by_group else {}),
        "staleness/mean": float(behind.mean()) if len(behind) else 0.0,
        "staleness/max": float(behind.max()) if len(behind) else 0.0,
        "tokens/generated": float(len(behind) + tally.equal_tokens),
        "tokens/mean": float(np.mean([episode.completion_tokens for episode in episodes])) if episodes else 0.0,
        "samples/finished": float(len(episodes)),
        "samples/cancelled": float(tally.cancelled),
        "samples/failed": float(tally.failed),
        "samples/retried": float(tally.retried),
        "groups/lost": float(tally.lost_groups),
        "groups/replaced": float(len(tally.equal_groups)),
        "groups/discarded": float(tally.discarded_groups),
        "episode/seconds": float(np.mean([episode.seconds for episode in episodes])) if episodes else 0.0,
        **length_metrics(episodes),
        **pass_metrics(of_all),
    }


def equal_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Share of groups in which all rewards are equal, among those of several samples, if there are any."""
    known = [group.is_equal for group in groups if len(group.episodes) > 1]
    return {"reward/equal_groups": sum(known) / len(known)} if known else {}


FULL = 1.0 - 1e-6  # the reward of a correct answer
MOST_KINDS = 32  # tags or difficulties with metrics of their own
DIFFICULTY = ("difficulty", "level")  # columns of a row that say how hard it is


def pass_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Share of samples with a reward of 1 or more, and of groups in which all or none have it.

    The share of samples is also given by the tag of the task, and by the column `difficulty` or `level` of its row.
    """
    known = [group for group in groups if group.episodes]
    if not known:
        return {}
    passed = [[reward >= FULL for reward in group.rewards] for group in known]
    by_kind: dict[str, list[bool]] = {}
    for group, each in zip(known, passed, strict=True):
        for kind in _kinds(group):
            by_kind.setdefault(kind, []).extend(each)
    kinds = sorted(by_kind, key=lambda kind: (-len(by_kind[kind]), kind))[:MOST_KINDS]
    return {
        "pass_rate/mean": float(np.mean([one for each in passed for one in each])),
        "groups/solve_none": float(np.mean([not any(each) for each in passed])),
        "groups/solve_all": float(np.mean([all(each) for each in passed])),
        **{f"pass_rate/{kind}": float(np.mean(by_kind[kind])) for kind in sorted(kinds)},
    }


def _kinds(group: Group) -> list[str]:
    """Names of the tag and the difficulty of a group's task, as far as it has them."""
    data = group.task.data
    tag = str(data.get("row_tag") or group.task.tag)
    hard = next((data[name] for name in DIFFICULTY if isinstance(data.get(name), str | int | float)), "")
    return [f"{what}/{name}" for what, name in (("tag", tag), ("difficulty", hard)) if name != ""]


def length_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Percentiles of completion and prompt tokens, and the share of truncated episodes."""
    found: dict[str, float] = {}
    if not episodes:
        return found
    lengths = {
        "completion": [one.completion_tokens for one in episodes],
        "prompt": [one.prompt_tokens for one in episodes],
    }
    for name, counts in lengths.items():
        values = np.percentile(counts, [*PERCENTILES, 100])
        found |= {f"length/{name}/p{at}": float(value) for at, value in zip(PERCENTILES, values, strict=False)}
        found[f"length/{name}/max"] = float(values[-1])
    return found | {"length/truncated": sum(one.is_truncated for one in episodes) / len(episodes)}


def memory_metrics(who: str, ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Memory of a component in GiB: the maximum over its ranks.

    >>> memory_metrics("actor", [{"rss": 2**30}, {"rss": 2**31}])
    {'memory/actor/rss': 2.0}
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {f"memory/{who}/{name}": max(rank.get(name, 0.0) for rank in ranks) / 2**30 for name in names}


def reward_metrics(
    groups: Sequence[Group],
    rewards: Mapping[str, Any] = NO_REWARDS,
    compared_among: RewardScope = RewardScope.GROUP,
) -> dict[str, float]:
    """Mean and standard deviation of each reward, and the number of answers that it scored, which may be 0.

    If several rewards are summed, also `weight`, as configured, and `share`, the part of the variance that comes from
    each among the samples whose rewards are compared.
    """
    given: dict[str, list[float]] = {name: [] for name in rewards}
    for episode in (episode for group in groups for episode in group.episodes):
        for name, score in episode.score.parts.items():
            given.setdefault(name, []).append(score)
    means = {f"reward/{name}/mean": float(np.mean(scores)) for name, scores in given.items() if scores}
    means |= {f"reward/{name}/std": float(np.std(scores)) for name, scores in given.items() if scores}
    counts = {f"reward/{name}/scored": float(len(scores)) for name, scores in given.items()}
    return means | counts | _reward_shares(groups, rewards, compared_among)


def _reward_shares(
    groups: Sequence[Group], rewards: Mapping[str, Any], compared_among: RewardScope
) -> dict[str, float]:
    """Weight of each reward, and its covariance with the total over the variance of the total."""
    names = [name for name in rewards if any(name in one.score.parts for group in groups for one in group.episodes)]
    if len(names) < 2:
        return {}
    weights = {name: _weight(rewards[name]) for name in names}
    found = {f"reward/{name}/weight": weight for name, weight in weights.items()}
    by_group = [
        np.array(
            [[one.score.reward, *(weights[name] * one.score.parts.get(name, 0.0) for name in names)] for one in each]
        )
        for each in (group.episodes for group in groups)
        if each
    ]
    sets = by_group if compared_among is RewardScope.GROUP else [np.concatenate(by_group)]
    apart = np.concatenate([each - each.mean(axis=0) for each in sets])
    variance = float((apart[:, 0] ** 2).mean())
    if compared_among is RewardScope.NONE or not variance > 0:
        return found
    return found | {
        f"reward/{name}/share": float((apart[:, 0] * apart[:, at + 1]).mean() / variance)
        for at, name in enumerate(names)
    }


def _weight(reward: Any) -> float:
    return float(reward.get("weight", 1.0)) if isinstance(reward, Mapping) else 1.0


@dataclass(frozen=True, eq=False)
class Learnt:
    """One learnt part of a step: its samples, the selection, and the statistics of its optimizer steps."""

    samples: Sequence[Sample]
    selection: Selection
    alone: int
    metrics: Sequence[Mapping[str, float]]
    teacher_kl: Mapping[str, Floats] = field(default_factory=dict)
    cut: int = 0
    down_sampled: int = 0
    sources: Sequence[Source] = ()  # of the samples


def learnt_metrics(
    parts: Sequence[Learnt],
    are_same_weights: bool = True,
    version: int | None = None,
    unmoved: int = 0,
    loss: LossSettings = LOSS,
) -> dict[str, float]:
    """Metrics of all parts of a step.

    The difference of engine and learner log-probs is called mismatch if both had the same weights, else drift. The
    staleness of tokens is counted from `version`, the learner's at the start of the step, by whose weights the first
    `unmoved` parts were scored: their samples of this version have a mismatch, also if others are stale.
    """
    counts = {
        "samples/learnt": float(sum(len(part.selection.kept) for part in parts)),
        "samples/left_out": float(sum(part.selection.dropped for part in parts)),
        "samples/alone": float(sum(part.alone for part in parts)),
        "samples/cut": float(sum(part.cut for part in parts)),
        "samples/down_sampled": float(sum(part.down_sampled for part in parts)),
    }
    samples = [sample for part in parts for sample in part.samples]
    reason = MISMATCH if are_same_weights else DRIFT
    apart = mismatch_metrics(samples, reason) or ratio_metrics([one for part in parts for one in part.metrics], reason)
    if not are_same_weights and version is not None:
        same = [one for part in parts[:unmoved] for one in fresh(part.samples, part.sources, version, FRESH_LEAST)]
        apart |= mismatch_metrics(same)
    where = {f"{reason}/{name}": value for name, value in mismatch_by_place(compared_tokens(parts, version)).items()}
    return (
        optimizer_metrics([metrics for part in parts for metrics in part.metrics], loss)
        | counts
        | apart
        | where
        | mask_metrics(samples)
        | teacher_metrics(parts)
    )


def teacher_metrics(parts: Sequence[Learnt]) -> dict[str, float]:
    """Mean KL of the policy from each teacher (k1), over the tokens that it scored."""
    names = dict.fromkeys(name for part in parts for name in part.teacher_kl)
    scored = {
        name: np.concatenate([part.teacher_kl[name] for part in parts if name in part.teacher_kl]) for name in names
    }
    return {f"{name}/kl": float(tokens.mean()) for name, tokens in scored.items() if len(tokens)}


def mismatch_metrics(samples: Sequence[Sample], reason: str = MISMATCH) -> dict[str, float]:
    """Difference between the engine's and the learner's log-probs, where both are known."""
    pairs = [
        (sample.logprobs[where], sample.old_logprobs[where])
        for sample in samples
        if sample.old_logprobs is not None
        and not np.isnan(sample.logprobs[where := predicted(sample)]).any()  # requested from the engine
    ]
    if not pairs:
        return {}
    engine, learner = (np.concatenate(each) for each in zip(*pairs, strict=True))
    found = mismatch(engine, learner)
    if len(engine):
        whole = np.array([float((of_learner - of_engine).sum()) for of_engine, of_learner in pairs])
        found |= {f"{name}_sequence": value for name, value in _spread_of_ratios(whole).items()}
    return {f"{reason}/{name}": value for name, value in found.items()}


def ratio_metrics(steps: Sequence[Mapping[str, float]], reason: str = MISMATCH) -> dict[str, float]:
    """Like `mismatch_metrics`, from sums that the loss collects if its ratios are to the engine's log-probs.

    With several optimizer steps it is drift: all but the first have other weights than the engine.
    """
    known = [step for step in steps if step.get(f"{APART}count")]
    if not known:
        return {}
    sums = {name.removeprefix(APART): sum(step[name] for step in known) for name in known[0] if name.startswith(APART)}
    found = {"logprob_mean": sums["logprob"] / sums["count"]}
    for name in ("", "_sequence"):
        mean, chi2 = (sums[f"{what}{name}"] / sums[f"count{name}"] for what in ("ratio", "squared"))
        found |= {f"chi2{name}": chi2, f"ess{name}": (1 + mean) ** 2 / (1 + chi2)}
    places = [start for start in POSITIONS if sums[f"count/{start}"]]
    found |= {f"position/{start}": sums[f"position/{start}"] / sums[f"count/{start}"] for start in places}
    return {f"{reason if len(known) == 1 else DRIFT}/{name}": value for name, value in found.items()}


MOST_STALENESS = 16  # larger ones count as this
SHOWN_TOKENS = 4  # of a step, with the largest ratios
BEFORE = 24  # tokens shown before each


@dataclass(frozen=True, eq=False, slots=True)
class ComparedTokens:
    """Log-probs of one sample's generated tokens, by engine and learner."""

    sample: Sample
    engine: npt.NDArray[np.floating]
    learner: npt.NDArray[np.floating]
    staleness: Ints | None  # of each token, if known
    source: Source | None


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """A token about which engine and learner differ most."""

    ratio: float  # the learner's probability over the engine's
    engine_logprob: float
    learner_logprob: float
    position: int  # among the sample's generated tokens
    token_id: int
    before: tuple[int, ...]  # tokens before it
    staleness: int | None
    group: int | None


def compared_tokens(parts: Sequence[Learnt], version: int | None = None) -> list[ComparedTokens]:
    """Tokens of the samples whose log-probs both engine and learner computed."""
    found = []
    for part in parts:
        for index, sample in enumerate(part.samples):
            where = predicted(sample)
            if sample.old_logprobs is None or np.isnan(sample.logprobs[where]).any():  # not requested
                continue
            source = part.sources[index] if part.sources else None
            versions = None if source is None else source.versions
            staleness = None if version is None or versions is None else version - versions[where]
            found.append(ComparedTokens(sample, sample.logprobs[where], sample.old_logprobs[where], staleness, source))
    return found


def mismatch_by_place(tokens: Sequence[ComparedTokens]) -> dict[str, float]:
    """Mean absolute difference of log-probs by position in the completion, and by staleness if tokens are stale.

    `position/16` is that of tokens 16 to 63: from one of POSITIONS to the next.
    """
    if not any(len(one.engine) for one in tokens):
        return {}
    apart = np.concatenate([np.abs(one.engine - one.learner) for one in tokens])
    places = np.concatenate([np.arange(len(one.engine)) for one in tokens])
    bucket = np.searchsorted(POSITIONS, places, side="right") - 1
    found = {f"position/{POSITIONS[at]}": float(apart[bucket == at].mean()) for at in np.unique(bucket)}
    if all(one.staleness is not None for one in tokens):
        each = np.concatenate([one.staleness for one in tokens if one.staleness is not None])
        staleness = np.minimum(each, MOST_STALENESS)
        if staleness.max(initial=0) > 0:
            found |= {f"staleness/{at}": float(apart[staleness == at].mean()) for at in np.unique(staleness)}
    return found


def largest_ratios(tokens: Sequence[ComparedTokens], count: int = SHOWN_TOKENS) -> list[TokenRatio]:
    """Tokens whose ratio is farthest from 1, at most one of each sample, the farthest first."""
    ends = []
    for number, one in enumerate(tokens):
        apart = np.abs(one.learner - one.engine)
        if len(apart) and np.isfinite(apart).any() and apart[at := int(np.nanargmax(apart))] > 0:
            ends.append((-float(apart[at]), number, at))
    return [_token_ratio(tokens[number], at) for _, number, at in sorted(ends)[:count]]


def _token_ratio(one: ComparedTokens, at: int) -> TokenRatio:
    place = int(np.flatnonzero(predicted(one.sample))[at])
    engine, learner = float(one.engine[at]), float(one.learner[at])
    return TokenRatio(
        float(np.exp(np.clip(learner - engine, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))),
        engine,
        learner,
        at,
        int(one.sample.token_ids[place]),
        tuple(int(token) for token in one.sample.token_ids[max(0, place - BEFORE) : place]),
        None if one.staleness is None else int(one.staleness[at]),
        None if one.source is None else one.source.group,
    )


def mask_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean size of the sampling masks, and the fraction of tokens whose mask was too large for the engine to return."""
    sizes = [sample.mask_sizes[predicted(sample)] for sample in samples if sample.mask_sizes is not None]
    each = np.concatenate([np.zeros(0, np.int32), *sizes])
    if not len(each):
        return {}
    found = {"sampling_mask/missing": float((each == 0).mean())}
    return found | ({"sampling_mask/size": float(each[each > 0].mean())} if each.any() else {})


def optimizer_metrics(metrics: Sequence[Mapping[str, float]], loss: LossSettings = LOSS) -> dict[str, float]:
    """Combine statistics of optimizer steps: the mean, the maximum for `max/`, the sum for skipped and `steps/`.

    Means are weighted by the number of tokens or samples that the statistic is a mean over; those of gradients are not.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in metrics for name in part):
        values = [part[name] for part in metrics if name in part]
        if name.removeprefix(CRITIC) in ("tokens", "sequences") or name.startswith(APART):
            continue
        if name in SKIPPED or name.removeprefix(CRITIC).startswith(COUNTED):
            found["steps/skipped" if name == "skipped" else name] = sum(values)
        elif name.startswith("max/"):
            found[f"loss/{name.removeprefix('max/')}_max"] = max(values)
        else:
            key = RENAMED.get(name, name if "/" in name or name == "entropy" else f"loss/{name}")
            weights = [_size(part, name, loss) for part in metrics if name in part]
            found[key] = float(np.average(values, weights=weights if sum(weights) else None))
    spread = _norm_spread([part["grad/norm"] for part in metrics if part.get("grad/norm")])
    return found | explained_variance(found) | spread


def explained_variance(found: Mapping[str, float]) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns), from the critic's means; empty if all returns are equal.

    >>> names = ("critic/value", "critic/return", "critic/squared_error", "critic/squared_return")
    >>> explained_variance(dict(zip(names, (1.0, 1.0, 0.25, 2.0))))
    {'critic/explained_variance': 0.75}
    """
    names = ("value", "return", "squared_error", "squared_return")
    value, mean, error, square = (found.get(f"{CRITIC}{name}", math.nan) for name in names)
    variance = square - mean**2
    if not variance > ROUNDING * square:
        return {}
    return {"critic/explained_variance": 1 - (error - (mean - value) ** 2) / variance}


def _size(step: Mapping[str, float], name: str, loss: LossSettings) -> float:
    """Number of tokens or samples that a statistic of an optimizer step is a mean over; 1 if it is no mean."""
    own = name.removeprefix(CRITIC)
    if ("/" in own and own != BALANCE) or own in ("lr", "entropy_coef"):
        return 1.0
    prefix, aggregation = name.removesuffix(own), loss.loss_aggregation
    if prefix:
        aggregation = loss.value_loss_aggregation or aggregation
    if own in ("loss", "value_loss"):  # other statistics are of tokens where the loss is a sum over them
        is_by_sample = aggregation is not LossAggregation.TOKEN_MEAN
    else:
        is_by_sample = aggregation is LossAggregation.SEQ_MEAN and own not in (BALANCE, MEAN_RATIO)
    return step.get(prefix + ("sequences" if is_by_sample or own in OF_SAMPLES else "tokens"), 1.0)


def _norm_spread(norms: Sequence[float]) -> dict[str, float]:
    """Standard deviation of the minibatches' gradient norms over their mean; empty for a single minibatch."""
    if len(norms) < 2 or not np.isfinite(norms).all():
        return {}
    return {"grad/norm_spread": float(np.std(norms, ddof=1) / np.mean(norms))}


def time_metrics(seconds: Mapping[str, float], whole: float, tokens: float) -> dict[str, float]:
    """Seconds of each phase, and tokens per second of the step."""
    found = {f"time/{name}": seconds[name] for name in PHASES if name in seconds}
    return {"time/step": whole, **found, "tokens/per_second": tokens / whole if whole else 0.0}
