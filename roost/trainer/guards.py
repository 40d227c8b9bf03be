"""Conditions that end a step, an attempt or a run: divergence, failures that may be retried, and signals."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from roost.config.findings import counted
from roost.config.train import USUAL_RATES, OptimizerSettings, TrainSettings, unlike_usual
from roost.engines.protocol import EngineError, EnginesBehind
from roost.procs.signals import REQUEUE_CODE
from roost.runtime.control_watch import ControlLost
from roost.transport.context import FailureKind, WorkerFailed

SKIPPED = ("skipped", "critic/skipped")  # statistic of an optimizer step of the policy, and of the critic
OUTLIERS = ("steps/outlier", "critic/steps/outlier")
MAX_OUTLIERS = 30  # in a row; such gradients are not outliers, and skipping them means to learn nothing


class Diverged(RuntimeError):
    """Training diverged and cannot continue from these weights."""


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """Optimizer steps skipped because loss or gradient was not finite, or the gradient an outlier.

    >>> skipped, taken = {"loss": math.nan, "skipped": 1.0}, {"loss": 0.5, "skipped": 0.0}
    >>> SkippedSteps().after(taken, 4).after(skipped, 5).after(skipped, 5)
    SkippedSteps(in_row=2, outliers=0, confirmed=4)
    """

    in_row: int = 0
    outliers: int = 0  # in a row
    confirmed: int | None = None  # newest step whose weights later gave a finite loss and gradient

    def after(self, metrics: Mapping[str, float], step: int) -> SkippedSteps:
        """Return the counts after one more optimizer step, in the training step that follows `step`."""
        if any(metrics.get(name) for name in SKIPPED):
            return replace(self, in_row=self.in_row + 1)
        if any(metrics.get(name) for name in OUTLIERS):
            return replace(self, outliers=self.outliers + 1)
        return SkippedSteps(confirmed=step)

    def exceeds(self, settings: TrainSettings) -> bool:
        most = settings.max_skipped_steps
        return most > 0 and (self.in_row >= most or self.outliers >= MAX_OUTLIERS)


def check_skipped(skipped: SkippedSteps, settings: TrainSettings) -> None:
    """Raise if too many optimizer steps in a row were skipped."""
    if not skipped.exceeds(settings):
        return
    if skipped.outliers >= MAX_OUTLIERS:
        raise Diverged(
            f"{skipped.outliers} optimizer steps in a row skipped for their gradient norm, so nothing is learnt; raise "
            "max_grad_norm, or set skip_outlier_gradients to false"
        )
    steps, most = counted(skipped.in_row, "optimizer step"), settings.max_skipped_steps
    raise Diverged(f"{steps} in a row skipped, as loss or gradient was not finite (max_skipped_steps: {most})")


def check_policy(logprobs: Sequence[float], version: int) -> None:
    """Raise Diverged if a log-prob is not finite: no engine could sample from this policy."""
    if not all(math.isfinite(one) for one in logprobs):
        raise Diverged(
            f"the weights of policy version {version} give log-probabilities that are not finite, so no engine got them"
        )


def explained(error: Diverged, settings: TrainSettings, step: int, metrics: Mapping[str, float]) -> Diverged:
    """Return the error that ends a run, with the metrics of the step and the likely cause."""
    metrics_text = f"loss {metrics.get('loss/total', math.nan):g}, gradient norm {metrics.get('grad/norm', math.nan):g}"
    return Diverged(
        f"training diverged in step {step} ({metrics_text}): {error}. Likely cause: {likely_cause(settings, metrics)}"
    )


def likely_cause(settings: TrainSettings, metrics: Mapping[str, float]) -> str:
    """Likely cause of a divergence, with the setting to change first."""
    learner, rate = settings.learner, settings.learner.optimizer.learning_rate
    if not math.isfinite(metrics.get("reward/mean", 0.0)):
        return "rewards that are not finite; check the scenario's reward and the train.rewards"
    if rate > USUAL_RATES[1]:
        return f"learning_rate {unlike_usual(rate)}; lower it"
    if "float16" in (learner.compute_dtype, learner.weight_dtype):
        return "float16 overflows beyond 65504; set compute_dtype and weight_dtype to bfloat16 or float32"
    if learner.optimizer.max_grad_norm == 0:
        return f"gradients are not clipped; set max_grad_norm, such as {OptimizerSettings().max_grad_norm:g}"
    return f"learning_rate ({rate:g}) is too high for this model and these rewards; lower it, or lengthen warmup_steps"


MISMATCH = "mismatch"  # log-probs of engine and learner with the same weights
METRIC = f"{MISMATCH}/logprob_mean"
JUMP_FACTOR = 10.0  # over the run's usual mismatch, which some models have large from the start
SMALLEST_JUMP = 0.1  # nats
REMEMBERED = 20  # steps


def check_mismatch(metrics: Mapping[str, float], limit: float) -> None:
    """Raise Diverged if the log-probs of a token differ by more than the limit, or are not finite."""
    largest = metrics.get(f"{MISMATCH}/logprob_max", 0.0)
    if not largest <= limit:
        raise Diverged(
            f"log-probs of engine and learner differ by {largest:.3g} in a token, with the same weights "
            f"(max_logprob_mismatch: {limit:g}). Compare the engine's precision with compute_dtype, or raise the limit"
        )


class MismatchGuard:
    """Detects jumps of the mismatch, compared with the median of the newest steps that were learnt from.

    >>> guard = MismatchGuard()
    >>> guard.jump({METRIC: 1.4}), guard.accept({METRIC: 1.4})
    ('', None)
    >>> guard.jump({METRIC: 3.0}), guard.jump({METRIC: 15.0})
    ('', 'the mean mismatch of log-probabilities jumped from 1.4 to 15')
    """

    def __init__(self) -> None:
        self._earlier: deque[float] = deque(maxlen=REMEMBERED)

    def jump(self, metrics: Mapping[str, float]) -> str:
        """Describe a jump of the mismatch; empty if there is none, or nothing to compare with yet."""
        now = metrics.get(METRIC)
        if now is None or not self._earlier:
            return ""
        usual = median(self._earlier)
        if now <= max(SMALLEST_JUMP, JUMP_FACTOR * usual):  # NaN compares false, so it is a jump
            return ""
        return f"the mean mismatch of log-probabilities jumped from {usual:.3g} to {now:.3g}"

    def accept(self, metrics: Mapping[str, float], is_new_usual: bool = False) -> None:
        """Record the mismatch of a step that is learnt from; `is_new_usual` forgets the earlier ones."""
        if is_new_usual:
            self._earlier.clear()
        if METRIC in metrics:
            self._earlier.append(metrics[METRIC])


class Broken(Exception):
    """An attempt that failed: `error` is the cause, `steps` the number of steps it completed.

    `had_folder`: the run's folder was created, or cut back to the attempt's first step. `nodes` are the Ray ids of the
    nodes that it ran on, by rank.
    """

    def __init__(
        self, error: WorkerFailed | EngineError | ControlLost, steps: int, was_stopped: bool, had_folder: bool = True
    ) -> None:
        super().__init__(str(error))
        self.error, self.steps, self.was_stopped, self.had_folder = error, steps, was_stopped, had_folder
        self.nodes: tuple[str, ...] = ()

    @property
    def is_retryable(self) -> bool:
        """Return True if a retry can help: a process was lost, or the attempt had completed steps."""
        failures = self.error.failures if isinstance(self.error, WorkerFailed) else ()
        was_lost = any(failure.kind is not FailureKind.RAISED for failure in failures)
        was_lost = was_lost or isinstance(self.error, ControlLost | EnginesBehind)
        return (was_lost or self.steps > 0) and not self.was_stopped


class EndedEarly(RuntimeError):
    """The run ended before its last step, and neither a signal nor an error says why."""

    def __init__(self, done: int, wanted: int, reason: str) -> None:
        super().__init__(
            f"the run ended after step {done} of {wanted}: {reason}. To continue, add --resume to the command"
        )


class EndedAtStart(Exception):
    """A signal ended the run during startup; `done` counts the steps completed before a resume."""

    def __init__(self, number: signal.Signals, done: int) -> None:
        how = "while it was starting" if done else "before its first step"
        back = f"; {counted(done, 'step')} done: to continue, add --resume to the command" if done else ""
        super().__init__(f"{number.name} ended the run {how}; all its processes have ended{back}")
        self.exit_code = REQUEUE_CODE if number == signal.SIGUSR1 else 128 + number


def check_ended(done: int, wanted: int, was_stopped: bool) -> None:
    """Raise EndedEarly if steps are missing although the run was not stopped."""
    if done < wanted and not was_stopped:
        raise EndedEarly(done, wanted, "nothing stopped it; this is a bug in Roost, please report it")
