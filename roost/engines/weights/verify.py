"""Whether new weights took: by fingerprints where engine and learner name tensors alike, otherwise by a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.engines.protocol import Engine, UpdateFailed
from roost.engines.weights.probe import Probe

CLEARLY = 0.02  # a change of a log-probability that no engine rounds away
MARGIN = 2.0  # times the difference with equal weights: other weights round otherwise


class NotTaken(UpdateFailed):
    """Every call succeeded, and the engine still does not answer with the new weights."""


async def verify_by_fingerprints(engine: Engine, sent: Mapping[str, str]) -> bool:
    """Compare what the engine holds with what was sent; False where types differ and nothing can be compared."""
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
    """The tensors that differ, or None where the two sides cannot be compared.

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
    """The answers that an engine must give once it has new weights, and what is known to compare them with."""

    probe: Probe
    baseline: float = 0.0  # how far the engine is off with equal weights
    before: Sequence[float] | None = None  # its answers with the weights it had
    probe_before: Probe | None = None  # what the learner said of those weights

    @property
    def allowed(self) -> float:
        """Allowed log-prob error: what rounding allows, or the error with equal weights plus a margin.

        >>> Expected(Probe((1, 2), (-1.0,), tolerance=0.25), baseline=1.4).allowed
        2.8
        """
        return max(self.probe.tolerance, MARGIN * self.baseline)

    @property
    def has_moved(self) -> bool:
        """Whether the new weights clearly answer otherwise than the old ones; assumed where it is not known."""
        known = self.probe_before is not None and self.probe_before.token_ids == self.probe.token_ids
        return not known or self.probe_before is None or self.probe.difference(self.probe_before.logprobs) > CLEARLY


async def verify_by_probe(engine: Engine, expected: Expected, adapter: str | None = None) -> None:
    """Ask the engine what the learner was asked."""
    wrong = judge_answers(expected, await engine.score(expected.probe.token_ids, adapter))
    if wrong:
        raise NotTaken(f"{engine.url} does not answer with the new weights: {wrong}")


def judge_answers(expected: Expected, answers: Sequence[float]) -> str:
    """What is wrong with an engine's answers, or nothing.

    They must be as near as rounding allows, or as they were with equal weights; or, where the model is so sensitive
    that rounding alone moves them further, clearly nearer than the answers of the old weights. Answers that did not
    move at all, though those of the learner did, are the old weights' even if they are near.

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
    if difference <= expected.allowed:  # written so that not-a-number fails
        return ""
    if before is not None and difference < probe.difference(before) / 2:
        return ""
    off = f"is off by {difference:.4g}, and {expected.allowed:.4g} is allowed"
    known = f"; with equal weights it was off by {expected.baseline:.4g}" if expected.baseline else ""
    return f"the probe (log-probabilities of fixed tokens) {off}{known}"
