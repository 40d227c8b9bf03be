"""Whether new weights took: by fingerprints where engine and learner name tensors alike, otherwise by a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roost.engines.errors import UpdateFailed
from roost.engines.protocol import Engine
from roost.engines.weights.probe import Probe

CLEARLY = 0.02  # a change of a log-probability that no engine rounds away


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


async def verify_by_probe(
    engine: Engine, probe: Probe, adapter: str | None = None, before: Sequence[float] | None = None
) -> None:
    """Ask the engine what the learner was asked; `before` is what it answered with the weights it had."""
    wrong = judge_answers(probe, await engine.score(probe.token_ids, adapter), before)
    if wrong:
        raise NotTaken(f"{engine.url} does not answer with the new weights: {wrong}")


def judge_answers(probe: Probe, answers: Sequence[float], before: Sequence[float] | None = None) -> str:
    """What is wrong with an engine's answers, or nothing.

    They must be as near as rounding allows; or, where the model is so sensitive that rounding alone moves them further,
    clearly nearer than the answers of the old weights. Answers that did not move at all, though those of the learner
    are clearly others, are the old weights' even if they are near.

    >>> probe = Probe((1, 2, 3), (-1.0, -2.0), tolerance=0.1)
    >>> judge_answers(probe, (-1.05, -2.0))
    ''
    >>> judge_answers(probe, (-1.5, -2.0))
    'a log-probability of the probe is off by 0.5, and 0.1 is allowed'
    >>> judge_answers(probe, (-1.5, -2.0), before=(-4.0, -2.0))
    ''
    >>> judge_answers(probe, (-1.05, -2.0), before=(-1.05, -2.0))
    'its answers to the probe are those it gave before, to the last digit'
    """
    difference = probe.difference(answers)
    if before is not None and tuple(before) == tuple(answers) and difference > CLEARLY:
        return "its answers to the probe are those it gave before, to the last digit"
    if difference <= probe.tolerance:  # written so that not-a-number fails
        return ""
    if before is not None and difference < probe.difference(before) / 2:
        return ""
    return f"a log-probability of the probe is off by {difference:.4g}, and {probe.tolerance:.4g} is allowed"
