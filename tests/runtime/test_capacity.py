"""Needs of a plan on each node, and errors where a node cannot meet them, ever or at the moment."""

import pytest
from hypothesis import given, strategies as st

import roost
from roost.config.findings import Findings
from roost.runtime.checks import (
    Demand,
    Held,
    Share,
    Supply,
    accelerators_used,
    check_own_process,
    check_totals,
    demands_of,
    describe_shortage,
    nodes_used,
)


def planned(placement, nodes=2, accelerators=8, **cluster):
    cluster = {"num_nodes": nodes, "num_gpus_per_node": accelerators, "component_placement": placement} | cluster
    return roost.plan({"cluster": cluster}).components


def rows(components, cpus=None, memory=None):
    demands = demands_of(components, cpus or {}, memory or {})
    return [(demand.node, demand.accelerators, demand.cpus, demand.host_memory_gb) for demand in demands]


CPUS = {"actor": 2.0, "rollout": 1.0, "env": 0.5}
MEMORY = {"actor": 10.0}


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        pytest.param(planned({"actor": "all"}), [(0, 8, 16, 80), (1, 8, 16, 80)], id="whole-nodes"),
        pytest.param(planned({"actor,rollout": "0-3"}), [(0, 4, 12, 40)], id="shared-accelerators-count-once"),
        pytest.param(planned({"actor": "0-5", "rollout": "4-7"}), [(0, 8, 16, 60)], id="overlap"),
        pytest.param(planned({"rollout": "12-15"}), [(1, 4, 4, 0)], id="first-node-not-used"),
        pytest.param(planned({"rollout": "0-3:0-7"}), [(0, 4, 8, 0)], id="processes-share-an-accelerator"),
        pytest.param(
            planned({"env": {"node_group": "node", "placement": "0-1:0-7"}}), [(0, 0, 2, 0), (1, 0, 2, 0)], id="nodes"
        ),
        pytest.param(planned({"agent": {"node_group": "node", "placement": 0}}), [(0, 0, 0, 0)], id="needs-nothing"),
        pytest.param((), [], id="no-components"),
    ],
)
def test_demands(components, expected):
    assert rows(components, CPUS, MEMORY) == expected


def test_a_process_over_two_nodes_needs_accelerators_on_both_and_cpus_on_its_own():
    engine = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 16}}
    config = {"num_gpus_per_node": 8, "actor_infer": {"device_mapping": "0-15", "strategy_args": engine}}
    first, second = demands_of(roost.plan(config).components, {"rollout": 1}, {})
    assert (first.accelerators, first.cpus, second.accelerators, second.cpus) == (8, 1, 8, 0)
    assert second.shares == (Share("rollout", 0, 8, 1.0, 0.0),)


def test_uneven_nodes():
    inventory = roost.Inventory.from_dict({"nodes": [{"accelerators": n} for n in (0, 4, 0, 2)]})
    components = roost.plan({"actor_train": {"device_mapping": "[1, 4, 5]"}}, inventory).components
    assert {node: held.tolist() for node, held in accelerators_used(components).items()} == {1: [1], 3: [0, 1]}
    assert nodes_used(components) == [1, 3]


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=3))
def test_accelerators_are_those_of_the_rows(held):
    inventory = roost.Inventory.from_dict({"nodes": [{"accelerators": n} for n in (3, 0, 5, 8)]})
    config = {f"role{i}": {"device_mapping": str(sorted(devices))} for i, devices in enumerate(held)}
    components = roost.plan({"actor_train": config.pop("role0"), **config}, inventory).components
    from_rows = {device for part in components for row in part.table for device in row.devices}
    used = accelerators_used(components)
    assert {(node, int(index)) for node in used for index in used[node]} == from_rows
    assert sum(demand.accelerators for demand in demands_of(components, {}, {})) == len(from_rows)


def supply(node=1, accelerators=(8, 8), cpus=(64, 64), memory=(256, 256)):
    return Supply(node, "10.0.0.2 (beta)", "GPU", *accelerators, *cpus, *memory)


ENV, ACTOR = Share("env", 16, 0, 2, 4), Share("actor", 8, 8, 1, 32)


@pytest.mark.parametrize(
    ("demand", "there", "expected"),
    [
        pytest.param(Demand(1, 8, 40, 200, (ENV, ACTOR)), supply(), [], id="fits"),
        pytest.param(Demand(1, 8, 64.00005, 256.00005), supply(), [], id="rounding"),
        pytest.param(
            Demand(1, 12, 0, 0, (Share("actor", 12, 12, 0, 0),)),
            supply(),
            [("node 1, 10.0.0.2 (beta), has 8 accelerators, the plan needs 12 there", "actor 12")],
            id="accelerators",
        ),
        pytest.param(
            Demand(1, 2, 0, 0, (Share("actor", 2, 2, 0, 0), Share("rollout", 2, 2, 0, 0))),
            supply(accelerators=(1, 1)),
            [
                (
                    "node 1, 10.0.0.2 (beta), has 1 accelerator, the plan needs 2 there",
                    "actor 2, rollout 2; one that several hold counts once",
                )
            ],
            id="shared-accelerators",
        ),
        pytest.param(
            Demand(1, 8, 40, 0, (ENV, ACTOR)),
            supply(cpus=(24.5, 24.5)),
            [
                (
                    "node 1, 10.0.0.2 (beta), has 24.5 CPUs, the plan needs 40 there",
                    "env 16 x 2 = 32 CPUs, actor 8 x 1 = 8 CPUs",
                )
            ],
            id="cpus",
        ),
        pytest.param(
            Demand(1, 8, 0, 320, (ENV, ACTOR)),
            supply(memory=(187.96871, 0)),
            [
                (
                    "node 1, 10.0.0.2 (beta), has 187.9 GB of host memory, the plan needs 320 there",
                    "env 16 x 4 = 64 GB, actor 8 x 32 = 256 GB",
                )
            ],
            id="memory",
        ),
    ],
)
def test_totals(demand, there, expected):
    findings = Findings()
    check_totals([demand], [supply(0), there], findings, "job.yaml")
    assert [(finding.what, finding.why) for finding in findings.errors] == expected
    assert all(finding.fix and finding.where.file == "job.yaml" for finding in findings.errors)


def test_all_that_is_short_is_found_at_once():
    findings = Findings()
    demands = [Demand(node, 9, 65, 257, (ENV, ACTOR)) for node in range(3)]
    check_totals(demands, [supply(node) for node in range(3)], findings)
    assert len(findings.errors) == 9


@pytest.mark.parametrize(
    ("demand", "held", "expected"),
    [
        pytest.param(Demand(1, 4, 0, 0), [Held(1, 4, 0, 0, ("actor",))], [], id="enough-is-left"),
        pytest.param(Demand(1, 4, 0, 0), [Held(0, 8, 0, 0, ("actor",))], [], id="held-on-another-node"),
        pytest.param(Demand(1, 9, 0, 0), [Held(1, 8, 0, 0, ("actor",))], [], id="more-than-there-is-anyway"),
        pytest.param(
            Demand(1, 1, 0, 0),
            [Held(1, 5, 0, 0, ("rollout",)), Held(1, 3, 0, 0, ("actor", "rollout"))],
            [("1 accelerator needed, 8 of 8 held", "actor, rollout")],
            id="several-holdings",
        ),
        pytest.param(
            Demand(1, 8, 60, 0),
            [Held(1, 1, 8, 0, ("env",))],
            [("8 accelerators needed, 1 of 8 held", "env"), ("60 CPUs needed, 8 of 64 held", "env")],
            id="all-at-once",
        ),
    ],
)
def test_what_this_process_holds_itself(demand, held, expected):
    findings = Findings()
    check_own_process([demand], [supply(accelerators=(8, 0))], held, findings)
    assert [(finding.what, finding.why) for finding in findings.errors] == [
        (f"node 1, 10.0.0.2 (beta): {what} by another Cluster of this process", f"it holds them for {groups}")
        for what, groups in expected
    ]


@pytest.mark.parametrize(
    ("demands", "supplies", "expected"),
    [
        pytest.param([Demand(1, 8, 8, 8)], [supply()], "", id="free"),
        pytest.param([], [supply()], "", id="nothing-needed"),
        pytest.param(
            [Demand(1, 8, 0, 0)],
            [supply(accelerators=(8, 2))],
            "node 1, 10.0.0.2 (beta): 8 accelerators needed, 2 of 8 free",
            id="accelerators",
        ),
        pytest.param(
            [Demand(1, 1, 1, 16.5)],
            [supply(accelerators=(8, 0), cpus=(64, 0.5), memory=(256, 4.25))],
            "node 1, 10.0.0.2 (beta): 1 accelerator needed, 0 of 8 free, 1 CPU needed, 0.5 of 64 free, "
            "16.5 GB of host memory needed, 4.2 of 256 free",
            id="everything",
        ),
        pytest.param(
            [Demand(0, 8, 0, 0), Demand(1, 8, 0, 0)],
            [supply(0), supply(1, accelerators=(8, 7))],
            "node 1, 10.0.0.2 (beta): 8 accelerators needed, 7 of 8 free",
            id="only-the-busy-node",
        ),
    ],
)
def test_describe_shortage(demands, supplies, expected):
    assert describe_shortage(demands, supplies) == expected


def test_a_large_busy_cluster_is_one_sentence():
    demands = [Demand(node, 8, 0, 0) for node in range(100)]
    sentence = describe_shortage(demands, [supply(node, accelerators=(8, 0)) for node in range(100)])
    assert sentence.endswith("; and 92 more nodes")
