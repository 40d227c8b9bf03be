"""A plan against the live nodes: who takes whose part, and what is no longer as planned."""

from itertools import permutations

import pytest

import roost
from roost.config.findings import Findings
from roost.runtime.checks import NOT_USED, check_plan

H100 = {"accelerators": 8, "accelerator_model": "H100", "memory_gb": 80}


def machines(*nodes):
    return roost.Inventory.from_dict({"nodes": list(nodes)})


def hosts(*names, **fields):
    return machines(*({"accelerators": 8, **fields} | ({"host": name} if name else {}) for name in names))


def planned(inventory, devices="0-15"):
    return roost.plan({"actor_train": {"device_mapping": devices}}, inventory)


def checked(plan, live):
    findings = Findings()
    return check_plan(plan, live, findings), findings


TWO = hosts("alpha", "beta")
TWO_NAMELESS = hosts("", "")


@pytest.mark.parametrize(
    ("plan", "live", "expected"),
    [
        pytest.param(planned(TWO), TWO, (0, 1), id="same"),
        pytest.param(planned(TWO), hosts("beta", "alpha"), (1, 0), id="restarted-in-another-order"),
        pytest.param(planned(TWO), hosts("gamma", "beta", "alpha"), (2, 1), id="more-nodes"),
        pytest.param(planned(TWO_NAMELESS), TWO, (0, 1), id="plan-without-hosts"),
        pytest.param(planned(TWO_NAMELESS), TWO_NAMELESS, (0, 1), id="no-hosts"),
        pytest.param(planned(hosts("a", "a")), hosts("a", "a"), (0, 1), id="two-nodes-of-a-machine"),
        pytest.param(planned(TWO, "8-15"), hosts("beta"), (NOT_USED, 0), id="node-not-used-need-not-be-there"),
        pytest.param(planned(TWO_NAMELESS, "0-7"), hosts(""), (0, NOT_USED), id="last-node-not-used"),
        pytest.param(planned(TWO, "0-3,8-11"), hosts("alpha", "beta", accelerators=4), (0, 1), id="unused-gone"),
        pytest.param(planned(TWO), hosts("alpha", "beta", accelerators=16), (0, 1), id="more-accelerators"),
        pytest.param(
            planned(machines(H100), "0-7"),
            machines({**H100, "accelerator_model": "NVIDIA H100 80GB HBM3", "memory_gb": 79.6}),
            (0,),
            id="as-the-driver-calls-it",
        ),
        pytest.param(planned(machines(H100), "0-7"), machines({"accelerators": 8}), (0,), id="nothing-known"),
    ],
)
def test_matched_without_findings(plan, live, expected):
    matched, findings = checked(plan, live)
    assert matched == expected
    assert not findings.found


@pytest.mark.parametrize("names", list(permutations(["alpha", "beta", "gamma"])), ids="-".join)
def test_a_saved_plan_survives_any_order_of_its_nodes(names):
    plan = roost.Plan.from_json(planned(hosts("alpha", "beta", "gamma"), "0-23").to_json())
    matched, _ = checked(plan, hosts(*names))
    assert [names[rank] for rank in matched] == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize(
    ("plan", "live", "what"),
    [
        pytest.param(
            planned(TWO),
            hosts("alpha", "gamma"),
            "the plan uses hosts that are not in the cluster: beta",
            id="host-gone",
        ),
        pytest.param(
            planned(TWO), hosts("beta"), "the plan uses hosts that are not in the cluster: alpha", id="host-missing"
        ),
        pytest.param(
            planned(TWO_NAMELESS), hosts("alpha"), "the plan uses 2 nodes (0-1), the cluster has 1 node", id="too-few"
        ),
        pytest.param(
            planned(TWO),
            hosts("alpha", "beta", accelerators=7),
            "alpha has 7 accelerators, the plan uses 0-7 there",
            id="fewer",
        ),
        pytest.param(
            planned(TWO, "4-7"),
            hosts("alpha", accelerators=4),
            "alpha has 4 accelerators, the plan uses 4-7 there",
            id="last-gone",
        ),
        pytest.param(
            planned(hosts(""), "0-7"),
            hosts("", accelerators=0),
            "live node 0 has 0 accelerators, the plan uses 0-7 there",
            id="none",
        ),
        pytest.param(
            planned(hosts("a"), "0-7"),
            hosts("a", accelerator_type="NPU"),
            "a has accelerators of type NPU, the plan is for NV_GPU",
            id="type",
        ),
    ],
)
def test_errors(plan, live, what):
    matched, findings = checked(plan, live)
    assert matched is None
    assert findings.errors[0].what == what
    assert not findings.warnings


@pytest.mark.parametrize(
    ("plan", "live", "expected", "what"),
    [
        pytest.param(
            planned(TWO),
            hosts("gamma", "delta"),
            (0, 1),
            "nodes are matched by rank, and 2 hosts differ: alpha is now gamma, beta is now delta",
            id="other-machines",
        ),
        pytest.param(
            planned(hosts("alpha", "")),
            hosts("beta", "alpha"),
            (0, 1),
            "nodes are matched by rank, and 1 host differs: alpha is now beta",
            id="one-host-written",
        ),
        pytest.param(
            planned(TWO),
            hosts("beta", "beta", "alpha"),
            (0, 1),
            "nodes are matched by rank, and 1 host differs: alpha is now beta",
            id="host-twice-in-the-cluster",
        ),
        pytest.param(
            planned(machines(H100), "0-7"),
            machines({**H100, "accelerator_model": "H200"}),
            (0,),
            "live node 0 has H200, the plan is for H100",
            id="model",
        ),
        pytest.param(
            planned(machines(H100), "0-7"),
            machines({**H100, "memory_gb": 40}),
            (0,),
            "live node 0 has accelerators of 40.0 GB, the plan is for 80.0 GB",
            id="memory",
        ),
    ],
)
def test_warnings(plan, live, expected, what):
    matched, findings = checked(plan, live)
    assert matched == expected
    assert [finding.what for finding in findings.found] == [what]


def test_findings_name_the_file_and_the_node_of_the_plan(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("num_gpus_per_node: 8\nactor_train: {device_mapping: '8-15'}\n")
    _, findings = checked(roost.plan(file), machines({"accelerators": 8}, {"accelerators": 4}))
    assert str(findings.errors[0].where) == f"{file} node[1]"


def test_robots_are_declared_and_need_no_more_than_their_node():
    config = {
        "cluster": {
            "num_nodes": 2,
            "num_gpus_per_node": 8,
            "node_groups": [
                {
                    "label": "arm",
                    "node_ranks": 1,
                    "hardware": {"type": "Franka", "configs": [{"robot_ip": "10.1.0.1", "node_rank": 1}]},
                }
            ],
            "component_placement": {"actor": "0-7", "env": {"node_group": "arm", "placement": 0}},
        }
    }
    plan = roost.plan(config)
    assert checked(plan, machines({"accelerators": 8}, {"accelerators": 0}))[0] == (0, 1)
    assert checked(plan, machines({"accelerators": 8}))[0] is None


def test_nodes_that_are_known_are_not_matched_again():
    plan = planned(hosts("a", "a", "a"), "0-7,16-23")  # one of three nodes of a machine is lost
    findings = Findings()
    assert check_plan(plan, hosts("a", "a"), findings, known={0: 0, 2: 1}) == (0, NOT_USED, 1)
    assert not findings.found
