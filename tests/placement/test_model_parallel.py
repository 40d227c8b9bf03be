"""The model-parallel layout: modes, sizes, strides, and what it refuses."""

import pytest

import roost

Placement = roost.ModelParallelComponentPlacement


def config(placement, nodes=1, per_node=8, actor=None, rollout=None, cluster=None, **rest):
    return {
        "cluster": {
            "num_nodes": nodes,
            "num_gpus_per_node": per_node,
            "component_placement": placement,
            **(cluster or {}),
        },
        "actor": {"model": actor or {}},
        "rollout": rollout or {},
        **rest,
    }


def tensor(size):
    return {"tensor_model_parallel_size": size}


@pytest.mark.parametrize(
    ("actor_size", "rollout_size", "expected"),
    [
        pytest.param(1, 1, [[0], [1], [2], [3], [4], [5], [6], [7]], id="1-1"),
        pytest.param(4, 2, [[0, 2], [1, 3], [4, 6], [5, 7]], id="4-2"),
        pytest.param(8, 2, [[0, 4], [1, 5], [2, 6], [3, 7]], id="8-2"),
        pytest.param(4, 1, [[0], [1], [2], [3], [4], [5], [6], [7]], id="4-1"),
        pytest.param(2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]], id="2-4"),
    ],
)
def test_collocated_strides(actor_size, rollout_size, expected):
    placement = Placement(
        config({"actor,rollout": "all"}, actor=tensor(actor_size), rollout={"tensor_parallel_size": rollout_size})
    )
    assert placement.is_collocated
    assert placement.get_strategy("rollout").hardware_ranks_list == expected
    assert placement.get_world_size("rollout") == len(expected), "the number of processes, not of accelerators"


def test_disaggregated_with_inference():
    placement = Placement(
        config(
            {"actor": "0-3", "rollout": "4-5", "inference": "6-7", "reward": "0-3"},
            rollout={"tensor_parallel_size": 2},
            algorithm={"recompute_logprobs": True},
        )
    )
    assert placement.placement_mode is roost.PlacementMode.DISAGGREGATED
    assert placement.has_dedicated_inference
    assert placement.get_world_size("rollout") == 1
    assert placement.get_world_size("inference") == 2


def test_node_groups_are_honoured():
    groups = [{"label": "a", "node_ranks": 0}, {"label": "b", "node_ranks": 1}]
    both = {"node_group": "b", "placement": "0-7"}
    placement = Placement(config({"actor": both, "rollout": both}, nodes=2, cluster={"node_groups": groups}))
    assert placement.is_collocated
    assert {p.cluster_node_rank for p in placement.get_strategy("actor").get_placement(placement.inventory)} == {1}
    apart = Placement(
        config(
            {"actor": {"node_group": "a", "placement": "0-7"}, "rollout": both},
            nodes=2,
            cluster={"node_groups": groups},
        )
    )
    assert apart.is_disaggregated, "equal ranks of different groups are different accelerators"


def test_the_same_accelerators_through_two_groups_are_collocated():
    groups = [{"label": "a", "node_ranks": 0}]
    placement = Placement(
        config({"actor": "all", "rollout": {"node_group": "a", "placement": "all"}}, cluster={"node_groups": groups})
    )
    assert placement.is_collocated


def test_reward_on_cpus_and_in_pieces():
    placement = Placement(
        config({"actor,rollout": "all", "reward": {"node_group": "node", "placement": "0:0-3"}, "reward_two": "0"})
    )
    assert placement.get_world_size("reward") == 4
    pieces = Placement(config({"actor,rollout": "all", "reward": "0,4-5"}))
    assert pieces.get_strategy("reward").hardware_ranks_list == [[0], [4], [5]]


def test_auto_scheduler():
    placement = Placement(
        config(
            {"actor": "0-1", "rollout": "2-5", "inference": "6-7", "reward": "all"},
            cluster={"auto_scheduler": True, "use_pre_process_policy": True},
            algorithm={"recompute_logprobs": True},
        )
    )
    assert placement.is_auto
    assert placement.get_world_size("actor") == 8
    assert placement.get_strategy("rollout").hardware_ranks_list == [[0], [1], [2], [3], [4], [5]]


REFUSED = [
    pytest.param(config({"actor": "all"}), "has no rollout", id="no-rollout"),
    pytest.param(config({"actor": "0-4", "rollout": "3-7"}), "share some accelerators", id="partly-shared"),
    pytest.param(config({"actor": "0-3,5", "rollout": "6-7"}), "have gaps", id="gaps"),
    pytest.param(
        config({"actor,rollout": "0-6", "inference": "7"}), "no place in the collocated mode", id="collocated-inference"
    ),
    pytest.param(
        config({"actor": "0-3", "rollout": "4-6", "inference": "7"}),
        "recompute_logprobs",
        id="inference-without-recompute",
    ),
    pytest.param(config({"actor": "0-3", "rollout": "4-7"}, actor=tensor(8)), "split over 8", id="actor-too-small"),
    pytest.param(
        config({"actor": "0-3", "rollout": "4-6"}, rollout={"tensor_parallel_size": 2}),
        "not a multiple of 2",
        id="ragged",
    ),
    pytest.param(
        config({"actor": "0-3", "rollout": "4-7"}, rollout={"tensor_parallel_size": 2, "pipeline_parallel_size": 4}),
        "not a multiple of 8",
        id="engine-larger-than-its-accelerators",
    ),
    pytest.param(
        config({"actor,rollout": "all"}, actor=tensor(4), rollout={"tensor_parallel_size": 3}),
        "not a multiple of rollout's 3",
        id="sizes-that-do-not-divide",
    ),
    pytest.param(
        config({"actor": "0-3", "rollout": "4-7", "critic": "3-4"}),
        "critic and",
        id="critic-shares",
    ),
    pytest.param(
        config({"actor": "2-5", "rollout": "0-1"}, cluster={"auto_scheduler": True}), "must start at 0", id="auto-order"
    ),
    pytest.param(config({"actor,rollout": "all"}, actor=tensor(0)), "at least 1", id="size-0"),
    pytest.param(config({"actor,rollout": "all"}, actor=tensor("two")), "whole number", id="size-is-a-word"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_refused(wrong, message):
    with pytest.raises(roost.ConfigError, match=message):
        Placement(wrong)


def test_written_process_ranks_are_not_dropped_in_silence():
    placement = Placement(config({"actor": "0-3:0-1", "rollout": "4-7"}))
    assert placement.get_world_size("actor") == 4
    assert any("process ranks of actor are not used" in warning.what for warning in placement.warnings)


@pytest.mark.parametrize(
    ("extra", "strategy"),
    [
        pytest.param({"runner": {"task_type": "reasoning"}}, "PackedPlacementStrategy", id="reasoning"),
        pytest.param({"runner": {"task_type": "embodied"}}, "FlexiblePlacementStrategy", id="embodied"),
        pytest.param({"rollout": {"tensor_parallel_size": 2}}, "PackedPlacementStrategy", id="sizes"),
        pytest.param({}, "FlexiblePlacementStrategy", id="nothing"),
    ],
)
def test_the_layout_a_config_implies(extra, strategy):
    base = config({"actor,rollout": "all"})
    plan = roost.plan({"cluster": base["cluster"], **extra})
    assert plan["rollout"].strategy == strategy
    forced = roost.plan({"cluster": base["cluster"], **extra}, layout=roost.Layout.AS_WRITTEN)
    assert forced["rollout"].strategy == "FlexiblePlacementStrategy"


def test_unknown_component():
    placement = Placement(config({"actor,rollout": "all"}))
    with pytest.raises(roost.ConfigError, match="did you mean rollout"):
        placement.get_strategy("rolout")


def test_auto_scheduler_takes_the_actors_own_inference():
    ranks = {"actor": "0-3", "rollout": "4-5", "actor_inference": "6-7"}
    placement = Placement(config(ranks, cluster={"auto_scheduler": True}, algorithm={"recompute_logprobs": True}))
    assert placement.is_auto
    assert placement.get_world_size("actor_inference") == 2


def test_a_reference_is_divided_as_its_own_section_says():
    job = {
        "cluster": {
            "num_nodes": 1,
            "num_gpus_per_node": 8,
            "component_placement": {"actor,rollout": "0-3", "reference": "4-7"},
        },
        "actor": {"model": {"context_parallel_size": 2}},
        "reference": {"model": {"tensor_model_parallel_size": 2}},
    }
    meshes = {name: str(roost.plan(job, layout="as_written")[name].mesh) for name in ("actor", "reference")}
    assert meshes == {"actor": "2 shard x 2 context", "reference": "2 shard x 2 tensor"}
