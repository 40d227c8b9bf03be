"""What an update must keep to, so that a token's version always says which policy made it."""

from __future__ import annotations

from collections.abc import Sequence

from roost.engines.errors import NotOffered
from roost.engines.member import Member, Standing
from roost.engines.protocol import InFlight
from roost.engines.spec import EngineKind
from roost.engines.weights.release import Release


def check_version(current: Release | None, release: Release) -> None:
    """Versions grow; only the same release may be delivered again."""
    if current is not None and current is not release and release.version <= current.version:
        raise ValueError(
            f"the engines are on version {current.version}; a new policy needs a higher one than {release.version}"
        )


def check_base(members: Sequence[Member], release: Release, sleep_level: int) -> None:
    """An adapter comes on top of weights that the engine has."""
    asleep = [member.name for member in members if member.standing is Standing.ASLEEP]
    if release.adapter is not None and asleep and sleep_level > 1:
        raise NotOffered(
            f"{', '.join(asleep)}: the weights were dropped when the engines went to sleep, and an adapter does not "
            "bring them back; let engines that take adapters sleep at level 1"
        )


def check_hold(members: Sequence[Member], release: Release, in_flight: InFlight) -> None:
    """Requests may be held only where every token's version is known, and no new prompt meets an old cache."""
    if in_flight is not InFlight.HOLD:
        return
    if release.adapter is not None:
        raise NotOffered("requests on hold would go on with the adapter they had; use drop or drain")
    for member in members:
        if not member.abilities.tells_spans:
            raise NotOffered(
                f"{member.name} cannot say which tokens of a held request a version made; use drop or drain"
            )
        if member.spec.kind is EngineKind.SGLANG:
            raise NotOffered(
                f"{member.name} cannot forget what it cached with the old weights while requests are held; "
                "use drop or drain"
            )
