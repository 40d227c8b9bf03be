"""Diagnose a run from its metrics: what goes wrong, the likely cause, and what to try.

Rows of metrics go in, diagnoses come out. Each rule looks at the first steps and at the newest ones of a run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import Any

Row = Mapping[str, Any]

START = 5  # first steps of a run, which later ones are compared with
WINDOW = 20  # newest steps that are looked at
NEWEST = 3  # steps whose mean is a metric's value now: one step alone may be an accident
QUIET = 10  # steps without a diagnosis, after which it is reported again

# Entropy falls in every run that learns. It is a collapse if so little is left while the reward gained nothing.
ENTROPY_LEFT = 0.2  # of the entropy of the first steps
TAUGHT = 0.8  # of the first KL from a teacher; below it, the policy approaches the teacher and its entropy
SOLVED = 0.9  # of the largest reward of a step
REWARD_GAIN = 0.2  # standard deviations of the reward among samples; a smaller gain is flat
# Reasoning grows lengths over hundreds of steps. Within 20 steps, a reward pays for length or the end token is lost.
LENGTH_TIMES = 2.0
TRUNCATED, TRUNCATED_GAIN = 0.5, 0.3  # share of truncated episodes, and by how much it grew
# A policy that is paid for whole answers learns to end them. Healthy runs of a small model took up to 19 steps, in
# which the share fell and the reward rose.
TRUNCATED_STEPS, TRUNCATED_FALL, PASS_GAIN = 15, 0.1, 0.05
# Rewards of format are learnt first. It is the only thing learnt if it has levelled off and the others have not moved.
PART_RISE, PART_FLAT = 0.2, 0.05  # of the largest value of the reward
PART_LOW = 0.5  # a reward above it is no unsolved task
FORMAT_STEPS = 8  # before that a slow start looks the same
# A share of 95 % of the variance leaves the advantages to one reward; others that differ among samples are ignored.
DOMINANT, IGNORED = 0.95, 0.05
MINOR = 0.2  # a reward of a smaller weight is meant to decide little
# Usual shares of clipped tokens are below 0.1; beyond 0.3 a large part of each batch teaches nothing.
CLIPPED = 0.3
# With equal weights and precision the KL of engine and learner is about 1e-7, with bfloat16 about 1e-3.
MISMATCH_TIMES, MISMATCH_LEAST = 10.0, 1e-3  # of the smallest of the first steps
MISMATCH_MOST = 0.02  # whatever it was at the start: the ratio of a token is then off by a fifth
# Trust regions of PPO stop at a KL of 0.01 to 0.05 per step. The first step counts only if the next ones go as far and
# cost reward: Adam knows no scale yet, and healthy runs reached 0.3 in it.
STEP_KL, STEP_KL_TIMES, STEP_KL_WINDOW = 0.1, 2, 10  # exceeded so many times in so many steps
EQUAL_GROUPS = 0.95  # of all groups: hardly a sample has an advantage
REJECTED = 0.5  # of all tokens: the samples are of another policy than the learner's
GRADIENT_TIMES = 10.0  # of the median norm of the window, which is small once most groups are solved


CLIPS = ("loss/clipped_low", "loss/clipped_high")


class Code(StrEnum):
    """Names of the diagnoses."""

    ENTROPY_COLLAPSE = "entropy_collapse"
    LENGTH_EXPLOSION = "length_explosion"
    TRUNCATED = "truncated"
    FORMAT_ONLY = "format_only"
    DOMINANT_REWARD = "dominant_reward"
    CLIPPED = "clipped"
    ENGINE_MISMATCH = "engine_mismatch"
    LEARNING_RATE = "learning_rate"
    NO_SIGNAL = "no_signal"
    REJECTED = "rejected"


CAUSES: Mapping[Code, tuple[str, str]] = {
    Code.ENTROPY_COLLAPSE: (
        "the policy repeats itself before it has found what is rewarded",
        "raise entropy_coef or temperature, set clip_range_high to 0.28, lower learning_rate",
    ),
    Code.LENGTH_EXPLOSION: (
        "the reward pays for length, or samples without an end are not punished",
        "read samples.jsonl; take length out of the reward, or set overlong_buffer_tokens",
    ),
    Code.TRUNCATED: (
        "max_new_tokens is too small for these answers, or the policy does not end them",
        "read the ends in samples.jsonl; raise max_new_tokens (max_context where the context is full), else set "
        "overlong_buffer_tokens to pay for shorter answers, or mask_truncated to learn from whole ones alone",
    ),
    Code.FORMAT_ONLY: (
        "the policy gets this reward without solving the task",
        "lower its weight, give it only together with a right answer, or use easier prompts so that some are solved",
    ),
    Code.DOMINANT_REWARD: (
        "its weight or its scale is much larger than that of the others, so they decide nothing",
        "set weight so that the shares are as you want them",
    ),
    Code.CLIPPED: (
        "the policy moves farther in a step than clip_range allows",
        "lower learning_rate or ppo_epochs, use fewer minibatches, or widen clip_range",
    ),
    Code.ENGINE_MISMATCH: (
        "the engine computes with other weights, another precision or other sampling than the learner",
        "compare compute_dtype with the engine's dtype, read the engine's log, and tokens.jsonl for the tokens; until "
        "then set rollout_is",
    ),
    Code.LEARNING_RATE: (
        "learning_rate is too high for this model and this batch",
        "divide learning_rate by 3 to 10, lengthen warmup_steps, lower ppo_epochs",
    ),
    Code.NO_SIGNAL: (
        "the prompts are all too hard, or the reward does not recognise answers",
        "read samples.jsonl, check the reward by roost try; use easier prompts, larger num_generations, or sft first",
    ),
    Code.REJECTED: (
        "engine and learner disagree, as they do with top_p, top_k or min_p without sampling_mask_replay, samples are "
        "stale, or the bounds of rollout_rejection are too narrow",
        "leave top_p, top_k and min_p out or set sampling_mask_replay, compare mismatch/kl_k3 with another run, lower "
        "max_staleness, or widen the bounds",
    ),
}

CAUSES_IF_TRUNCATED: Mapping[Code, tuple[str, str]] = {
    Code.NO_SIGNAL: (
        "max_new_tokens cuts answers off before they can be right, the prompts are all too hard, or the reward does "
        "not recognise answers",
        f"raise max_new_tokens; {CAUSES[Code.NO_SIGNAL][1]}",
    ),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Something that goes wrong from this step on, with the metrics that show it."""

    step: int
    code: Code
    figures: str
    is_truncated: bool = False  # most episodes are

    @property
    def cause(self) -> str:
        return self._explanation[0]

    @property
    def advice(self) -> str:
        return self._explanation[1]

    @property
    def _explanation(self) -> tuple[str, str]:
        known = CAUSES[self.code]
        return CAUSES_IF_TRUNCATED.get(self.code, known) if self.is_truncated else known

    def __str__(self) -> str:
        return f"{self.code} at step {self.step}: {self.figures}. Likely cause: {self.cause}. Try: {self.advice}"


@dataclass(frozen=True, eq=False, slots=True)
class History:
    """The first values of each metric, and the newest rows of a run."""

    first: Mapping[str, Sequence[float]]  # finite values; some metrics begin late, as the policy's after its critic's
    newest: Sequence[Row]
    steps: int  # so far

    def start(self, name: str, count: int = NEWEST) -> float:
        """Mean of a metric over the first steps that have it; NaN if none has."""
        return _mean(self.first.get(name, ())[:count])

    def now(self, name: str, count: int = NEWEST) -> float:
        """Mean of a metric over the newest steps."""
        return _mean(_values(self.newest[-count:], name))

    def before(self, name: str, count: int = NEWEST) -> float:
        """Mean of a metric over the oldest steps of the window."""
        return _mean(_values(self.newest[:count], name))


@dataclass(slots=True)
class Diagnoser:
    """Diagnoses a run as steps are added. A diagnosis is returned once, at the step at which it begins.

    >>> rows = [{"step": step, "mismatch/kl_k3": 1e-6 if step < 4 else 0.2} for step in range(1, 20)]
    >>> [(one.step, one.code.value) for one in onsets(rows)]
    [(5, 'engine_mismatch')]
    """

    _first: dict[str, list[float]] = field(default_factory=dict)
    _newest: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _steps: int = 0
    _last: dict[Code, int] = field(default_factory=dict)  # count of steps when it held last

    def add(self, row: Row) -> list[Diagnosis]:
        """Add a step; return the diagnoses that begin with it."""
        for name in row:
            first = self._first.setdefault(name, [])
            if len(first) < START:
                first += _values([row], name)
        self._newest.append(row)
        self._steps += 1
        found = []
        history = History(self._first, tuple(self._newest), self._steps)
        is_truncated = history.now("length/truncated", START) > TRUNCATED
        for code, figures in diagnose(history):
            if self._steps - self._last.get(code, -QUIET) >= QUIET:
                found.append(Diagnosis(int(row.get("step", self._steps)), code, figures, is_truncated))
            self._last[code] = self._steps
        return found


def onsets(rows: Iterable[Row]) -> list[Diagnosis]:
    """All diagnoses of a run, each at the step at which it began."""
    diagnoser = Diagnoser()
    return [found for row in rows for found in diagnoser.add(row)]


def diagnose(history: History) -> Iterator[tuple[Code, str]]:
    """Diagnoses that hold at the newest step, with their figures."""
    for code, rule in RULES.items():
        figures = rule(history)
        if figures:
            yield code, figures


def entropy_collapse(history: History) -> str:
    """Entropy is far below its start, the reward is where it was, and no teacher is being followed."""
    entropy, start = history.now("entropy"), history.start("entropy")
    is_solved = history.now("reward/mean", 5) > SOLVED * history.now("reward/max", 5) > 0  # nothing is left to gain
    has_fallen = history.steps > START and start > 0 and entropy < ENTROPY_LEFT * start
    if not has_fallen or is_solved or _has_gained(history) or _is_taught(history):
        return ""
    return f"entropy {start:.3g} -> {entropy:.3g}, reward {history.start('reward/mean'):.3f} -> " + (
        f"{history.now('reward/mean', 5):.3f}"
    )


def length_explosion(history: History) -> str:
    """Samples are much longer, or many more are truncated, than at the beginning of the window."""
    length, before = history.now("tokens/mean"), history.before("tokens/mean", 2)
    truncated, was = history.now("length/truncated"), history.before("length/truncated", 2)
    is_longer = length >= LENGTH_TIMES * before > 0
    is_cut = truncated >= TRUNCATED and truncated - was >= TRUNCATED_GAIN and length > before
    if len(history.newest) < NEWEST + 1 or not (is_longer or is_cut):
        return ""
    cut = "" if math.isnan(was + truncated) else f", truncated {was:.0%} -> {truncated:.0%}"
    return f"mean tokens {before:.3g} -> {length:.3g}{cut}"


def truncated(history: History) -> str:
    """Most episodes are truncated in each of the newest steps, no fewer than before; the reward is low and stays low.

    Not if the entropy has collapsed or there is no signal: these diagnoses explain the truncation.
    """
    shares = _values(history.newest[-TRUNCATED_STEPS:], "length/truncated")
    if len(shares) < TRUNCATED_STEPS or not min(shares) > TRUNCATED:
        return ""
    before, now = _mean(shares[:NEWEST]), _mean(shares[-NEWEST:])
    passes = history.now("pass_rate/mean", START) - history.start("pass_rate/mean")
    is_learning = _has_gained(history) or passes > PASS_GAIN or _is_taught(history) or now < before - TRUNCATED_FALL
    is_high = history.now("reward/mean", START) > PART_LOW * history.now("reward/max", START) > 0
    if is_learning or is_high or entropy_collapse(history) or no_signal(history):
        return ""
    reward = f"reward {history.start('reward/mean'):.3f} -> {history.now('reward/mean', START):.3f}"
    return f"{fmean(shares):.0%} of the episodes of {TRUNCATED_STEPS} steps are truncated, {reward}"


def format_only(history: History) -> str:
    """A reward has risen and levelled off, while another of at least its weight has not moved from the start."""
    if history.steps < FORMAT_STEPS:
        return ""
    rises = {name: _rise(history, f"reward/{name}/mean") for name in _parts(history)}
    risen = [name for name, rise in rises.items() if rise >= PART_RISE and _is_level(history, f"reward/{name}/mean")]
    low = [name for name in rises if abs(rises[name]) < PART_FLAT and history.now(f"reward/{name}/mean") < PART_LOW]
    flat = [name for name in low if any(_weight(history, name) >= _weight(history, other) > 0 for other in risen)]
    if not flat:
        return ""
    moved = [
        f"reward {name} {history.start(f'reward/{name}/mean', 1):.3f} -> {history.now(f'reward/{name}/mean'):.3f}"
        for name in (*risen, *flat)
    ]
    return ", ".join(moved)


def dominant_reward(history: History) -> str:
    """One reward decides the advantages, though others differ among samples."""
    shares = {name: history.now(f"reward/{name}/share", 5) for name in _parts(history)}
    most = max(shares, key=lambda name: -math.inf if math.isnan(shares[name]) else shares[name], default=None)
    if most is None or history.steps < START or not shares[most] >= DOMINANT:
        return ""
    others = [
        name
        for name in shares
        if name != most and _weight(history, name) >= MINOR and history.now(f"reward/{name}/std", 5) > IGNORED
    ]
    if not others:
        return ""
    vary = "varies" if len(others) == 1 else "vary"
    return f"{shares[most]:.0%} of the variance of the reward is of {most}, though {', '.join(others)} {vary}, too"


def clipped(history: History) -> str:
    """Many tokens were clipped in each of the newest steps."""
    shares = [_clipped_share(row) for row in history.newest[-NEWEST:]]
    usual = sum(min(history.first.get(name, ()), default=0.0) for name in CLIPS) if _is_against_engine(history) else 0.0
    if len(shares) < NEWEST or not min(shares) - usual > CLIPPED:
        return ""
    return f"{fmean(shares):.0%} of the tokens are clipped"


def engine_mismatch(history: History) -> str:
    """The engine's and the learner's log-probs differ much more than at the start, with the same weights."""
    name = "mismatch/kl_k3"
    newest = _values(history.newest[-NEWEST:], name)
    start = min(history.first.get(name, ()), default=math.nan)
    if len(newest) < 2:
        return ""
    now = min(newest[-2:])
    if not (now > max(MISMATCH_LEAST, MISMATCH_TIMES * start) or now > MISMATCH_MOST):
        return ""
    return f"KL of engine and learner with the same weights {start:.2g} -> {newest[-1]:.2g}"


def learning_rate(history: History) -> str:
    """Steps change the policy too much, or gradients jump."""
    later = history.newest if history.steps > len(history.newest) else history.newest[1:]
    recent = [abs(value) for value in _values(later[-STEP_KL_WINDOW:], "loss/kl")]
    first = [abs(value) for value in history.first.get("loss/kl", ())]
    usual = min(first, default=0.0) if _is_against_engine(history) else 0.0
    if _far(recent, usual) >= STEP_KL_TIMES and recent[-1] - usual > STEP_KL:
        return _far_steps(recent, usual)
    reward, now = history.start("reward/mean", 1), history.now("reward/mean")
    if len(first) == NEWEST + 1 and _far(first[:NEWEST], usual) >= STEP_KL_TIMES and now < reward:
        return f"{_far_steps(first, usual)}, reward {reward:.3f} -> {now:.3f}"
    norms = _values(history.newest, "grad/norm")
    is_new = min(norms[-2:], default=0.0) > max(history.first.get("grad/norm", ()), default=0.0)
    if len(norms) > START and is_new and min(norms[-2:]) > GRADIENT_TIMES * (usual := median(norms[:-2])) > 0:
        return f"gradient norm {usual:.3g} -> {norms[-1]:.3g}"
    return ""


def no_signal(history: History) -> str:
    """Nearly all groups have equal rewards, and the task is not solved.

    With dynamic sampling the mean reward is of what is left, but the pass rate of all that was generated.
    """
    equal, mean = history.now("reward/equal_groups", START), history.now("reward/mean", START)
    most = history.now("reward/max", START)
    is_solved = mean > SOLVED * most > 0 or (most <= 1 and history.now("pass_rate/mean", START) > SOLVED)
    if history.steps < START or is_solved or not equal >= EQUAL_GROUPS:
        return ""
    share = history.now("length/truncated", START)
    cut = f", {share:.0%} of the episodes are truncated" if share > TRUNCATED else ""
    return f"{equal:.0%} of the groups have equal rewards, mean reward {mean:.3f}{cut}"


def rejected(history: History) -> str:
    """Most tokens were rejected in each of the newest steps."""
    shares = _values(history.newest[-NEWEST:], "loss/rejected")
    if len(shares) < NEWEST or not min(shares) > REJECTED:
        return ""
    return f"{fmean(shares):.0%} of the tokens are rejected"


RULES: Mapping[Code, Callable[[History], str]] = {
    Code.ENTROPY_COLLAPSE: entropy_collapse,
    Code.LENGTH_EXPLOSION: length_explosion,
    Code.TRUNCATED: truncated,
    Code.FORMAT_ONLY: format_only,
    Code.DOMINANT_REWARD: dominant_reward,
    Code.CLIPPED: clipped,
    Code.ENGINE_MISMATCH: engine_mismatch,
    Code.LEARNING_RATE: learning_rate,
    Code.NO_SIGNAL: no_signal,
    Code.REJECTED: rejected,
}


def _clipped_share(row: Row) -> float:
    return sum(value for name in CLIPS for value in _values([row], name))


def _far(divergences: Sequence[float], usual: float) -> int:
    """Count of steps that move the policy farther than a trust region allows."""
    return sum(value - usual > STEP_KL for value in divergences)


def _far_steps(divergences: Sequence[float], usual: float) -> str:
    return (
        f"{_far(divergences, usual)} of {len(divergences)} steps moved the policy by a KL above {STEP_KL + usual:.2g}, "
        f"the farthest by {max(divergences):.2g}"
    )


def _is_against_engine(history: History) -> bool:
    """Return True if ratios are to the engine's log-probs, which differ from the learner's before any step.

    With truncated sampling they differ by the probability of what was left, in every step. The KL of engine and learner
    is known wherever the learner's log-probs are computed before its steps.
    """
    return not any(name in history.first for name in ("mismatch/kl_k3", "drift/kl_k3"))


def _has_gained(history: History) -> bool:
    """Return True if the reward is above that of the first steps."""
    gain = history.now("reward/mean", START) - history.start("reward/mean")
    return gain > REWARD_GAIN * history.start("reward/std")


def _is_taught(history: History) -> bool:
    """Return True if the policy comes closer to a teacher."""
    names = [name for name in history.newest[-1] if name.endswith("/kl") and name.count("/") == 1 and name != "loss/kl"]
    return any(abs(history.now(name)) < TAUGHT * abs(history.start(name)) for name in names)


def _parts(history: History) -> list[str]:
    """Names of the rewards that are summed; none if there is only one."""
    found = [
        name.removeprefix("reward/").removesuffix("/scored")
        for name in history.newest[-1]
        if name.startswith("reward/") and name.endswith("/scored") and name.count("/") == 2
    ]
    return found if len(found) > 1 else []


def _weight(history: History, name: str) -> float:
    """Weight of a reward; 1 if it is not known."""
    weight = history.now(f"reward/{name}/weight", 1)
    return 1.0 if math.isnan(weight) else weight


def _rise(history: History, name: str) -> float:
    """Rise of a metric since the first step, over the largest size that it had."""
    values = [*history.first.get(name, ()), *_values(history.newest, name)]
    scale = max(map(abs, values), default=0.0)
    return (history.now(name) - history.start(name, 1)) / (scale or 1.0)


def _is_level(history: History, name: str) -> bool:
    values = _values(history.newest[-2 * NEWEST :], name)
    return len(values) == 2 * NEWEST and abs(_mean(values[NEWEST:]) - _mean(values[:NEWEST])) < PART_FLAT * max(
        map(abs, values)
    )


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """Finite numbers of a metric."""
    found = (row.get(name) for row in rows)
    return [value for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
