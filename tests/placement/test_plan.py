"""Plans: environment, inventories, JSON."""

import copy
import json

import pytest

import roost
from roost.placement.plan import SCHEMA

CONFIG = {
    "cluster": {
        "num_nodes": 2,
        "component_placement": {
            "actor": {"node_group": "gpu", "placement": "0-3:0-1"},
            "env": {"node_group": "robot", "placement": "0:0-1"},
            "agent": {"node_group": "node", "placement": "0-1:0-2"},
        },
        "node_groups": [
            {
                "label": "gpu",
                "node_ranks": [0],
                "env_configs": [{"node_ranks": 0, "env_vars": [{"A": 1}], "python_interpreter_path": "/opt/python"}],
            },
            {
                "label": "robot",
                "node_ranks": [1],
                "hardware": {"type": "Franka", "configs": [{"node_rank": 1, "robot_ip": "10.0.0.1"}]},
            },
        ],
    }
}
MACHINES = {
    "nodes": [
        {"accelerators": 4, "accelerator_type": "AMD_GPU", "accelerator_model": "MI300X", "memory_gb": 192},
        {"accelerators": 0, "host": "arm"},
    ]
}


@pytest.fixture
def plan():
    return roost.plan(CONFIG, MACHINES)


def test_environment_of_a_process(plan):
    process = list(plan["actor"].processes())[1]
    assert process.interpreter == "/opt/python"
    assert process.env["A"] == "1"
    assert process.env["HIP_VISIBLE_DEVICES"] == "2,3"


def test_a_node_without_accelerators_gets_no_visibility_variable(plan):
    env = list(plan["env"].processes())
    assert [process.env for process in env] == [{}, {}]
    assert [process.hardware[0]["robot_ip"] for process in env] == ["10.0.0.1"] * 2


def test_roll_system_envs_reach_the_processes():
    plan = roost.plan(
        {
            "num_gpus_per_node": 2,
            "system_envs": {"A": "job", "B": 1},
            "actor_train": {"device_mapping": [0, 1], "system_envs": {"A": "role"}},
        }
    )
    env = next(plan["actor"].processes()).env
    assert (env["A"], env["B"], env["CUDA_VISIBLE_DEVICES"]) == ("role", "1", "0")


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        pytest.param({"nodes": [{"accelerators": 4}]}, "is 2, but the inventory has 1", id="number-of-nodes"),
        pytest.param(
            {"nodes": [{"accelerators": 4}, {"hardware": {"Franka": 2}}]}, "declares 1 Franka", id="number-of-robots"
        ),
    ],
)
def test_the_config_must_be_true_of_the_inventory(machines, message):
    with pytest.raises(roost.ConfigError, match=message):
        roost.plan(CONFIG, machines)


SIMULATED = [
    pytest.param({"accelerators": 0}, "ROOST_FAKE_ACCELERATORS=8 on each, before Ray or `roost up` starts", id="none"),
    pytest.param({"accelerators": 2, "accelerator_type": "SIMULATED"}, "ROOST_FAKE_ACCELERATORS=8 before", id="fewer"),
    pytest.param({"accelerators": 2}, None, id="real-ones"),
]


@pytest.mark.parametrize(("node", "hint"), SIMULATED)
def test_nodes_without_accelerators_can_simulate_what_a_config_writes(node, hint):
    config = {"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor": "0-1"}}}
    with pytest.raises(roost.ConfigError) as raised:
        roost.plan(config, roost.Inventory.from_dict({"nodes": [node]}))
    (fix,) = [finding.fix for finding in raised.value.findings if finding.code == "RST-H009"]
    assert ("ROOST_FAKE_ACCELERATORS" not in fix) if hint is None else (hint in fix)


def test_accelerators_per_node_are_checked_against_the_inventory():
    config = {"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor": "all"}}}
    with pytest.raises(roost.ConfigError, match="is 8, but node 0 has 4"):
        roost.plan(config, {"nodes": [{"accelerators": 4}]})
    with pytest.raises(roost.ConfigError, match="is 8, but --gpus-per-node gives 4"):
        roost.plan(config, accelerators_per_node=4)


def test_roll_on_nodes_of_different_size():
    plan = roost.plan({"actor_train": {"device_mapping": "0-5"}}, {"nodes": [{"accelerators": 4}, {"accelerators": 2}]})
    assert [placement.devices for placement in plan["actor"].table][-2:] == [[(1, 0)], [(1, 1)]]


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        pytest.param({"nodes": []}, "names no node", id="no-nodes"),
        pytest.param({"nodes": [{"gpus": 8}]}, "gpus.*not a key", id="unknown-key"),
        pytest.param({"nodes": [{"accelerators": -1}]}, "at least 0", id="negative"),
        pytest.param({"nodes": [{"count": 2**20}, {}]}, "more than 1,048,576 nodes", id="too-many"),
        pytest.param({"nodes": [{}], "node_groups": [{"label": "a", "node_ranks": [1]}]}, "past the last", id="group"),
        pytest.param({"nodes": [{}], "node_groups": [{"label": "node", "node_ranks": [0]}]}, "reserved", id="reserved"),
        pytest.param({"nodes": [{"hardware": {"Franka": "one"}}]}, "number of devices", id="hardware"),
    ],
)
def test_wrong_inventories(machines, message):
    with pytest.raises(roost.ConfigError, match=message):
        roost.Inventory.from_dict(machines)


def test_inventory_file(tmp_path):
    file = tmp_path / "machines.yaml"
    file.write_text(json.dumps(MACHINES))
    assert (
        roost.plan(CONFIG, file)
        == roost.plan(CONFIG, MACHINES)
        == roost.plan(CONFIG, roost.Inventory.from_dict(MACHINES))
    )


def test_inventory_to_dict_and_back():
    inventory = roost.plan(CONFIG, MACHINES).inventory
    assert roost.Inventory.from_dict(inventory.to_dict()) == inventory
    assert roost.Inventory.uniform(1000, 8).to_dict()["nodes"] == [{"count": 1000, "accelerators": 8}]


def test_a_plan_on_the_first_nodes_of_an_inventory_can_be_read_back():
    machines = {
        "nodes": [{"count": 4, "accelerators": 8}],
        "node_groups": [
            {
                "label": "gpu",
                "node_ranks": "0-3",
                "software": [
                    {"node_ranks": "0-2", "env_vars": {"A": "1"}},
                    {"node_ranks": 3, "env_vars": {"A": "2"}},
                ],
            }
        ],
    }
    config = {"cluster": {"num_nodes": 2, "component_placement": {"actor": {"node_group": "gpu", "placement": "all"}}}}
    plan = roost.plan(config, machines)
    assert plan.inventory.group("gpu").software_of(1).env_vars == (("A", "1"),)
    assert [sorted(part.node_ranks) for part in plan.inventory.group("gpu").software] == [[0, 1]]
    assert roost.Plan.from_dict(plan.to_dict()) == plan


def test_json_and_back_is_the_identity(plan):
    assert roost.Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["schema"] == SCHEMA


def test_json_has_every_placement_field_of_every_process(plan):
    process = json.loads(plan.to_json())["components"]["actor"]["processes"][0]
    assert set(roost.Placement._fields) | {"env", "interpreter"} == set(process)


def test_json_says_what_is_resident_and_how_weights_travel():
    allocation = {"learning_gpus": [0, 1], "inference_gpus": [0, 1]}
    figures = {"inference_requires_memory_gb": 20, "learning_requires_memory_gb": 40}
    plan = roost.plan(
        {"rl": {"gpu_allocation": allocation, **figures}}, {"nodes": [{"accelerators": 2, "memory_gb": 80}]}
    )
    data = json.loads(plan.to_json())
    (held,) = data["residency"]
    assert (held["devices"], held["decision"]) == ("0-1", "keep")
    assert held["inference_fraction"] == pytest.approx(0.3167, abs=1e-4)
    assert held["phases"]["learn"]["actor"] == {"state": "runs", "device_gib": 40.0, "host_gib": 0.0}
    assert data["routes"] == [{"component": "rollout", "shards": 2, "gathered": 2, "same device": 2}]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({}, id="empty"),
        pytest.param({"schema": "roost.plan/0"}, id="other-schema"),
        pytest.param({"schema": SCHEMA}, id="nothing-else"),
        pytest.param([], id="list"),
    ],
)
def test_what_is_no_plan_is_refused(broken):
    with pytest.raises(roost.ConfigError):
        roost.Plan.from_dict(broken)


def test_a_changed_process_is_another_plan(plan):
    data = plan.to_dict()
    data["components"]["actor"]["processes"][0]["devices"] = [[0, 1], [0, 2]]
    assert roost.Plan.from_dict(data) != plan


def test_planning_changes_nothing_it_was_given():
    config, machines = copy.deepcopy(CONFIG), copy.deepcopy(MACHINES)
    roost.plan(config, machines)
    assert (config, machines) == (CONFIG, MACHINES)


def test_a_job_can_be_planned_again():
    from roost.config.findings import Findings
    from roost.config.notations.notation import read_job
    from roost.config.source import Source

    job = read_job(Source(CONFIG), Findings())
    assert roost.plan(job, MACHINES) == roost.plan(CONFIG, MACHINES)


@pytest.fixture
def own_hardware(tmp_path, monkeypatch):
    """A robot and an accelerator that a user has added, as docs/hardware.md says."""
    (tmp_path / "hardware_of_a_test.py").write_text(
        "from typing import ClassVar\n"
        "import roost\n"
        "class MyArm(roost.HardwareConfig):\n"
        "    kind: ClassVar[str] = 'MyArm'\n"
        "    serial_port: str\n"
        "names = ('ACME_GPU', 'Acme', 'ACME_VISIBLE_DEVICES', 'gloo', 'GLOO_SOCKET_IFNAME', 'GPU')\n"
        "ACME = roost.Accelerator(*names, lambda environ: None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ROOST_HARDWARE", "hardware_of_a_test:MyArm,hardware_of_a_test:ACME")


def test_own_hardware_is_known_to_python_and_to_plans(own_hardware):
    arm = {"type": "MyArm", "configs": [{"node_rank": 0, "serial_port": "/dev/arm"}]}
    config = {
        "cluster": {
            "num_nodes": 1,
            "component_placement": {"actor": "all", "env": {"node_group": "arm", "placement": 0}},
            "node_groups": [{"label": "arm", "node_ranks": 0, "hardware": arm}],
        }
    }
    plan = roost.plan(config, {"nodes": [{"accelerators": 2, "accelerator_type": "ACME_GPU"}]})
    assert next(plan["env"].processes()).hardware[0]["serial_port"] == "/dev/arm"
    assert plan.to_dict()["components"]["actor"]["processes"][1]["env"]["ACME_VISIBLE_DEVICES"] == "1"
    config["cluster"]["num_gpus_per_node"] = 2
    assert roost.HybridComponentPlacement(config).get_world_size("env") == 1


def test_an_accelerator_nobody_knows_is_refused():
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "all"}}}
    with pytest.raises(roost.ConfigError, match="did you mean NV_GPU"):
        roost.plan(config, {"nodes": [{"accelerators": 2, "accelerator_type": "NV_GPUS"}]})


@pytest.mark.parametrize(
    ("placement", "mode"),
    [
        pytest.param({"actor": "0-3"}, "training-only", id="supervised"),
        pytest.param({"actor": "0-3", "critic": "0-3"}, "training-only", id="two-learners"),
        pytest.param({"rollout": "0-3"}, "inference-only", id="engines"),
        pytest.param({"rollout": "0-1", "reward": "2-3"}, "inference-only", id="engines-and-rewards"),
        pytest.param({"actor": "0-3", "rollout": "0-3"}, "collocated", id="both"),
        pytest.param({"actor": "0-1", "rollout": "2-3"}, "disaggregated", id="apart"),
        pytest.param({"actor": "0-3", "env": "0"}, "hybrid", id="environments"),
    ],
)
def test_mode(placement, mode):
    cluster = {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": placement}
    plan = roost.plan({"cluster": cluster})
    assert plan.mode == mode
    assert roost.Plan.from_json(plan.to_json()).mode == mode
