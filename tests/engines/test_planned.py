"""From a plan to what servers are started with."""

import json
from dataclasses import replace

import pytest

import roost
from roost.config.job import Role
from roost.engines.command import EngineKind, ServerSpec
from roost.engines.planned import engine_kind, plan_engines
from roost.placement.memory.residency import Decision
from roost.placement.routes import WeightRoute

DEFAULTS = ServerSpec(EngineKind.TORCH, "some/model", dtype="bfloat16", max_context=4096)
GPU = {"accelerators": 4, "accelerator_model": "H100", "memory_gb": 80}


def rlinf(placement, nodes=1, **sections):
    inventory = roost.Inventory.from_dict({"nodes": [GPU] * nodes})
    return roost.plan({"cluster": {"num_nodes": nodes, "component_placement": placement}, **sections}, inventory)


def loop(learning, inference, memory=(None, None), per_server=1):
    config = {
        "rl": {
            "gpu_allocation": {"learning_gpus": learning, "inference_gpus": inference},
            "inference_requires_memory_gb": memory[0],
            "learning_requires_memory_gb": memory[1],
        },
        "llm": {"vllm_server": {"gpus_per_vllm_server": per_server}},
    }
    return roost.plan(config, roost.Inventory.from_dict({"nodes": [GPU]}))


@pytest.mark.parametrize(
    ("plan", "decision", "route", "transfer", "sleeps", "fraction"),
    [
        pytest.param(
            rlinf({"actor": "0-1", "rollout": "2-3"}),
            Decision.KEEP,
            WeightRoute.BROADCAST,
            "nccl",
            False,
            None,
            id="apart",
        ),
        pytest.param(
            rlinf({"actor,rollout": "all"}), Decision.KEEP, WeightRoute.DEVICE, "ipc", False, None, id="together"
        ),
        pytest.param(
            rlinf(
                {"actor,rollout": "all"},
                actor={"offload_weight": True, "offload_grad": True, "offload_optimizer": True},
            ),
            Decision.SLEEP,
            WeightRoute.DEVICE,
            "ipc",
            True,
            None,
            id="in turn",
        ),
        pytest.param(
            rlinf({"actor": "0-3", "rollout": "4-7"}, nodes=2),
            Decision.KEEP,
            WeightRoute.BROADCAST,
            "nccl",
            False,
            None,
            id="on another node",
        ),
        pytest.param(
            loop([0, 1], [0, 1], (35, 35)), Decision.KEEP, WeightRoute.DEVICE, "ipc", False, 0.475, id="both fit"
        ),
        pytest.param(
            loop([0, 1], [0, 1], (75, 75)), Decision.SLEEP, WeightRoute.DEVICE, "ipc", True, None, id="do not fit"
        ),
    ],
)
def test_servers_follow_from_the_plan(plan, decision, route, transfer, sleeps, fraction):
    engines = plan_engines(plan, "rollout", DEFAULTS)
    assert engines.decision is decision
    assert {one.route for one in engines.routes} == {route}
    for rank, server in enumerate(engines.servers):
        assert server == replace(
            DEFAULTS,
            name=f"rollout-{rank}",
            kind=server.kind,
            model=server.model,
            weight_transfer=transfer,
            sleeps=sleeps,
            memory_fraction=pytest.approx(fraction) if fraction else None,
        )


def test_tensor_parallel_servers():
    engines = plan_engines(loop([0, 1], [2, 3], per_server=2), "rollout", DEFAULTS)
    assert [(server.tensor, server.pipeline) for server in engines.servers] == [(2, 1)]


def test_without_accelerators_servers_run_on_the_cpu():
    inventory = roost.Inventory.from_dict({"nodes": [{"accelerators": 0}]})
    config = {
        "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": {"node_group": "node", "placement": "0"}}}
    }
    engines = plan_engines(roost.plan(config, inventory), "rollout", DEFAULTS)
    assert [server.device for server in engines.servers] == ["cpu"]
    assert [one.route for one in engines.routes] == [WeightRoute.SHARED_MEMORY]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("vllm", EngineKind.VLLM), ("sglang", EngineKind.SGLANG), ("torch", EngineKind.TORCH), (None, EngineKind.TORCH)],
)
def test_the_strategy_names_the_engine(strategy, kind):
    assert engine_kind(strategy) is kind


def roll(strategy):
    devices = {"actor_train": [0], "actor_infer": [1]}
    roles = {role: {"device_mapping": own} for role, own in devices.items()}
    roles["actor_infer"]["strategy_args"] = {"strategy_name": strategy}
    return roost.plan({"num_gpus_per_node": 2, **roles})


@pytest.mark.parametrize("strategy", ["vllm", "sglang", "hf_infer"])
def test_an_engine_that_is_chosen_wins_over_the_strategy(strategy):
    (server,) = plan_engines(roll(strategy), "rollout", DEFAULTS, EngineKind.TORCH).servers
    assert server.kind is EngineKind.TORCH


def test_hugging_face_generation_is_an_engine():
    assert roll("hf_infer")["rollout"].role is Role.ENGINE


def test_an_engine_that_is_not_there():
    with pytest.raises(ValueError, match="vlm is not an engine of Roost; did you mean vllm"):
        engine_kind("vlm")


def test_a_component_that_is_no_engine():
    with pytest.raises(ValueError, match="actor is a learner, not an engine; engines here are rollout"):
        plan_engines(rlinf({"actor,rollout": "all"}), "actor", DEFAULTS)


@pytest.mark.parametrize(
    ("placement", "kind", "why"),
    [
        pytest.param({"actor": "0", "rollout": "0-1:0"}, EngineKind.VLLM, "it spans several devices", id="split"),
        pytest.param(
            {"actor,rollout": "0-1"}, EngineKind.SGLANG, "it takes no handles of a sharded learner", id="sharded"
        ),
        pytest.param({"actor,rollout": "0-1"}, EngineKind.VLLM, None, id="handles"),
    ],
)
def test_servers_that_read_weights_from_disk_are_named_with_the_reason(placement, kind, why):
    note = plan_engines(rlinf(placement), "rollout", DEFAULTS, kind).reload_note
    assert note.partition("; ")[0] == (f"new weights go to rollout-0 by disk: {why}" if why else "")


def test_engines_on_devices_of_their_own_keep_the_default_fraction(tmp_path):
    model = {"model_type": "qwen2", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    model |= {"intermediate_size": 4096, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(model))
    used = {"model": {"model_path": str(tmp_path)}}
    offloads = dict.fromkeys(("offload_weight", "offload_grad", "offload_optimizer"), True)
    train = {"task": {"_target_": "a.B"}, "engine_options": {"max_context": 1024}}
    plan = rlinf({"actor": "0-1", "rollout": "0-3"}, actor={**used, **offloads}, rollout=used, train=train)
    fractions = [server.memory_fraction for server in plan_engines(plan, "rollout", DEFAULTS).servers]
    assert fractions == [0.2, 0.2, None, None]
