from types import SimpleNamespace

import pytest

from roost.engines.command import EngineKind, ServerSpec
from roost.placement.routes import ServerRoute, WeightRoute
from roost.trainer.learners import receiver_at


def test_an_engine_that_reads_from_disk_is_sent_nothing():
    with pytest.raises(LookupError, match="rollout-0 is sent no weights"):
        receiver_at("http://a", fleet_of("http://a"), {"rollout-0": ServerRoute(WeightRoute.RELOAD)})


def fleet_of(*urls):
    """A fleet with a server at each of these addresses; None is one that is lost."""
    members = {
        f"rollout-{rank}": SimpleNamespace(
            name=f"rollout-{rank}",
            is_connected=url is not None,
            engine=SimpleNamespace(url=url),
            spec=ServerSpec(EngineKind.VLLM, "model", sleeps=rank == 1, api_key="secret"),
        )
        for rank, url in enumerate(urls)
    }
    return SimpleNamespace(pool=SimpleNamespace(members=members))


def test_an_engine_is_found_by_its_address():
    routes = {"rollout-0": ServerRoute(WeightRoute.BROADCAST, 4), "rollout-1": ServerRoute(WeightRoute.DEVICE, 5)}
    found = receiver_at("http://b", fleet_of("http://a", "http://b"), routes)
    assert (found.kind, found.url, found.sleeps, found.api_key) == (EngineKind.VLLM, "http://b", True, "secret")
    assert (found.sender, found.route) == (5, WeightRoute.DEVICE)


@pytest.mark.parametrize("urls", [("http://a",), (None,), ()], ids=["another", "lost", "none"])
def test_an_address_that_nobody_has_is_named(urls):
    with pytest.raises(LookupError, match="http://b"):
        receiver_at("http://b", fleet_of(*urls), {"rollout-0": ServerRoute(WeightRoute.DEVICE)})
