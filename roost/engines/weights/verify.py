"""Verify new weights: by fingerprints if engine and learner share tensor names, otherwise by a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.engines.protocol import Engine, UpdateFailed
from roost.engines.weights.probe import Probe

CLEARLY = 0.02  # a log-prob change larger than rounding
MARGIN = 2.0  # times the difference with equal weights, as rounding differs between weights


class NotTaken(UpdateFailed):
    """Every call succeeded, but the engine does not have the new weights."""


async def verify_by_fingerprints(engine: Engine, sent: Mapping[str, str]) -> bool:
    """Compare the engine's tensors with those sent; return False if names or dtypes differ, so that they cannot be."""
    differing = compare_fingerprints(sent, await engine.fingerprints())
    if differing is None:
        return False
    if differing:
        raise NotTaken(
            f"{engine.url} holds other weights than were sent: {len(differing)} of {len(sent)} tensors differ, such as "
            f"{differing[0]}"
        )
    return True


def compare_fingerprints(sent: Mapping[str, str], held: Mapping[str, str]) -> list[str] | None:
    """Names of tensors that differ, or None if the two sides cannot be compared.

    >>> compare_fingerprints({"a": "float32:1", "b": "float32:2"}, {"a": "float32:1", "b": "float32:3"})
    ['b']
    >>> compare_fingerprints({"a": "float32:1"}, {"a": "bfloat16:9"}) is None
    True
    """
    if not sent or set(sent) != set(held):
        return None
    if any(sent[name].split(":")[0] != held[name].split(":")[0] for name in sent):
        return None
    return [name for name in sent if sent[name] != held[name]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Probe answers expected of an engine after an update, and the references to judge them by."""

    probe: Probe
    baseline: float = 0.0  # the engine's difference with equal weights
    before: Sequence[float] | None = None  # its answers with the old weights
    probe_before: Probe | None = None  # the learner's probe of the old weights

    @property
    def allowed(self) -> float:
        """Allowed log-prob error: what rounding allows, or the error with equal weights plus a margin.

        >>> Expected(Probe((1, 2), (-1.0,), tolerance=0.25), baseline=1.4).allowed
        2.8
        """
        return max(self.probe.tolerance, MARGIN * self.baseline)

    @property
    def has_moved(self) -> bool:
        """True if the learner's answers clearly differ between old and new weights, or if that is unknown."""
        known = self.probe_before is not None and self.probe_before.token_ids == self.probe.token_ids
        return not known or self.probe_before is None or self.probe.difference(self.probe_before.logprobs) > CLEARLY


async def verify_by_probe(engine: Engine, expected: Expected, adapter: str | None = None) -> None:
    """Raise NotTaken if the engine's answers to the probe do not match the new weights."""
    wrong = judge_answers(expected, await engine.score(expected.probe.token_ids, adapter))
    if wrong:
        raise NotTaken(f"{engine.url} does not answer with the new weights: {wrong}")


def judge_answers(expected: Expected, answers: Sequence[float]) -> str:
    """Describe the problem with an engine's answers; empty if they are fine.

    They must be within rounding, or within the baseline difference; or, for a model so sensitive that rounding alone
    exceeds it, clearly closer than the answers of the old weights. Answers that did not change at all although the
    learner's did come from the old weights, even if they are close.

    >>> probe = Probe((1, 2, 3), (-1.0, -2.0), tolerance=0.1)
    >>> judge_answers(Expected(probe), (-1.05, -2.0))
    ''
    >>> judge_answers(Expected(probe), (-1.5, -2.0))
    'the probe (log-probabilities of fixed tokens) is off by 0.5, and 0.1 is allowed'
    >>> judge_answers(Expected(probe, baseline=0.4), (-1.5, -2.0))
    ''
    >>> judge_answers(Expected(probe, before=(-4.0, -2.0)), (-1.5, -2.0))
    ''
    >>> judge_answers(Expected(probe, before=(-1.05, -2.0)), (-1.05, -2.0))
    'its answers to the probe are those it gave before, to the last digit'
    """
    probe, before = expected.probe, expected.before
    difference = probe.difference(answers)
    if before is not None and tuple(before) == tuple(answers) and difference > CLEARLY and expected.has_moved:
        return "its answers to the probe are those it gave before, to the last digit"
    if difference <= expected.allowed:  # in this form NaN fails
        return ""
    if before is not None and difference < probe.difference(before) / 2:
        return ""
    off = f"is off by {difference:.4g}, and {expected.allowed:.4g} is allowed"
    known = f"; with equal weights it was off by {expected.baseline:.4g}" if expected.baseline else ""
    return f"the probe (log-probabilities of fixed tokens) {off}{known}"
