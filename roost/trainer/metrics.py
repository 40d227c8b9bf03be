"""Metrics of a step, as one flat mapping that is written, shown and plotted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roost.learner.advantages import Selection
from roost.learner.packing import predicted
from roost.learner.sample import Floats, Sample
from roost.rollout.episode import Episode, Group
from roost.trainer.batch import staleness_of
from roost.trainer.feed import Tally
from roost.trainer.guards import MISMATCH, SKIPPED

LARGEST_LOG_RATIO = 20.0
MOST = 700.0  # beyond it exp is infinite


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
    above = np.minimum(learner - engine, MOST)
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
    # exp(2 * 20) is far beyond any useful weight
    found = np.exp(np.clip(log_ratios, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    second = float((found**2).mean())
    return {"chi2": second - 1, "ess": float(found.mean()) ** 2 / second}


PHASES = ("read", "generate", "switch", "score", "learn", "sync")
PERCENTILES = (50, 90, 99)
COUNTED = "steps/"  # prefix of counts of optimizer steps
DRIFT = "drift"  # like mismatch, but the learner's weights have moved since generation
RENAMED = {"loss": "loss/total", "policy_loss": "loss/policy", "kl": "loss/kl", "lr": "learning_rate"}


def group_metrics(groups: Sequence[Group], version: int, tally: Tally) -> dict[str, float]:
    """Rewards, staleness and counts of the collected groups."""
    rewards = np.array([reward for group in groups for reward in group.rewards] or [np.nan])
    behind = staleness_of(groups, version)
    episodes = [episode for group in groups for episode in group.episodes]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "reward/equal_groups": sum(group.is_equal for group in groups) / max(1, len(groups)),
        "staleness/mean": float(behind.mean()) if len(behind) else 0.0,
        "staleness/max": float(behind.max()) if len(behind) else 0.0,
        "tokens/generated": float(len(behind)),
        "tokens/mean": float(np.mean([episode.completion_tokens for episode in episodes])) if episodes else 0.0,
        "samples/finished": float(len(episodes)),
        "samples/cancelled": float(tally.cancelled),
        "samples/failed": float(tally.failed),
        "samples/retried": float(tally.retried),
        "groups/lost": float(tally.lost_groups),
        "groups/replaced": float(tally.equal_groups),
        "groups/discarded": float(tally.discarded_groups),
        "episode/seconds": float(np.mean([episode.seconds for episode in episodes])) if episodes else 0.0,
        **length_metrics(episodes),
    }


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


def reward_metrics(groups: Sequence[Group], rewards: Iterable[str] = ()) -> dict[str, float]:
    """Mean of each reward and the number of answers it scored; 0 scored for names in `rewards` that scored none."""
    given: dict[str, list[float]] = {name: [] for name in rewards}
    for episode in (episode for group in groups for episode in group.episodes):
        for name, score in episode.score.parts.items():
            given.setdefault(name, []).append(score)
    means = {f"reward/{name}/mean": float(np.mean(scores)) for name, scores in given.items() if scores}
    return means | {f"reward/{name}/scored": float(len(scores)) for name, scores in given.items()}


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


def learnt_metrics(parts: Sequence[Learnt], are_same_weights: bool = True) -> dict[str, float]:
    """Combine the parts of a step. The log-prob difference is called mismatch with the same weights, else drift."""
    counts = {
        "samples/learnt": float(sum(len(part.selection.kept) for part in parts)),
        "samples/left_out": float(sum(part.selection.dropped for part in parts)),
        "samples/alone": float(sum(part.alone for part in parts)),
        "samples/cut": float(sum(part.cut for part in parts)),
        "samples/down_sampled": float(sum(part.down_sampled for part in parts)),
    }
    samples = [sample for part in parts for sample in part.samples]
    apart = mismatch_metrics(samples, MISMATCH if are_same_weights else DRIFT)
    return (
        optimizer_metrics([metrics for part in parts for metrics in part.metrics])
        | counts
        | apart
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


def optimizer_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine statistics of optimizer steps: mean, but maximum for `max/`, and sum for skipped and `steps/`."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in metrics for name in part):
        values = [part[name] for part in metrics if name in part]
        if name in ("tokens", "sequences"):
            continue
        if name in SKIPPED or name.removeprefix("critic/").startswith(COUNTED):
            found["steps/skipped" if name == "skipped" else name] = sum(values)
        elif name.startswith("max/"):
            found[f"loss/{name.removeprefix('max/')}_max"] = max(values)
        else:
            key = RENAMED.get(name, name if "/" in name or name == "entropy" else f"loss/{name}")
            found[key] = float(np.mean(values))
    return found


def time_metrics(seconds: Mapping[str, float], whole: float, tokens: float) -> dict[str, float]:
    """Seconds of each phase, and tokens per second of the step."""
    found = {f"time/{name}": seconds[name] for name in PHASES if name in seconds}
    return {"time/step": whole, **found, "tokens/per_second": tokens / whole if whole else 0.0}
