"""Plans that change while their job runs: engines join and leave, and nodes are lost."""

import json
import random
from itertools import combinations

import pytest

import roost
from roost.placement.diff import diff_plans
from roost.placement.draft import Draft
from roost.placement.plan import Plan
from roost.placement.rescale import _finished, scaled, without_nodes


def plan_of(placement, nodes=2, accelerators=4, groups=(), **more):
    cluster = {"num_nodes": nodes, "num_gpus_per_node": accelerators, "component_placement": placement}
    if groups:
        cluster["node_groups"] = list(groups)
    return roost.plan({"cluster": cluster, **more})


def places(plan, name):
    return [(process.cluster_node_rank, tuple(index for _, index in process.devices)) for process in plan[name].table]


TENSOR = {"rollout": {"tensor_parallel_size": 2}, "runner": {"task_type": "reasoning"}}


# Scaling ----------------------------------------------------------------------------------------------------------


def test_engines_join_on_the_first_free_devices_and_all_others_stay():
    before = plan_of({"actor": "0-1", "rollout": "2-3"})
    change = scaled(before, {"rollout": 3})
    assert places(change.plan, "rollout") == [(0, (2,)), (0, (3,)), (1, (0,)), (1, (1,)), (1, (2,))]
    assert change.added == (("rollout", 2), ("rollout", 3), ("rollout", 4)) and not change.removed
    assert change.kept == {("actor", 0): 0, ("actor", 1): 1, ("rollout", 0): 0, ("rollout", 1): 1}
    assert not change.needs_relaunch
    assert change.plan["rollout"].hardware_ranks.tolist() == [2, 3, 4, 5, 6]
    assert len(change.plan.routes.engines[0].processes) == 5


def test_a_new_engine_has_as_many_devices_as_the_others_on_one_node():
    before = plan_of({"actor": "0", "rollout": "1-2:0"}, nodes=2, accelerators=4)
    assert places(before, "rollout") == [(0, (1, 2))]
    change = scaled(before, {"rollout": 2})
    assert places(change.plan, "rollout") == [(0, (1, 2)), (1, (0, 1)), (1, (2, 3))]  # not device 3 of node 0


def test_the_highest_ranks_leave_unless_others_are_named():
    before = plan_of({"actor": "0", "rollout": "1-3"})
    last, first = scaled(before, {"rollout": -1}), scaled(before, {"rollout": -1}, {"rollout": [0]})
    assert last.removed == (("rollout", 2),) and first.removed == (("rollout", 0),)
    assert places(first.plan, "rollout") == [(0, (2,)), (0, (3,))]
    assert first.kept["rollout", 2] == 1


def test_in_and_out_gives_the_first_plan_back():
    before = plan_of({"actor": "0", "rollout": "1-3"})
    change = scaled(before, {"rollout": 2})
    assert scaled(change.plan, {"rollout": -2}).plan == before
    assert Plan.from_json(change.plan.to_json()) == change.plan


def test_engines_without_devices_go_to_the_node_with_the_fewest():
    groups = [{"label": "hosts", "node_ranks": "0-1", "ignore_hardware": True}]
    before = plan_of({"actor": "0", "rollout": {"node_group": "hosts", "placement": "0:0-1,1:2"}}, groups=groups)
    assert [node for node, _ in places(scaled(before, {"rollout": 2}).plan, "rollout")] == [0, 0, 1, 1, 0]


def test_engines_stay_in_their_node_group():
    groups = [{"label": "big", "node_ranks": "0"}, {"label": "small", "node_ranks": "1"}]
    placement = {"actor": {"node_group": "big", "placement": "0"}, "rollout": {"node_group": "small", "placement": "0"}}
    before = plan_of(placement, groups=groups)
    assert places(scaled(before, {"rollout": 3}).plan, "rollout")[1:] == [(1, (1,)), (1, (2,)), (1, (3,))]
    with pytest.raises(roost.ConfigError, match=r"no room for 4 more\n.*free are 3 on node 1\n"):
        scaled(before, {"rollout": 4})


REFUSED = {
    "a learner": ({"actor": 1}, None, "is a learner; only engines join or leave"),
    "a worker": ({"env": 1}, None, "is a helper; only engines join or leave"),
    "no component": ({"rolout": 1}, None, "there is no component rolout"),
    "the last engine": ({"rollout": -2}, None, "cannot lose 2 of 2 engines"),
    "an engine that is not there": ({"rollout": -1}, {"rollout": [5]}, "named are [5]"),
    "more than there is room for": ({"rollout": 9}, None, "there is no room for 9 more"),
}


@pytest.mark.parametrize(("changes", "leaving", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_changes_say_why(changes, leaving, message):
    before = plan_of({"actor": "0", "rollout": "1-2", "env": "0"})
    with pytest.raises(roost.ConfigError) as refused:
        scaled(before, changes, leaving)
    assert message in str(refused.value)


# Lost nodes -------------------------------------------------------------------------------------------------------


def test_engines_of_a_lost_node_take_free_devices_and_the_rest_is_dropped():
    change = without_nodes(plan_of({"actor": "0-1", "rollout": "2,4-6"}), [1])
    assert places(change.plan, "rollout") == [(0, (2,)), (0, (3,))]
    assert change.moved == {("rollout", 1): 1} and not change.needs_relaunch
    assert change.removed == (("rollout", 1), ("rollout", 2), ("rollout", 3)) and change.added == (("rollout", 1),)
    assert change.plan.inventory.nodes[1].lost and change.plan.inventory.num_nodes == 2
    assert Plan.from_json(change.plan.to_json()) == change.plan


def test_nodes_keep_their_ranks():
    change = without_nodes(plan_of({"actor": "4-5", "rollout": "0-1,8-9"}, nodes=3), [0])
    assert places(change.plan, "actor") == [(1, (0,)), (1, (1,))]
    assert places(change.plan, "rollout") == [(1, (2,)), (1, (3,)), (2, (0,)), (2, (1,))]
    assert change.plan["rollout"].hardware_ranks.tolist() == [6, 7, 8, 9]


def test_learners_take_free_devices_with_all_that_shared_them():
    change = without_nodes(plan_of({"actor,rollout": "0-3"}), [0])
    assert places(change.plan, "actor") == places(change.plan, "rollout") == [(1, (index,)) for index in range(4)]
    assert change.needs_relaunch and change.plan.mode is change.before.mode


def test_learners_take_devices_of_engines_if_none_is_free():
    change = without_nodes(plan_of({"actor": "0-1", "rollout": "2-7"}), [0])
    assert places(change.plan, "actor") == [(1, (2,)), (1, (3,))]
    assert places(change.plan, "rollout") == [(1, (0,)), (1, (1,))]
    assert change.needs_relaunch


def test_learners_get_fewer_processes_if_nothing_else_helps():
    change = without_nodes(plan_of({"actor": "0-3,4-5", "rollout": "6-7"}), [0])
    assert places(change.plan, "actor") == [(1, (3,)), (1, (0,)), (1, (1,))]
    assert places(change.plan, "rollout") == [(1, (2,))]
    assert change.plan["actor"].world_size == 3


def mixture(expert, folder=None):
    """A learner of 16 processes, of a mixture whose experts are divided over so many."""
    model = {"expert_model_parallel_size": expert}
    if folder is not None:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
        config = {"model_type": "qwen3_moe", "vocab_size": 128, "head_dim": 16, **sizes, **experts}
        (folder / "config.json").write_text(json.dumps(config))
        model["model_path"] = str(folder)
    return plan_of({"actor,rollout": "0-15"}, nodes=4, actor={"model": model}, runner={"task_type": "reasoning"})


def test_learners_get_as_many_processes_as_expert_groups_divide():
    before = mixture(8)
    assert before["actor"].parallel.expert == 8
    assert without_nodes(before, [3]).plan["actor"].world_size == 8  # not 12
    assert without_nodes(mixture(4), [3]).plan["actor"].world_size == 12
    with pytest.raises(roost.ConfigError, match=r"nothing is left of actor \(16 processes\)"):
        without_nodes(before, [1, 2, 3])


def test_learners_get_as_many_processes_as_divide_the_rows_of_experts(tmp_path):
    """12 processes would shard the 64 rows of an expert over 3."""
    assert without_nodes(mixture(4, tmp_path), [3]).plan["actor"].world_size == 8


def test_a_change_to_processes_without_a_mesh_is_refused():
    draft = Draft(mixture(8), mixture(8).inventory)
    draft.remove([("actor", rank) for rank in range(12, 16)])
    with pytest.raises(roost.ConfigError, match="copies of 12 ranks cannot be divided into expert groups of 8"):
        _finished(draft)


def test_workers_without_devices_move_to_the_other_nodes():
    groups = [{"label": "hosts", "node_ranks": "0-1", "ignore_hardware": True}]
    placement = {"actor": "0", "rollout": "1", "env": {"node_group": "hosts", "placement": "0-1:0-3"}}
    change = without_nodes(plan_of(placement, groups=groups), [1])
    assert [node for node, _ in places(change.plan, "env")] == [0, 0, 0, 0]
    assert len(change.moved) == 2 and not change.needs_relaunch


def test_a_robot_is_lost_with_its_node():
    robots = [{"robot_ip": f"10.0.0.{node}", "node_rank": node} for node in (1, 2)]
    groups = [{"label": "arms", "node_ranks": "1-2", "hardware": {"type": "Franka", "configs": robots}}]
    placement = {"actor": "0", "rollout": "1", "env": {"node_group": "arms", "placement": "0-1"}}
    before = plan_of(placement, nodes=3, groups=groups)
    assert places(without_nodes(before, [1]).plan, "env") == [(2, (0,))]
    with pytest.raises(roost.ConfigError, match=r"nothing is left of env \(2 processes\)"):
        without_nodes(before, [1, 2])


def test_a_plan_that_does_not_fit_says_what_is_missing():
    with pytest.raises(roost.ConfigError) as refused:
        without_nodes(plan_of({"actor": "0-3", "rollout": "4-7"}, nodes=2), [0, 1])
    assert "does not fit without nodes 0-1" in str(refused.value)
    assert "nothing is left of actor (4 processes), rollout (4 processes), and the other nodes have 0 free" in str(
        refused.value
    )


def test_the_difference_reads_well():
    change = without_nodes(plan_of({"actor": "0-1", "rollout": "2-4"}, nodes=3, accelerators=2), [1])
    assert change.lines() == [
        "node 1 lost",
        "rollout: 3 -> 2 processes",
        "rollout 0: node 1 device 0 -> node 2 device 1",
        "rollout 1: removed from node 1 device 1",
        "rollout 2: now 1",
    ]
    assert [str(line) for line in diff_plans(change.before, change.plan)] == [
        "machines: 3 nodes, 6 accelerators -> 2 nodes, 4 accelerators (node 1 lost)",
        "rollout: 3 processes -> 2 processes",
        "rollout 0: node 1 devices 0 -> node 2 devices 1",
        "rollout 1: removed, was node 1 devices 1",
        "rollout: rank 2 -> rank 1",
    ]


# Against all placements -------------------------------------------------------------------------------------------


def least_cost(plan, lost):
    """The least (learners missing, processes elsewhere than before, processes dropped) of all placements.

    Each process is tried on every set of devices of a node that is left, also on those of processes that it shared
    devices with before; None if no placement has a learner and one engine of each kind.
    """
    left = [node for node in range(plan.inventory.num_nodes) if node not in lost]
    processes = [
        (part.name, part.role.value == "learner", row.cluster_node_rank not in lost, tuple(row.devices))
        for part in sorted(plan.components, key=lambda part: part.role.value != "learner")
        for row in part.table
    ]
    sharers = [
        {other for other, (*_, theirs) in enumerate(processes) if set(theirs) & set(devices)}
        for *_, devices in processes
    ]
    best = None

    def visit(index, users, cost, count):
        nonlocal best
        if best is not None and cost >= best:
            return
        if index == len(processes):
            if all(count.get(part.name) for part in plan.components):
                best = cost
            return
        name, learns, survives, devices = processes[index]
        missing, elsewhere, dropped = cost
        more = {**count, name: count.get(name, 0) + 1}

        def is_free(device):
            return users.get(device, set()) <= sharers[index]

        def with_it(chosen):
            return {**users, **{device: users.get(device, set()) | {index} for device in chosen}}

        if survives and all(map(is_free, devices)):
            visit(index + 1, with_it(devices), cost, more)
        for node in left:
            free = [(node, at) for at in range(plan.inventory.nodes[node].accelerators) if is_free((node, at))]
            for chosen in combinations(free, len(devices)):
                if chosen != devices:
                    visit(index + 1, with_it(chosen), (missing, elsewhere + survives, dropped), more)
        visit(index + 1, users, (missing + learns, elsewhere + survives, dropped + (not learns)), count)

    visit(0, {}, (0, 0, 0), {})
    return best


def random_plan(chance):
    """A small plan whose components share no device: a learner, engines of one or two devices, sometimes a judge."""
    nodes, accelerators = chance.choice([(2, 2), (2, 3), (3, 2), (2, 4)])
    free = [(node, at) for node in range(nodes) for at in range(accelerators)]
    size = chance.choice([1, 1, 2])
    placement, config = {}, []
    for name, each, most in (("actor_train", 1, 3), ("actor_infer", size, 3), ("rewards", 1, 2)):
        chosen = []
        for _ in range(chance.randint(1, most)):
            node = chance.randrange(nodes)
            there = [device for device in free if device[0] == node][:]
            chance.shuffle(there)
            if len(there) >= each:
                chosen += sorted(there[:each])
                free = [device for device in free if device not in there[:each]]
        placement[name] = [node * accelerators + at for node, at in chosen]
        config.append((name, each))
    if not placement["actor_train"] or not placement["actor_infer"]:
        return None
    job = {"num_gpus_per_node": accelerators, "actor_train": {"device_mapping": str(placement["actor_train"])}}
    strategy = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": size}}
    job["actor_infer"] = {"device_mapping": str(placement["actor_infer"]), "strategy_args": strategy}
    if placement["rewards"] and chance.random() < 0.5:
        judge = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 1}}
        job["rewards"] = {"judge": {"device_mapping": str(placement["rewards"]), "strategy_args": judge}}
    return roost.plan(job, {"nodes": [{"accelerators": accelerators, "count": nodes}]})


def random_shared_plan(chance):
    """A small plan whose learners and engines share some devices or all; an engine has one or two."""
    nodes, accelerators = chance.choice([(2, 2), (2, 3), (3, 2)])
    devices = [(node, at) for node in range(nodes) for at in range(accelerators)]
    learners, engines = sorted(chance.sample(devices, chance.randint(1, 3))), []
    size = chance.choice([1, 1, 2])
    for _ in range(chance.randint(1, 3)):
        node = chance.randrange(nodes)
        there = [device for device in devices if device[0] == node and device not in engines]
        engines += sorted(chance.sample(there, size)) if len(there) >= size else []
    if not set(engines) & set(learners):
        return None
    train, infer = ([node * accelerators + at for node, at in some] for some in (learners, engines))
    strategy = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": size}}
    job = {
        "num_gpus_per_node": accelerators,
        "actor_train": {"device_mapping": str(train)},
        "actor_infer": {"device_mapping": str(infer), "strategy_args": strategy},
    }
    return roost.plan(job, {"nodes": [{"accelerators": accelerators, "count": nodes}]})


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))])
@pytest.mark.parametrize("make", [random_plan, random_shared_plan], ids=["apart", "shared"])
def test_no_placement_moves_or_drops_fewer(make, part):
    chance = random.Random(part)
    compared = 0
    while compared < 75:
        before = make(chance)
        if before is None:
            continue
        lost = [chance.randrange(before.inventory.num_nodes)]
        compared += 1
        expected = least_cost(before, lost)
        try:
            change = without_nodes(before, lost)
        except roost.ConfigError:
            assert expected is None, (lost, [places(before, part.name) for part in before.components])
            continue
        after = {part.name: part.world_size for part in change.plan.components}
        missing = before["actor"].world_size - after["actor"]
        survivors = [
            (name, rank) for name, rank in change.removed if before[name].table[rank].cluster_node_rank not in lost
        ]
        dropped = sum(before[name].world_size - size for name, size in after.items() if name != "actor")
        assert (missing, len(survivors), dropped) == expected, (lost, change.lines())
