"""Every mistake is a finding with its place, and all of them are reported at once."""

from textwrap import dedent

import pytest

import roost
from roost.config.findings import listed_keys
from roost.config.train import SETTINGS


def findings_of(text, tmp_path, **options):
    file = tmp_path / "job.yaml"
    file.write_text(dedent(text))
    with pytest.raises(roost.ConfigError) as caught:
        roost.plan(file, **options)
    return [
        (f"{finding.where.line}:{finding.where.column}", finding.where.key_path, finding.what, finding.why, finding.fix)
        for finding in caught.value.findings
    ]


RLINF = [
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0-8}",
        ("3:25", "cluster.component_placement.actor", "out of range", "8 accelerators, counted from 0"),
        id="rank-out-of-range",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0-3:0-2",
        ("4:5", "cluster.component_placement.actor", "3 processes cannot be spread evenly over 4", "4 % 3 = 1"),
        id="uneven-split",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0-3:4-7",
        ("4:5", "cluster.component_placement.actor", "start at 4", "so 0 comes next"),
        id="process-ranks-start-at-0",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0-3,2-5",
        ("4:5", "cluster.component_placement.actor", "names rank 2 again", "ends at 3"),
        id="resources-ascend",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 3-1",
        ("4:5", "cluster.component_placement.actor", "runs backwards", ""),
        id="range-backwards",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0:0:1",
        ("4:5", "cluster.component_placement.actor", "more than one colon", ""),
        id="two-colons",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 1:30",
        ("4:5", "cluster.component_placement.actor", "processes of '1:30' start at 30", ""),
        id="not-base-60",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0-1:all",
        ("4:5", "cluster.component_placement.actor", "the processes are 'all'", ""),
        id="all-processes",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: [0, 1]",
        ("4:5", "cluster.component_placement.actor", "is [0, 1]; it must be ranks", ""),
        id="list-for-ranks",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: true",
        ("4:5", "cluster.component_placement.actor", "is true; it must be ranks", ""),
        id="bool-for-ranks",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor:",
        ("4:5", "cluster.component_placement.actor", "is null; it must be ranks", ""),
        id="nothing-for-ranks",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 999999999999",
        ("4:5", "cluster.component_placement.actor", "beyond any cluster", ""),
        id="huge-rank",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor,: 0",
        ("4:5", "cluster.component_placement.actor,", "empty name", ""),
        id="empty-component-name",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0\n    rollout,actor: 1",
        ("5:5", "cluster.component_placement.rollout,actor", "places actor a second time", "job.yaml:4:5"),
        id="component-twice",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: {node_group: a80, placement: 0}\n"
        "  node_groups: [{label: a800, node_ranks: 0}]",
        ("4:13", "cluster.component_placement.actor.node_group", "names node group a80", "mean a800?"),
        id="unknown-group",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: {node_group: cluster}",
        ("4:5", "cluster.component_placement.actor", "has no placement", ""),
        id="no-placement",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: {placement: 0, nodegroup: cluster}",
        ("4:27", "cluster.component_placement.actor.nodegroup", "not a key", "did you mean node_group?"),
        id="unknown-key-of-a-placement",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0}\n  num_gpu_per_node: 8",
        ("4:3", "cluster.num_gpu_per_node", "not a key", "did you mean num_gpus_per_node?"),
        id="unknown-key-of-the-cluster",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1\n  actor,inference: 0-7\n  component_placement: {env: 0}",
        ("3:3", "cluster.actor,inference", "stands outside component_placement", ""),
        id="component-outside-component-placement",
    ),
    pytest.param(
        "cluster:\n  num_nodes: two\n  component_placement: {actor: 0}",
        ("2:3", "cluster.num_nodes", "is 'two'; it must be a whole number of at least 1", ""),
        id="num-nodes-is-a-word",
    ),
    pytest.param(
        "cluster:\n  num_nodes: true\n  component_placement: {actor: 0}",
        ("2:3", "cluster.num_nodes", "is true; it must be a whole number", ""),
        id="num-nodes-is-a-flag",
    ),
    pytest.param(
        "cluster:\n  component_placement: {actor: 0}",
        ("1:1", "cluster.num_nodes", "is missing", ""),
        id="no-num-nodes",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 1",
        ("1:1", "cluster.component_placement", "is missing", ""),
        id="no-component-placement",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 2\n  component_placement:\n    agent: {node_group: node, placement: '0-1:0'}",
        ("4:31", "cluster.component_placement.agent.placement", "1 processes cannot run across 2 nodes", ""),
        id="process-across-nodes",
    ),
    pytest.param(
        "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 6-9:0",
        ("4:5", "cluster.component_placement.actor", "process 0 would span nodes", "on nodes 0-1"),
        id="devices-across-nodes",
    ),
]


@pytest.mark.parametrize(("text", "expected"), RLINF)
def test_rlinf(text, expected, tmp_path):
    place, path, what, why = expected
    found = findings_of(text, tmp_path, accelerators_per_node=8)
    assert [(finding[0], finding[1]) for finding in found] == [(place, path)]
    assert what in found[0][2]
    assert why in found[0][3]


GROUPS = [
    pytest.param("{label: node, node_ranks: 0}", "label", "node is reserved", id="reserved"),
    pytest.param(
        "{label: a, node_ranks: 0-4}", "node_ranks", "names node 4, which does not exist", id="node-out-of-range"
    ),
    pytest.param("{node_ranks: 0}", "label", "is missing", id="no-label"),
    pytest.param("{label: a}", "node_ranks", "is missing", id="no-node-ranks"),
    pytest.param("{label: a, node_ranks: ''}", "node_ranks", "names no node", id="no-nodes"),
    pytest.param("{label: a, node_ranks: 0x}", "node_ranks", "is not a rank", id="bad-node-ranks"),
    pytest.param("{label: a, node_ranks: 0, hardwar: {}}", "hardwar", "not a key", id="unknown-key"),
    pytest.param(
        "{label: a, node_ranks: 0, ignore_hardware: true, hardware: {type: Turtle2, configs: [{node_rank: 0}]}}",
        "ignore_hardware",
        "cannot be combined with hardware",
        id="ignored-hardware",
    ),
    pytest.param(
        "{label: a, node_ranks: 0-1, env_configs: {node_ranks: 0}}",
        "env_configs",
        "is a mapping; it must be a list",
        id="env-configs-without-dash",
    ),
    pytest.param(
        "{label: a, node_ranks: 0-1, env_configs: [{node_ranks: 2}]}",
        "env_configs[0].node_ranks",
        "outside its group a",
        id="env-nodes-outside",
    ),
    pytest.param(
        "{label: a, node_ranks: 0-1, env_configs: [{node_ranks: 0-1}, {node_ranks: 1}]}",
        "env_configs[1].node_ranks",
        "overlaps another entry",
        id="env-nodes-overlap",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, env_configs: [{node_ranks: 0, env_vars: [{A: 1, B: 2}]}]}",
        "env_configs[0].env_vars[0]",
        "holds 2 pairs",
        id="two-pairs-in-an-entry",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, env_configs: [{node_ranks: 0, env_vars: {A: 1}}]}",
        "env_configs[0].env_vars",
        "is a mapping; it must be a list",
        id="env-vars-as-a-mapping",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, hardware: {type: Frank, configs: []}}",
        "hardware.type",
        "unknown type Frank",
        id="unknown-hardware",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, hardware: {type: Franka}}",
        "hardware.configs",
        "is missing",
        id="hardware-without-configs",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, hardware: {type: Franka, configs: [{node_rank: 1}]}}",
        "hardware.configs[0]",
        "is on node 1, outside its group a",
        id="hardware-outside",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: ROBOT_IP}]}}",
        "hardware.configs[0].robot_ip",
        "is a placeholder",
        id="placeholder",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, hardware: {type: Franka, configs: [{node_rank: 0, robotip: 10.0.0.1}]}}",
        "hardware.configs[0].robotip",
        "unknown|not a field",
        id="unknown-field",
    ),
    pytest.param(
        "{label: a, node_ranks: 0, hardware: {type: Turtle2, configs: [{node_rank: 0}, {node_rank: 0}]}}",
        "hardware.configs[1]",
        "duplicate",
        id="duplicate-device",
    ),
]


@pytest.mark.parametrize(("group", "path", "what"), GROUPS)
def test_node_groups(group, path, what, tmp_path):
    text = (
        "cluster:\n  num_nodes: 4\n  component_placement: {agent: {node_group: node, placement: 0}}\n  node_groups:\n"
        f"    - {group}\n"
    )
    found = findings_of(text, tmp_path, accelerators_per_node=8)
    assert [finding[1] for finding in found] == [f"cluster.node_groups[0].{path}"]
    assert any(part in found[0][2] for part in what.split("|"))
    assert found[0][0].startswith("5:")


def test_rules_between_groups(tmp_path):
    text = """
        cluster:
          num_nodes: 2
          component_placement: {agent: {node_group: node, placement: 0}}
          node_groups:
            - {label: a, node_ranks: 0-1, env_configs: [{node_ranks: 0-1, env_vars: [{NAME: x}]}]}
            - {label: b, node_ranks: 1, env_configs: [{node_ranks: 1, env_vars: [{NAME: y}]}]}
            - {label: b, node_ranks: 0}
            - {label: c, node_ranks: 0, hardware: {type: Turtle2, configs: [{node_rank: 0}]}}
            - {label: d, node_ranks: 0, hardware: {type: Turtle2, configs: [{node_rank: 0}]}}
    """
    assert [finding[2] for finding in findings_of(text, tmp_path, accelerators_per_node=8)] == [
        "sets NAME on node 1, which group a sets already",
        "b is declared twice",
        "declares Turtle2 on node 0, which group c declares already",
    ]


def test_all_findings_at_once(tmp_path):
    text = """
        cluster:
          num_nodes: 1
          num_gpu_per_node: 8
          component_placement:
            actor: 0-8
            rollout: 0-3:0-2
            env: {node_group: franka, placement: 0}
            agent: x
    """
    found = findings_of(text, tmp_path, accelerators_per_node=8)
    assert [finding[1].removeprefix("cluster.") for finding in found] == [
        "num_gpu_per_node",
        "component_placement.actor",
        "component_placement.rollout",
        "component_placement.env.node_group",
        "component_placement.agent",
    ]


ROLL = [
    pytest.param(
        "actor_train: {device_mapping: 'list(range(0,5))', num_gpus_per_worker: 2}",
        "actor_train.device_mapping",
        "names 5 devices, which 2 per worker do not divide",
        id="not-divisible",
    ),
    pytest.param(
        "actor_train: {device_maping: 'list(range(0,8))'}",
        "actor_train.device_maping",
        "not a key",
        id="misspelt-device-mapping",
    ),
    pytest.param("actor_train: {device_mapping: '[]'}", "actor_train.device_mapping", "names no device", id="empty"),
    pytest.param(
        "actor_train: {device_mapping: '[-1, 0]'}", "actor_train.device_mapping", "-1 is not a device", id="negative"
    ),
    pytest.param(
        "actor_train: {device_mapping: '[0, 0, 1, 1]', num_gpus_per_worker: 2}",
        "actor_train.device_mapping",
        "worker 0 the same device twice",
        id="device-twice-in-a-worker",
    ),
    pytest.param(
        "actor_train: {device_mapping: \"__import__('os').system('true')\"}",
        "actor_train.device_mapping",
        "is not allowed in a device list",
        id="code",
    ),
    pytest.param(
        "actor_train: {device_mapping: 'list(range(0,8))', world_size: 4}",
        "actor_train.world_size",
        "is 4, but the devices make 8 workers",
        id="contradicting-world-size",
    ),
    pytest.param(
        "rewards: {judge: {strategy_args: {strategy_name: vllm}}}",
        "rewards.judge",
        "has neither device_mapping nor world_size",
        id="neither",
    ),
    pytest.param(
        "rewards: {judge: {world_size: 0}}", "rewards.judge.world_size", "whole number of at least 1", id="no-workers"
    ),
    pytest.param(
        "num_nodes: 1\nactor_train: {device_mapping: 'list(range(0,16))'}",
        "num_nodes",
        "is 1, but the devices reach over 2 nodes",
        id="too-few-nodes",
    ),
    pytest.param(
        "actor_train: {device_mapping: '${nowhere}'}",
        "actor_train.device_mapping",
        "cannot be resolved",
        id="interpolation",
    ),
]


@pytest.mark.parametrize(("text", "path", "what"), ROLL)
def test_roll(text, path, what, tmp_path):
    found = findings_of(f"num_gpus_per_node: 8\n{text}\n", tmp_path)
    assert path in [finding[1] for finding in found]
    assert any(what in finding[2] for finding in found)


def test_strict_takes_a_contradicting_worker_size_as_an_error():
    engine = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}}
    config = {
        "num_gpus_per_node": 8,
        "actor_infer": {"device_mapping": "list(range(0,8))", "num_gpus_per_worker": 4, "strategy_args": engine},
    }
    plan = roost.plan(config)
    assert plan["rollout"].world_size == 4
    assert [warning.what for warning in plan.warnings] == ["is 4, but 2 is used"]
    with pytest.raises(roost.ConfigError, match="is 4, but 2 is used"):
        roost.plan(config, strict=True)


LOOP = [
    pytest.param({"learning_gpus": [0]}, "inference_gpus", "is missing", id="no-inference"),
    pytest.param({"learning_gpus": [0, 0], "inference_gpus": [1]}, "learning_gpus", "names a GPU twice", id="twice"),
    pytest.param({"learning_gpus": [], "inference_gpus": [1]}, "learning_gpus", "names no GPU", id="none"),
    pytest.param({"learning_gpus": ["a"], "inference_gpus": [1]}, "learning_gpus", "is not a device", id="word"),
    pytest.param(
        {"learning_gpus": [0], "inference_gpus": [1], "learning_gpu": []}, "learning_gpu", "not a key", id="unknown-key"
    ),
]


@pytest.mark.parametrize(("allocation", "key", "what"), LOOP)
def test_loop(allocation, key, what):
    with pytest.raises(roost.ConfigError) as caught:
        roost.plan({"rl": {"gpu_allocation": allocation}})
    found = [(finding.where.key_path, what in finding.what) for finding in caught.value.findings]
    assert found == [(f"rl.gpu_allocation.{key}", True)]


def test_loop_gpus_beyond_the_machine():
    allocation = {"learning_gpus": [0, 1], "inference_gpus": [7]}
    with pytest.raises(roost.ConfigError, match="device 7 is out of range"):
        roost.plan({"rl": {"gpu_allocation": allocation}}, accelerators_per_node=4)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        pytest.param({}, "is empty", id="empty"),
        pytest.param({"trainer": {"lr": 1}}, "none of the notations", id="foreign"),
        pytest.param({"cluster": {}, "actor_train": {"device_mapping": [0]}}, "could be", id="two-notations"),
    ],
)
def test_unclear_notation(config, what):
    with pytest.raises(roost.ConfigError, match=what):
        roost.plan(config)


def test_notation_can_be_forced():
    config = {"cluster": {"name": "home"}, "actor_train": {"device_mapping": [0, 1]}, "num_gpus_per_node": 2}
    assert roost.plan(config, notation=roost.Notation.ROLL)["actor"].world_size == 2


def test_an_unknown_setting_is_told_with_the_nearest_three_not_with_all():
    assert f"one of the {len(SETTINGS)} keys, such as lora_rank, learning_rate, " in listed_keys("lr", SETTINGS)
    assert "kl_coef" in listed_keys("kl", SETTINGS)
