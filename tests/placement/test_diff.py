"""Differences of two plans, and the reason for a process's place."""

from dataclasses import fields, replace

import pytest

import roost
from roost.config.job import ModelUse
from roost.placement.diff import diff_plans
from roost.placement.explain import explain_component, explain_process


def plan(nodes=2, groups=None, **placement):
    cluster = {"num_nodes": nodes, "num_gpus_per_node": 4, "component_placement": placement}
    return roost.plan({"cluster": cluster | ({"node_groups": groups} if groups else {})})


def words(before, after):
    return [str(change) for change in diff_plans(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(plan(actor="0-3"), plan(actor="0-3"), [], id="equal"),
        pytest.param(
            plan(actor="0-3"), plan(actor="4-7"), ["actor 0-3: node 0 devices 0-3 -> node 1 devices 0-3"], id="moved"
        ),
        pytest.param(
            plan(actor="0-3"),
            plan(actor="0-5"),
            ["actor: 4 processes -> 6 processes", "actor 4-5: added, node 1 devices 0-1"],
            id="grown",
        ),
        pytest.param(
            plan(actor="0-3"),
            plan(actor="0-1,6-7"),
            ["actor 2-3: node 0 devices 2-3 -> node 1 devices 2-3"],
            id="partly-moved",
        ),
        pytest.param(
            plan(actor="all", rollout="all"),
            plan(actor="all", env="0"),
            [
                "mode: collocated -> hybrid",
                "env: added, 1 process on node 0",
                "rollout: removed, was 8 processes on nodes 0-1",
            ],
            id="added-and-removed",
        ),
        pytest.param(
            plan(nodes=1, actor="all"),
            plan(nodes=2, actor="0-3"),
            ["machines: 1 node, 4 accelerators -> 2 nodes, 8 accelerators"],
            id="machines",
        ),
    ],
)
def test_changes_in_words(before, after, expected):
    assert words(before, after) == expected


def test_an_engine_of_several_nodes_is_named_in_runs():
    """Every device of a node was listed by itself."""

    def served(nodes, sizes):
        keys = {"pretrain": "m", "num_gpus_per_node": 4, "actor_train": {"device_mapping": "0-3"}}
        keys["actor_train"]["strategy_args"] = {"strategy_name": "megatron_train"}
        args = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": sizes}}
        return roost.plan(keys | {"actor_infer": {"device_mapping": nodes, "strategy_args": args}})

    changes = words(served("list(range(0,8))", 8), served("list(range(2,8))", 6))
    assert "rollout 0: nodes 0-1 devices 0-3 of each -> node 0 devices 2-3, node 1 devices 0-3" in changes


def test_processes_that_only_change_rank_are_not_named_like_those_that_join():
    """`actor 2-3` was both added, by its new rank, and moved, by its old one."""
    changes = words(plan(actor="0-1,4-5"), plan(actor="0-5"))
    assert changes[1:] == ["actor 2-3: added, node 0 devices 2-3", "actor: ranks 2-3 -> ranks 4-5"]


def test_environment_changes():
    def groups(value):
        return [{"label": "a", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "env_vars": [{"NAME": value}]}]}]

    ranks = {"node_group": "a", "placement": "0-3"}
    before, after = (plan(groups=groups(value), actor=ranks) for value in ("x", "y"))
    assert words(before, after) == ["actor 0-3: NAME=x -> NAME=y"]


@pytest.mark.parametrize(
    ("before", "after", "subject"),
    [
        pytest.param({"memory_gb": 80}, {"memory_gb": 24}, "machines", id="memory"),
        pytest.param({"hardware": {"Franka": 1}}, {"hardware": {"Franka": 2}}, "machines", id="robots"),
    ],
)
def test_machines_of_equal_size_differ(before, after, subject):
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "all"}}}
    plans = [roost.plan(config, {"nodes": [{"accelerators": 4, **machine}]}) for machine in (before, after)]
    assert [change.subject for change in diff_plans(*plans)] == [subject]


def test_memory_settings_and_decisions_differ():
    cluster = {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor,rollout": "all"}}
    kept, offloaded = (roost.plan({"cluster": cluster, "actor": {"enable_offload": flag}}) for flag in (False, True))
    assert [change.subject for change in diff_plans(kept, offloaded)] == ["model", "residency", "residency"]


def test_isolation_differs():
    config = {"cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor": "all"}}}
    plans = [roost.plan(config, isolate_accelerator=flag) for flag in (True, False)]
    assert [change.subject for change in diff_plans(*plans)] == ["visibility"]


def test_a_saved_plan_equals_its_config():
    made = plan(actor="all", env="0:0-1")
    assert diff_plans(made, roost.Plan.from_json(made.to_json())) == ()


class TestExplain:
    def test_a_process(self):
        made = plan(actor="0-7:0-3")
        sentences = explain_process(made, made["actor"], 2)
        assert sentences[0] == "actor 2 runs on node 1 with accelerators 0-1."
        assert (
            "It was given ranks 0-7 of cluster, where a rank is an accelerator: 8 ranks for 4 processes." in sentences
        )
        assert "It sees accelerators 0, 1: only its own." in sentences

    def test_a_worker_over_two_nodes(self):
        made = roost.plan({"num_gpus_per_node": 4, "actor": {"device_mapping": "2-5", "num_gpus_per_worker": 4}})
        first = explain_process(made, made["actor"], 0)[0]
        assert first == "actor 0 runs on node 0 with accelerators 2-3, and accelerator 0 of node 1, 1 of node 1."

    def test_workers_without_devices(self):
        made = roost.plan({"num_gpus_per_node": 4, "num_nodes": 3, "rewards": {"rule": {"world_size": 4}}})
        sentences = explain_component(made, made["reward.rule"])
        assert sentences[0] == "reward.rule (rewards.rule in the config) has 4 processes on nodes 0-2."
        assert sentences[2] == "Workers without devices go to the nodes in turn: rank modulo 3."

    def test_sharing(self):
        made = plan(actor="all", rollout="0-3")
        assert "It shares 4 accelerators with actor" in explain_component(made, made["rollout"])[-1]


NOT_COMPARED = ("config", "recomputes_by_default")  # the second says where `recomputes` is from


@pytest.mark.parametrize("name", [field.name for field in fields(ModelUse) if field.name not in NOT_COMPARED])
def test_every_field_of_a_model_is_compared_where_it_is_used(name):
    config = {"component_placement": {"actor": "0-3", "rollout": "4-7"}, "num_nodes": 1, "num_gpus_per_node": 8}
    before = roost.plan({"cluster": config})
    models = [replace(part.model, **{name: "another"}) for part in before.components]
    parts = [replace(part, model=model) for part, model in zip(before.components, models, strict=True)]
    changes = diff_plans(before, replace(before, components=tuple(parts)))
    assert any(change.subject == "model" and change.after == f"{name}=another" for change in changes)


def test_a_model_that_only_the_second_plan_has_is_a_change():
    roles = {"num_gpus_per_node": 4, "actor_train": {"device_mapping": "0-3"}}
    judge = {"device_mapping": "0-3", "num_gpus_per_worker": 1}
    named = judge | {"model_args": {"model_name_or_path": "models/judge"}}
    without, with_it = (roost.plan({**roles, "rewards": {"judge": each}}) for each in (judge, named))
    assert words(without, with_it) == ["reward.judge: path=nothing -> path=models/judge"]
    assert words(with_it, without) == ["reward.judge: path=models/judge -> path=nothing"]
