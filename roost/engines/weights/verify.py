"""Whether new weights took: by fingerprints where engine and learner name tensors alike, otherwise by a probe."""

from __future__ import annotations

from collections.abc import Mapping

from roost.engines.errors import UpdateFailed
from roost.engines.protocol import Engine
from roost.engines.weights.probe import Probe


async def verify_by_fingerprints(engine: Engine, sent: Mapping[str, str]) -> bool:
    """Compare what the engine holds with what was sent; False where types differ and nothing can be compared."""
    held = await engine.fingerprints()
    verdict = compare_fingerprints(sent, held)
    if verdict is None:
        return False
    if verdict:
        raise UpdateFailed(
            f"{engine.url} holds other weights than were sent: {len(verdict)} of {len(sent)} tensors differ, such as "
            f"{verdict[0]}"
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


async def verify_by_probe(engine: Engine, probe: Probe, adapter: str | None = None) -> float:
    """Ask the engine what the learner was asked; how far apart they are."""
    difference = probe.difference(await engine.score(probe.token_ids, adapter))
    if not difference <= probe.tolerance:  # written so that not-a-number fails
        raise UpdateFailed(
            f"{engine.url} does not answer with the new weights: a log-probability of the probe is off by "
            f"{difference:.4g}, and {probe.tolerance:.4g} is allowed"
        )
    return difference
