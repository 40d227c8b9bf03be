"""The examples printed in the documents that define the three notations, each planned as its document says."""

import pytest

import roost

HETEROGENEOUS = """
cluster:
  num_nodes: 18
  component_placement:
    actor: {node_group: a800, placement: 0-63}
    rollout: {node_group: 4090, placement: 0-63}
    env: {node_group: franka, placement: 0-1}
    agent: {node_group: node, placement: "0-1:0-199,2-3:200-399"}
  node_groups:
    - label: a800
      node_ranks: 0-7
      env_configs:
        - node_ranks: 0-7
          python_interpreter_path: /opt/venv/openpi/bin/python3
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth0"
    - label: 4090
      node_ranks: 8-15
      env_configs:
        - node_ranks: 8-15
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth1"
    - label: franka
      node_ranks: 16-17
      hardware:
        type: Franka
        configs:
          - {robot_ip: "10.10.10.1", node_rank: 16, camera_serials: ["322142001230", "322142001231"]}
          - {robot_ip: "10.10.10.2", node_rank: 17, camera_serials: ["322142001232", "322142001233"]}
"""


def cluster(nodes, per_node=8, **placement):
    return {"cluster": {"num_nodes": nodes, "num_gpus_per_node": per_node, "component_placement": placement}}


def devices(component):
    return [placement.devices for placement in component.table]


def local_ranks(component):
    return [placement.local_hardware_ranks for placement in component.table]


class TestRLinfHeterogeneousCluster:
    """Document: RLinf, heterogeneous software and hardware clusters (18 nodes)."""

    @pytest.fixture
    def plan(self, tmp_path):
        file = tmp_path / "cluster.yaml"
        file.write_text(HETEROGENEOUS)
        return roost.plan(file, accelerators_per_node=8)

    def test_actor_fills_the_a800_nodes(self, plan):
        assert devices(plan["actor"]) == [[(node, local)] for node in range(8) for local in range(8)]

    def test_rollout_fills_the_4090_nodes(self, plan):
        assert devices(plan["rollout"]) == [[(node, local)] for node in range(8, 16) for local in range(8)]

    def test_env_holds_one_robot_a_process_with_its_config(self, plan):
        processes = list(plan["env"].processes())
        assert [process.placement.cluster_node_rank for process in processes] == [16, 17]
        assert [process.hardware[0]["robot_ip"] for process in processes] == ["10.10.10.1", "10.10.10.2"]
        assert processes[1].hardware[0]["camera_serials"] == ["322142001232", "322142001233"]

    def test_agents_run_on_the_first_four_nodes_without_devices(self, plan):
        placements = list(plan["agent"].table)
        assert [placement.cluster_node_rank for placement in placements] == [
            node for node in range(4) for _ in range(100)
        ]
        assert not any(placement.local_hardware_ranks for placement in placements)

    def test_each_group_brings_its_software(self, plan):
        actor, rollout, agent = (next(plan[name].processes()) for name in ("actor", "rollout", "agent"))
        assert actor.interpreter == "/opt/venv/openpi/bin/python3"
        assert actor.env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert (rollout.interpreter, rollout.env["GLOO_SOCKET_IFNAME"]) == (None, "eth1")
        assert agent.interpreter is None, "agents are placed through the group node, not through a800"
        assert "GLOO_SOCKET_IFNAME" not in agent.env

    def test_processes_see_their_own_accelerator_only(self, plan):
        process = list(plan["actor"].processes())[9]
        assert process.placement.visible_accelerators == ["1"]
        assert process.env["CUDA_VISIBLE_DEVICES"] == "1"


class TestRLinfPlacementGrammar:
    """Document: RLinf, heterogeneous clusters and placement interface (component placement)."""

    def test_short_form_names_several_components(self):
        plan = roost.plan(cluster(1, **{"actor,inference": "0-7"}))
        assert devices(plan["actor"]) == devices(plan["inference"]) == [[(0, local)] for local in range(8)]

    def test_mixed_explicit_and_implicit_processes(self):
        plan = roost.plan(cluster(2, actor="0-1:0-3,3-5,7-10:7-14"))
        assert devices(plan["actor"]) == [
            *([[(0, 0)]] * 2), *([[(0, 1)]] * 2),
            [(0, 3)], [(0, 4)], [(0, 5)],
            *([[(0, 7)]] * 2), *([[(1, 0)]] * 2), *([[(1, 1)]] * 2), *([[(1, 2)]] * 2),
        ]  # fmt: skip

    def test_two_processes_on_each_robot(self):
        config = cluster(2, env={"node_group": "robot", "placement": "0-3:0-7"})
        inventory = {
            "nodes": [{"hardware": {"Franka": 2}}, {"hardware": {"Franka": 2}}],
            "node_groups": [{"label": "robot", "node_ranks": "0-1", "hardware": "Franka"}],
        }
        del config["cluster"]["num_gpus_per_node"]
        plan = roost.plan(config, inventory)
        assert devices(plan["env"]) == [[(node, robot)] for node in (0, 1) for robot in (0, 0, 1, 1)]

    def test_uneven_split_over_nodes_is_balanced_with_a_warning(self):
        plan = roost.plan(cluster(4, agent={"node_group": "node", "placement": "0-1:0-200,2-3:201-511"}))
        nodes = [placement.cluster_node_rank for placement in plan["agent"].table]
        assert [nodes.count(node) for node in range(4)] == [101, 100, 156, 155]
        assert nodes == sorted(nodes)
        assert ["do not divide evenly" in warning.what for warning in plan.warnings] == [True, True]

    def test_ranks_run_across_groups_in_the_order_written(self):
        config = cluster(2, actor={"node_group": "4090,a800", "placement": "0-15"})
        config["cluster"]["node_groups"] = [{"label": "a800", "node_ranks": 0}, {"label": "4090", "node_ranks": 1}]
        plan = roost.plan(config)
        assert devices(plan["actor"]) == [[(node, local)] for node in (1, 0) for local in range(8)]
        assert [placement.placement_node_rank for placement in plan["actor"].table] == [0] * 8 + [1] * 8


class TestRLinfStrategies:
    """Document: RLinf, placement interface (placement strategies)."""

    machines = roost.Inventory.from_dict({"nodes": [{"accelerators": 8}]})

    @pytest.mark.parametrize(
        ("strategy", "expected"),
        [
            pytest.param(roost.FlexiblePlacementStrategy([[0, 1], [2], [3]]), [[0, 1], [2], [3]], id="flexible"),
            pytest.param(roost.PackedPlacementStrategy(0, 3), [[0], [1], [2], [3]], id="packed"),
            pytest.param(
                roost.PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3, num_hardware_per_process=2),
                [[0, 1], [2, 3]],
                id="chunked",
            ),
            pytest.param(
                roost.PackedPlacementStrategy(
                    start_hardware_rank=0, end_hardware_rank=3, stride=2, num_hardware_per_process=2
                ),
                [[0, 2], [1, 3]],
                id="strided",
            ),
            pytest.param(roost.NodePlacementStrategy([0] * 4), [[], [], [], []], id="node"),
        ],
    )
    def test_documented_example(self, strategy, expected):
        placements = strategy.get_placement(self.machines)
        assert [placement.local_hardware_ranks for placement in placements] == expected
        assert [placement.rank for placement in placements] == list(range(len(expected)))
        assert {placement.local_world_size for placement in placements} == {len(expected)}


COLLOCATED = {
    **cluster(2, **{"actor,rollout": "all"}),
    "actor": {"offload_optimizer": True, "offload_weight": True, "offload_grad": True},
}


class TestRLinfCollocated:
    """Document: RLinf, collocated mode."""

    def test_both_components_use_all_sixteen(self):
        plan = roost.plan(COLLOCATED)
        assert plan.mode is roost.PlacementMode.COLLOCATED
        assert (
            devices(plan["actor"])
            == devices(plan["rollout"])
            == [[(node, local)] for node in range(2) for local in range(8)]
        )
        assert plan.settings == {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}

    def test_component_placement_needs_no_cluster(self):
        placement = roost.ModelParallelComponentPlacement(COLLOCATED)
        assert placement.placement_mode is roost.PlacementMode.COLLOCATED
        assert placement.get_world_size("rollout") == 16
        assert isinstance(placement.get_strategy("rollout"), roost.PackedPlacementStrategy)

    def test_rollout_is_strided_over_the_actor_shards(self):
        config = {**COLLOCATED, "rollout": {"tensor_parallel_size": 2}}
        config["actor"] = {"model": {"tensor_model_parallel_size": 4}}
        placement = roost.ModelParallelComponentPlacement(config)
        assert placement.get_strategy("rollout").hardware_ranks_list == [
            [base + first, base + first + 2] for base in range(0, 16, 4) for first in (0, 1)
        ]


class TestROLLResources:
    """Document: ROLL, resource configuration."""

    def test_complete_example(self):
        plan = roost.plan(
            {
                "num_gpus_per_node": 8,
                "actor_train": {"device_mapping": "list(range(0,16))"},
                "actor_infer": {"num_gpus_per_worker": 2, "device_mapping": "list(range(0,12))"},
                "rewards": {"code_sandbox": {"world_size": 8}},
            }
        )
        sizes = {component.name: component.world_size for component in plan.components}
        assert sizes == {"actor": 16, "rollout": 6, "reward.code_sandbox": 8}
        assert [component.written_name for component in plan.components] == [
            "actor_train", "actor_infer", "rewards.code_sandbox",
        ]  # fmt: skip
        assert devices(plan["rollout"])[4] == [(1, 0), (1, 1)]
        assert [placement.cluster_node_rank for placement in plan["reward.code_sandbox"].table] == [0, 1] * 4

    @pytest.mark.parametrize(
        ("train", "infer", "mode"),
        [
            pytest.param("list(range(0,8))", "list(range(0,8))", "collocated", id="colocated"),
            pytest.param("list(range(0,4))", "list(range(4,8))", "disaggregated", id="disaggregated"),
            pytest.param("list(range(0,16))", "list(range(0,12))", "hybrid", id="partly-overlapping"),
        ],
    )
    def test_modes(self, train, infer, mode):
        config = {
            "num_gpus_per_node": 8,
            "actor_train": {"device_mapping": train},
            "actor_infer": {"device_mapping": infer},
        }
        assert roost.plan(config).mode.value == mode

    def test_vllm_workers_take_tensor_times_pipeline_devices(self):
        strategy = {
            "strategy_name": "vllm",
            "strategy_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
        }
        infer = {"strategy_args": strategy, "num_gpus_per_worker": 2, "device_mapping": "list(range(0,8))"}
        plan = roost.plan({"num_gpus_per_node": 8, "actor_infer": infer})
        assert local_ranks(plan["rollout"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


class TestMlLoopTrainer:
    """Document: ml-loop, RL trainer (diagrams for different GPU allocations)."""

    def test_six_learn_two_infer(self):
        plan = roost.plan(
            {
                "rl": {
                    "async_rollouts": True,
                    "gpu_allocation": {"learning_gpus": [0, 1, 2, 3, 4, 5], "inference_gpus": [6, 7]},
                }
            }
        )
        assert plan.mode is roost.PlacementMode.DISAGGREGATED
        assert local_ranks(plan["actor"]) == [[0], [1], [2], [3], [4], [5]]
        assert local_ranks(plan["rollout"]) == [[6], [7]]
        assert plan["rollout"].managed_by == "actor"
        assert plan.settings["async_rollouts"] is True

    def test_eight_shared(self):
        allocation = {"learning_gpus": list(range(8)), "inference_gpus": list(range(8))}
        plan = roost.plan(
            {
                "rl": {
                    "gpu_allocation": allocation,
                    "async_rollouts": False,
                    "inference_requires_memory_gb": 75,
                    "learning_requires_memory_gb": 75,
                }
            }
        )
        assert plan.mode is roost.PlacementMode.COLLOCATED
        assert plan["actor"].world_size == plan["rollout"].world_size == 8
        assert plan.settings["inference_requires_memory_gb"] == plan.settings["learning_requires_memory_gb"] == 75
