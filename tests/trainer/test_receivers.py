from types import SimpleNamespace

import pytest

import roost
from roost.engines.command import EngineKind, ServerSpec
from roost.engines.weights.release import Way
from roost.trainer.learners import Sending, plan_sending, receiver_at


def plan_of(placement, nodes=1):
    inventory = roost.Inventory.from_dict({"nodes": [{"accelerators": 4, "memory_gb": 80}] * nodes})
    return roost.plan({"cluster": {"num_nodes": nodes, "component_placement": placement}}, inventory)


@pytest.mark.parametrize(
    ("placement", "nodes", "on_gpu", "ways", "ranks"),
    [
        pytest.param({"actor,rollout": "0-3"}, 1, True, [Way.DEVICE] * 4, [0, 1, 2, 3], id="each from its own device"),
        pytest.param(
            {"actor": "0-3", "rollout": "0-3:0-1"}, 1, True, [None, None], [0, 2], id="engines of two devices each"
        ),
        pytest.param({"actor": "0-1", "rollout": "2-3"}, 1, True, [Way.BROADCAST] * 2, [0, 0], id="apart"),
        pytest.param(
            {"actor": "0-1", "rollout": "1-2"}, 1, True, [Way.DEVICE, Way.BROADCAST], [1, 0], id="some shared, some not"
        ),
        pytest.param({"actor": "0", "rollout": "0-1:0"}, 1, True, [None], [0], id="one of its devices shared"),
        pytest.param({"actor": "0-1", "rollout": "2"}, 1, False, [Way.SHARED_MEMORY], [0], id="CPUs of one machine"),
        pytest.param({"actor": "0-3", "rollout": "4"}, 2, False, [Way.BROADCAST], [0], id="CPUs of two machines"),
    ],
)
def test_who_sends_to_whom(placement, nodes, on_gpu, ways, ranks):
    sending = plan_sending(plan_of(placement, nodes), "rollout", "actor", EngineKind.VLLM, on_gpu)
    names = [f"rollout-{rank}" for rank in range(len(ranks))]
    assert sending == Sending(dict(zip(names, ways, strict=True)), dict(zip(names, ranks, strict=True)))


@pytest.mark.parametrize(("learners", "way"), [("0", Way.DEVICE), ("0-1", None)], ids=["whole", "sharded"])
def test_sglang_takes_no_packed_handles(learners, way):
    plan = plan_of({"actor": learners, "rollout": "0"})
    assert plan_sending(plan, "rollout", "actor", EngineKind.SGLANG, True).ways == {"rollout-0": way}


def test_an_engine_that_reads_from_disk_is_sent_nothing():
    with pytest.raises(LookupError, match="rollout-0 is sent no weights"):
        receiver_at("http://a", fleet_of("http://a"), Sending({"rollout-0": None}, {"rollout-0": 0}))


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
    return SimpleNamespace(crew=SimpleNamespace(members=members))


def test_an_engine_is_found_by_its_address():
    sending = Sending({"rollout-0": Way.BROADCAST, "rollout-1": Way.DEVICE}, {"rollout-0": 4, "rollout-1": 5})
    found = receiver_at("http://b", fleet_of("http://a", "http://b"), sending)
    assert (found.kind, found.url, found.sleeps, found.api_key) == (EngineKind.VLLM, "http://b", True, "secret")
    assert (found.sender, found.way) == (5, Way.DEVICE)


@pytest.mark.parametrize("urls", [("http://a",), (None,), ()], ids=["another", "lost", "none"])
def test_an_address_that_nobody_has_is_named(urls):
    with pytest.raises(LookupError, match="http://b"):
        receiver_at("http://b", fleet_of(*urls), Sending({"rollout-0": Way.DEVICE}, {"rollout-0": 0}))
