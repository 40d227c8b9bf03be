"""The documents' heterogeneous cluster, small: accelerators, robots, a CPU node; every worker proves its place."""

import os
import subprocess
import sys

import pytest

import roost
from roost import Cluster, Worker

CONFIG = """
cluster:
  num_nodes: 4
  component_placement:
    actor:
      node_group: a800
      placement: 0-1
    rollout:
      node_group: "4090"
      placement: 1-2
    env:
      node_group: franka
      placement: 0-1
    agent:
      node_group: node
      placement: 0-1:0-3,3:4
  node_groups:
    - label: a800
      node_ranks: 0
      env_configs:
        - node_ranks: 0
          python_interpreter_path: {python}
          env_vars:
            - GLOO_SOCKET_IFNAME: "roost0"
    - label: "4090"
      node_ranks: 1
      env_configs:
        - node_ranks: 1
          env_vars:
            - GLOO_SOCKET_IFNAME: "roost1"
    - label: franka
      node_ranks: 2-3
      hardware:
        type: Franka
        configs:
          - robot_ip: "10.10.10.1"
            node_rank: 2
            camera_serials: ["322142001230", "322142001231"]
            disable_validate: true
          - node_rank: 3
            camera_serials: ["322142001232"]
            disable_validate: true
"""


class Witness(Worker):
    def testify(self):
        return {
            "node": int(os.environ["CLUSTER_NODE_RANK"]),
            "node_rank": os.environ["NODE_RANK"],
            "raylet": os.getppid(),
            "sees": os.environ.get("ROOST_VISIBLE_DEVICES"),
            "network": os.environ.get("GLOO_SOCKET_IFNAME"),
            "python": sys.executable,
            "robots": [dict(robot) for robot in self.hardware_infos],
            "kind": self.hardware_type,
        }


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """A second interpreter that finds the packages of this one."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("\n".join(path for path in sys.path if path))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def testimony(ray_nodes, module_patch, other_python, tmp_path_factory):
    ray_nodes.add(2, rank=0)
    ray_nodes.add(3, rank=1)
    ray_nodes.add(0, rank=3, ROBOT_IP="10.10.10.2")  # joined before node 2: ranks count, not the order of joining
    ray_nodes.add(0, rank=2)
    config = tmp_path_factory.mktemp("config") / "job.yaml"
    config.write_text(CONFIG.format(python=other_python))
    with Cluster(cluster_cfg=config, address=ray_nodes.address) as cluster:
        plan = roost.plan(config, inventory=cluster)
        groups = cluster.launch(plan, {name: Witness.create_group() for name in ("actor", "rollout", "env", "agent")})
        yield {name: group.testify().wait() for name, group in groups.items()}


def test_every_process_is_on_its_node(testimony):
    nodes = {name: [each["node"] for each in heard] for name, heard in testimony.items()}
    assert nodes == {"actor": [0, 0], "rollout": [1, 1], "env": [2, 3], "agent": [0, 0, 1, 1, 3]}


def test_nodes_are_different_machines_for_ray(testimony):
    raylets = {each["node"]: each["raylet"] for heard in testimony.values() for each in heard}
    assert len(set(raylets.values())) == 4
    for heard in testimony.values():
        assert all(each["raylet"] == raylets[each["node"]] for each in heard)


def test_node_rank_counts_the_nodes_of_the_component(testimony):
    assert [each["node_rank"] for each in testimony["env"]] == ["0", "1"]
    assert [each["node_rank"] for each in testimony["agent"]] == ["0", "0", "1", "1", "2"]


def test_every_process_sees_its_devices(testimony):
    assert [each["sees"] for each in testimony["actor"]] == ["0", "1"]
    assert [each["sees"] for each in testimony["rollout"]] == ["1", "2"]
    # Without devices of its own a process sees what its job holds on the node.
    assert [each["sees"] for each in testimony["agent"]] == ["0,1", "0,1", "1,2", "1,2", None]


def test_environment_of_the_node_group(testimony):
    assert {each["network"] for each in testimony["actor"]} == {"roost0"}
    assert {each["network"] for each in testimony["rollout"]} == {"roost1"}
    assert not {each["network"] for each in testimony["env"]} & {"roost0", "roost1"}


def test_interpreter_of_the_node_group(testimony, other_python):
    assert {each["python"] for each in testimony["actor"]} == {str(other_python)}
    others = {each["python"] for name in ("rollout", "env", "agent") for each in testimony[name]}
    assert others == {sys.executable}


def test_robots_reach_their_workers(testimony):
    first, second = (each["robots"] for each in testimony["env"])
    assert [each["kind"] for each in testimony["env"]] == ["Franka", "Franka"]
    assert [robot["robot_ip"] for robot in first] == ["10.10.10.1"]
    assert first[0]["camera_serials"] == ["322142001230", "322142001231"]
    # What the config leaves out comes from the variables of the robot's node.
    assert [robot["robot_ip"] for robot in second] == ["10.10.10.2"]
