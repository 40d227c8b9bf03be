"""Weight routes by intersecting devices, whatever the order of ranks."""

import json

import pytest

import roost
from roost.placement.routes import Reach, ServerRoute, WeightRoute, server_routes

SPANS = "spans several devices"
NO_HANDLES = "takes no handles of a sharded learner"


def collocated(nodes, actor_size, rollout_size, layout=None):
    config = {
        "cluster": {"num_nodes": nodes, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}},
        "actor": {"model": {"tensor_model_parallel_size": actor_size}},
        "rollout": {"tensor_parallel_size": rollout_size},
    }
    return roost.plan(config, layout=layout)


def reaches(plan):
    (engine,) = plan.routes.engines
    return {reach: engine.count(reach) for reach in Reach if engine.count(reach)}


@pytest.mark.parametrize(("actor_size", "rollout_size"), [(1, 1), (4, 2), (8, 2), (8, 4), (4, 4), (1, 8)])
def test_strided_collocated_shards_are_on_the_learner_shards_they_are_made_from(actor_size, rollout_size):
    assert reaches(collocated(2, actor_size, rollout_size)) == {Reach.SAME_DEVICE: 16}


def test_engines_larger_than_the_learner_groups_fetch_half_from_beside():
    """A quarter of a matrix lies in a half of it, but every second device holds the other half."""
    assert reaches(collocated(2, 2, 4)) == {Reach.SAME_DEVICE: 8, Reach.SAME_NODE: 8}


def test_without_the_stride_they_would_not_be():
    """The same engines, packed without the stride: half of their shards are made from another device's weights."""
    plan = roost.plan(
        {
            "num_gpus_per_node": 8,
            "actor_train": {
                "device_mapping": "0-7",
                "strategy_args": {
                    "strategy_name": "megatron_train",
                    "strategy_config": {"tensor_model_parallel_size": 4},
                },
            },
            "actor_infer": {
                "device_mapping": "0-7",
                "strategy_args": {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}},
            },
        }
    )
    assert reaches(plan) == {Reach.SAME_DEVICE: 4, Reach.SAME_NODE: 4}


def test_disaggregated_shards_take_the_nearest_learner():
    config = {
        "num_gpus_per_node": 4,
        "actor_train": {"device_mapping": "0-5"},
        "actor_infer": {"device_mapping": "6-11"},
    }
    plan = roost.plan(config)
    (engine,) = plan.routes.engines
    assert reaches(plan) == {Reach.SAME_NODE: 2, Reach.OTHER_NODE: 4}
    assert engine.sources.tolist()[:2] == [4, 5], "devices 6 and 7 are beside learners 4 and 5"
    assert len(set(engine.sources.tolist()[2:])) == 4, "the others are spread over the learners"


def test_neither_contiguity_nor_order_is_needed():
    config = {
        "num_gpus_per_node": 8,
        "actor_train": {"device_mapping": [0, 1, 2, 3, 8, 9, 10, 11]},
        "actor_infer": {"device_mapping": [11, 5, 0, 13]},
    }
    plan = roost.plan(config)
    (engine,) = plan.routes.engines
    assert [list(Reach)[index] for index in engine.reaches] == [
        Reach.SAME_DEVICE,
        Reach.SAME_NODE,
        Reach.SAME_DEVICE,
        Reach.SAME_NODE,
    ]
    assert [engine.sources[0], engine.sources[2]] == [7, 0]
    assert engine.sources[1] in range(4), "a learner on node 0"
    assert engine.sources[3] in range(4, 8), "a learner on node 1"


def test_shards_that_are_put_together_first_say_so():
    """Engines of one device take whole weights, which four pipeline stages hold in quarters."""
    stages = {"strategy_name": "megatron_train", "strategy_config": {"pipeline_model_parallel_size": 4}}
    config = {
        "num_gpus_per_node": 4,
        "actor_train": {
            "device_mapping": "0-3",
            "strategy_args": stages,
        },
        "actor_infer": {"device_mapping": "0-3", "strategy_args": {"strategy_name": "vllm"}},
    }
    (engine,) = roost.plan(config).routes.engines
    assert engine.gathered == 4
    assert engine.summary.endswith("each put together from 4 learner shards first")


@pytest.mark.parametrize(
    ("kind", "engine", "tensor", "lora", "from_disk", "reason"),
    [
        pytest.param("vllm", "0-3", 2, None, 2, SPANS, id="shared"),
        pytest.param("vllm", "0-3", 1, None, 0, "", id="one device each"),
        pytest.param("vllm", "4-7", 2, None, 0, "", id="apart"),
        pytest.param("vllm", "2-5", 2, None, 1, SPANS, id="half shared"),
        pytest.param("vllm", "0-3", 2, 8, 0, "", id="adapter"),
        pytest.param("sglang", "0-3", 1, None, 4, NO_HANDLES, id="SGLang beside a sharded learner"),
        pytest.param("sglang", "2-5", 1, None, 2, NO_HANDLES, id="SGLang half shared"),
        pytest.param("sglang", "0-3", 1, 8, 0, "", id="SGLang with an adapter"),
    ],
)
def test_the_plan_says_which_engines_read_from_disk_and_why(kind, engine, tensor, lora, from_disk, reason):
    config = {
        "num_gpus_per_node": 8,
        "actor_train": {"device_mapping": "0-3", "model_args": {"lora_rank": lora} if lora else {}},
        "actor_infer": {
            "device_mapping": engine,
            "strategy_args": {"strategy_name": kind, "strategy_config": {"tensor_parallel_size": tensor}},
        },
    }
    plan = roost.plan(config)
    (routes,) = plan.routes.engines
    assert routes.from_disk == from_disk
    assert ("from disk" in routes.summary) == bool(from_disk)
    assert routes.summary.endswith(reason)
    planned = server_routes(plan.components, plan["rollout"], kind, on_gpu=True)
    assert lora or [one.route for one in planned].count(WeightRoute.RELOAD) == from_disk


QWEN = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 512}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


@pytest.mark.parametrize(("tensor", "received"), [(1, 3 / 4), (2, 1 / 4), (4, 0)])
def test_a_rank_receives_the_rest_of_an_engine_shard(model, tensor, received):
    """It has a quarter of the weights, and an engine shard is all of them, a half or a quarter."""
    quarters = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 4}}
    shards = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": tensor}}
    config = {
        "num_gpus_per_node": 4,
        "pretrain": model,
        "actor_train": {"device_mapping": "0-3", "strategy_args": quarters},
        "actor_infer": {"device_mapping": "0-3", "strategy_args": shards},
    }
    (engine,) = roost.plan(config).routes.engines
    assert engine.gathered_bytes == engine.weight_bytes * received


@pytest.mark.parametrize(("kind", "gathered"), [("torch", 1), ("vllm", 4), ("sglang", 4)])
def test_built_in_engines_alone_map_what_ranks_write(kind, gathered):
    config = {
        "cluster": {
            "num_nodes": 1,
            "num_gpus_per_node": 4,
            "component_placement": {"actor": "0-3", "rollout": {"node_group": "hosts", "placement": "0"}},
            "node_groups": [{"label": "hosts", "node_ranks": 0, "ignore_hardware": True}],
        },
        "train": {"model": "m/m", "task": {"_target_": "a.Task"}, "engine": kind},
    }
    (engine,) = roost.plan(config, layout="as_written").routes.engines
    assert engine.gathered == gathered


# Two copies of the weights, each over 4 shards x 2 tensor.
TWO_COPIES = {
    "cluster": {
        "num_nodes": 2,
        "num_gpus_per_node": 8,
        "component_placement": {"actor": "0-15", "rollout": "0-15"},
    },
    "actor": {
        "model": {"tensor_model_parallel_size": 2},
        "training_backend": "fsdp",
        "fsdp_config": {"fsdp_size": 4},
    },
}


def test_shards_of_one_copy_are_put_together():
    """One copy is enough."""
    plan = roost.plan(TWO_COPIES, layout="as_written")
    (engine,) = plan.routes.engines
    assert engine.gathered == 8
    assert str(plan["actor"].mesh) == "2 replicate x 4 shard x 2 tensor"


def test_processes_without_accelerators_meet_on_the_host():
    config = {
        "cluster": {"num_nodes": 2, "num_gpus_per_node": 0, "component_placement": {"actor": "0", "rollout": "1:0-3"}}
    }
    assert reaches(roost.plan(config)) == {Reach.HOST: 4}


def test_a_job_without_a_learner_has_no_routes():
    config = {"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"rollout,env": "all"}}}
    assert roost.plan(config).routes.engines == ()


def plan_of(placement, nodes=1):
    inventory = roost.Inventory.from_dict({"nodes": [{"accelerators": 4, "memory_gb": 80}] * nodes})
    return roost.plan({"cluster": {"num_nodes": nodes, "component_placement": placement}}, inventory)


def routes_of(plan, kind="vllm", on_gpu=True):
    return server_routes(plan.components, plan["rollout"], kind, on_gpu)


@pytest.mark.parametrize(
    ("placement", "nodes", "on_gpu", "expected", "ranks"),
    [
        pytest.param(
            {"actor,rollout": "0-3"}, 1, True, [WeightRoute.DEVICE] * 4, [0, 1, 2, 3], id="each from its own device"
        ),
        pytest.param(
            {"actor": "0-3", "rollout": "0-3:0-1"},
            1,
            True,
            [WeightRoute.RELOAD] * 2,
            [0, 2],
            id="engines of two devices each",
        ),
        pytest.param({"actor": "0-1", "rollout": "2-3"}, 1, True, [WeightRoute.BROADCAST] * 2, [0, 0], id="apart"),
        pytest.param(
            {"actor": "0-1", "rollout": "1-2"},
            1,
            True,
            [WeightRoute.DEVICE, WeightRoute.BROADCAST],
            [1, 0],
            id="some shared, some not",
        ),
        pytest.param(
            {"actor": "0", "rollout": "0-1:0"}, 1, True, [WeightRoute.RELOAD], [0], id="one of its devices shared"
        ),
        pytest.param(
            {"actor": "0-1", "rollout": "2"}, 1, False, [WeightRoute.SHARED_MEMORY], [0], id="CPUs of one machine"
        ),
        pytest.param(
            {"actor": "0-3", "rollout": "4"}, 2, False, [WeightRoute.BROADCAST], [0], id="CPUs of two machines"
        ),
    ],
)
def test_route_and_sender_of_each_server(placement, nodes, on_gpu, expected, ranks):
    routes = routes_of(plan_of(placement, nodes), on_gpu=on_gpu)
    assert routes == tuple(map(ServerRoute, expected, ranks))


@pytest.mark.parametrize(
    ("learners", "route"), [("0", WeightRoute.DEVICE), ("0-1", WeightRoute.RELOAD)], ids=["whole", "sharded"]
)
def test_an_engine_that_takes_no_packed_handles(learners, route):
    plan = plan_of({"actor": learners, "rollout": "0"})
    assert routes_of(plan, "sglang") == (ServerRoute(route),)
