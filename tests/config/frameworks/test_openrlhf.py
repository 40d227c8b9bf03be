"""OpenRLHF jobs: who shares GPUs, machines, and flags that contradict each other."""

import json
from pathlib import Path

import pytest

from tests.config.frameworks.test_jobs import check_layout, codes, plan_of, processes_of
from tests.grid import grid

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "openrlhf.jsonl").read_text().splitlines()]

JOB = "python3 -m openrlhf.cli.train_ppo_ray --reward.remote_url r.py --algo.advantage.estimator rloo"
PPO = "python3 -m openrlhf.cli.train_ppo_ray"


@grid("case", [pytest.param(case, id=f"golden-{index}") for index, case in enumerate(GOLDEN)])
def test_a_layout_by_its_own_code(case, tmp_path):
    check_layout(tmp_path, f"{PPO} {case['args']}", case["layout"], {"RST-N066"})


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        (PPO, {"actor", "reference", "critic", "reward"}),
        (f"{PPO} --algo.kl.init_coef 0", {"actor", "critic", "reward"}),
        (f"{PPO} --algo.advantage.estimator rloo", {"actor", "reference", "reward"}),
        (f"{PPO} --reward.remote_url http://host", {"actor", "reference", "critic"}),
        (f"{PPO} --train.agent_func_path agent.py", {"actor", "reference", "critic"}),
        (f"{PPO} --vllm.num_engines 1", {"actor", "reference", "critic", "reward", "rollout"}),
    ],
    ids=["defaults", "no-penalty", "no-critic", "remote-reward", "agent", "engines"],
)
def test_the_roles_that_are_started(flags, started, tmp_path):
    assert set(processes_of(plan_of(tmp_path, flags))) == started


@pytest.mark.parametrize(
    ("flags", "machines"),
    [
        ("--actor.num_nodes 2 --actor.num_gpus_per_node 4 --ref.num_nodes 2 --ref.num_gpus_per_node 4", (2, 4)),
        ("--actor.num_nodes 2 --ref.num_nodes 2", (2, 8)),
        ("--actor.num_gpus_per_node 16 --ref.num_gpus_per_node 16", (1, 16)),
        ("--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --vllm.num_engines 4", (1, 6)),
        ("--actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --vllm.num_engines 8", (2, 8)),
    ],
    ids=["nodes-of-4", "nodes-of-8", "a-node-of-16", "what-is-used", "the-usual"],
)
def test_the_machines_that_are_assumed(flags, machines, tmp_path):
    plan = plan_of(tmp_path, f"{JOB} --train.colocate_actor_ref {flags}")
    assert (len(plan.inventory.nodes), plan.inventory.nodes[0].accelerators) == machines


def test_engines_sleep_only_where_all_share(tmp_path):
    flags = "--vllm.num_engines 8 --vllm.enable_sleep"
    plan = plan_of(tmp_path, f"{JOB} --train.colocate_all {flags}")
    assert plan.settings["engines_sleep"] is True
    found = codes(tmp_path, f"{JOB} {flags}")
    assert found["RST-N068"].what == "has no effect"


def test_a_critic_and_a_reward_model_apart_from_the_rest(tmp_path):
    # openrlhf/cli/train_ppo_ray.py: a second group replaces the shared one for the two
    flags = "--train.colocate_all --train.colocate_critic_reward --vllm.num_engines 8"
    processes = processes_of(plan_of(tmp_path, f"{PPO} {flags}"))
    assert processes["critic"] == processes["reward"] == "8 x 1 on 8-15"
    assert "in spite of --train.colocate_all" in codes(tmp_path, f"{PPO} {flags}")["RST-N068"].what


def test_the_numbers_of_a_remote_reward_model_still_count(tmp_path):
    flags = "--train.colocate_critic_reward --reward.remote_url r.py --critic.num_gpus_per_node 4"
    found = codes(tmp_path, f"{PPO} {flags}")
    assert found["RST-N066"].fix == "write --reward.num_nodes 1 --reward.num_gpus_per_node 4"


def test_findings_name_flags_as_they_are_written(tmp_path):
    flags = "--colocate_all_models --vllm_num_engines 3 --vllm_tensor_parallel_size 2 --advantage_estimator rloo"
    found = codes(tmp_path, f"{PPO} \\\n  {flags}")
    assert found["RST-N066"].where.line == 3
    assert found["RST-N066"].where.path == ("--vllm_num_engines",)
    assert found["RST-N066"].fix == "write --vllm_num_engines 4"


def test_a_ring_that_does_not_divide_the_actor(tmp_path):
    found = codes(tmp_path, f"{JOB} --actor.num_gpus_per_node 6 --ds.ring_attn_size 4")
    assert "6 % 4 = 2" in found["RST-N056"].why


def test_a_misspelt_flag_with_dots(tmp_path):
    found = codes(tmp_path, f"{JOB} --actor.num_gpu_per_node 4")
    assert "num_gpus_per_node" in found["RST-C023"].why


def test_engines_are_not_cut_by_the_end_of_a_machine(tmp_path):
    """Ray packs their group on a machine that holds it, and a later role fills the gap."""
    roles = "--actor.num_gpus_per_node 4 --critic.num_gpus_per_node 4 --reward.remote_url http://x"
    engines = "--vllm.num_engines 1 --vllm.tensor_parallel_size 8 --algo.kl.init_coef 0"
    plan = plan_of(tmp_path, f"python3 -m openrlhf.cli.train_ppo_ray {roles} {engines}")
    assert processes_of(plan) == {"actor": "4 x 1 on 0-3", "rollout": "1 x 8 on 8-15", "critic": "4 x 1 on 4-7"}
