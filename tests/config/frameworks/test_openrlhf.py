"""OpenRLHF jobs: who shares GPUs, machines, and flags that contradict each other."""

import json
from pathlib import Path

import pytest

from roost.config.findings import Findings
from roost.config.job import Notation
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.planner import try_plan
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
    assert "despite --train.colocate_all" in codes(tmp_path, f"{PPO} {flags}")["RST-N068"].what


def test_the_numbers_of_a_remote_reward_model_still_count(tmp_path):
    flags = "--train.colocate_critic_reward --reward.remote_url r.py --critic.num_gpus_per_node 4"
    found = codes(tmp_path, f"{PPO} {flags}")
    assert found["RST-N066"].fix == "write --reward.num_nodes 1 --reward.num_gpus_per_node 4"


def test_a_role_that_is_not_started_may_have_no_gpus(tmp_path):
    none = "--ref.num_nodes 0 --reward.num_gpus_per_node 0 --critic.num_nodes 0 --critic.num_gpus_per_node 0"
    job = f"{JOB} --algo.kl.init_coef 0 --actor.num_gpus_per_node 4"
    assert processes_of(plan_of(tmp_path, f"{job} {none}")) == {"actor": "4 x 1 on 0-3"}
    assert "RST-N067" not in codes(tmp_path, f"{job} {none}")
    assert codes(tmp_path, f"{PPO} --reward.num_nodes 0")["RST-C024"].fix == "write --reward.num_nodes 1"


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


@pytest.mark.parametrize(
    "flags", ["--algo.advantage.no_std_norm --ds.adam_offload", "--no_advantage_std_norm --adam_offload"]
)
def test_the_optimizer_and_whitening_in_both_spellings(flags, tmp_path):
    plan = plan_of(tmp_path, f"{PPO} {flags}")
    assert plan["actor"].model.optimizer_on_host and plan["critic"].model.optimizer_on_host
    assert plan.settings["whiten_advantages"] == "batch/none"
    findings = Findings()
    written = convert_plan(plan, Notation.OPENRLHF, findings).values
    assert written["--algo.advantage.no_std_norm"] and written["--ds.adam_offload"]
    assert not findings.warnings


def test_muon_keeps_its_state_on_the_gpu(tmp_path):
    plan = plan_of(tmp_path, f"{PPO} --actor.optim muon --ds.adam_offload")
    models = [plan[name].model for name in ("actor", "critic")]
    assert [(model.optimizer, model.optimizer_on_host) for model in models] == [("muon", False), ("adamw", True)]
    assert "RST-N068" not in codes(tmp_path, f"{PPO} --actor.optim muon --ds.adam_offload")  # the critic's is moved


@pytest.mark.parametrize("flags", [f"{PPO} --critic.optim muon", JOB], ids=["both", "no-critic"])
def test_nothing_is_offloaded_where_all_learners_have_muon(flags, tmp_path):
    found = codes(tmp_path, f"{flags} --actor.optim muon --ds.adam_offload")
    assert "Muon keeps its state" in found["RST-N068"].why


def test_an_optimizer_that_openrlhf_lacks_is_refused(tmp_path):
    found = codes(tmp_path, f"{JOB} --actor.optim sgd")["RST-N068"]
    assert (found.where.path, found.what) == (("--actor.optim",), "is 'sgd'; it is adam or muon")


def test_new_tokens_leave_the_rest_to_the_prompt(tmp_path):
    plan = plan_of(tmp_path, f"{PPO} --data.max_len 100 --rollout.max_new_tokens 60")
    assert plan.settings["max_prompt_length"] == 40
    written = convert_plan(plan, Notation.OPENRLHF, Findings()).values
    assert (written["--data.max_len"], written["--rollout.max_new_tokens"]) == (100, 60)


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        ("--prompt_max_len 1024 --rollout.max_new_tokens 512 --data.max_len 4096", (1024, 512)),
        ("--prompt_max_len 1024 --rollout.max_new_tokens 3072 --data.max_len 4096", (1024, None)),
        ("--prompt_max_len 1024 --generate_max_len 512 --max_len 4096", (1024, 512)),
        ("--prompt_max_len 1024 --generate_max_len 512", (1024, None)),
    ],
)
def test_a_completion_is_said_where_the_other_lengths_do_not_say_it(flags, lengths, tmp_path):
    settings = plan_of(tmp_path, f"{PPO} {flags}").settings
    assert (settings["max_prompt_length"], settings.get("max_new_tokens")) == lengths


@pytest.mark.parametrize(
    ("inventory", "per_node", "is_planned"),
    [
        ({"nodes": [{"accelerators": 4}] * 2}, None, True),
        ({"nodes": [{"accelerators": 2}] * 4}, None, True),
        (None, 4, True),
        ({"nodes": [{"accelerators": 4}]}, None, False),
    ],
    ids=["two-of-four", "four-of-two", "given-width", "too-few"],
)
def test_machines_that_are_known_replace_the_assumed_ones(inventory, per_node, is_planned, tmp_path):
    file = tmp_path / "run.sh"
    roles = " ".join(f"--{role}.num_gpus_per_node 2" for role in ("actor", "ref"))
    file.write_text(f"{JOB} {roles} --vllm.num_engines 4\n")
    findings = Findings()
    plan = try_plan(file, findings, inventory, accelerators_per_node=per_node)
    assert (plan is not None) == is_planned
    if plan is not None:
        assert processes_of(plan)["rollout"] == "4 x 1 on 2-5"
    assert "RST-H009" not in {finding.code for finding in findings.found}
