"""Any config gives a plan or findings, never another exception."""

import copy

import pytest
from hypothesis import given, settings, strategies as st

import roost

TRAIN = {
    "task": {"_target_": "my_tasks.Sums", "largest": {"of": 9}},
    "model": "some/model",
    "prompts_per_step": 32,
    "minibatch_size": 64,
    "learning_rate": 1e-6,
    "old_logprobs": "decoupled",
    "clip_range": 0.2,
    "engine": "vllm",
    "max_staleness": 1,
    "engine_options": {"max_context": 64},
}
CONFIGS = {
    "rlinf": {
        "train": TRAIN,
        "data": {"rollout_batch_size": 32},
        "runner": {"task_type": "reasoning", "seq_length": 1024, "max_steps": -1, "max_epochs": 2},
        "algorithm": {
            "recompute_logprobs": True,
            "adv_type": "grpo",
            "ratio_clip_eps": 0.2,
            "n_minibatches": 4,
            "entropy_bonus": 0.1,
            "normalize_advantages": True,
            "sampling_params": {"top_k": 1000000, "max_new_tokens": "${runner.seq_length}"},
        },
        "cluster": {
            "num_nodes": 3,
            "num_gpus_per_node": 4,
            "auto_scheduler": False,
            "component_placement": {
                "actor": "0-3",
                "rollout": {"node_group": "b", "placement": "0-3"},
                "env": {"node_group": "arm", "placement": "0:0-1"},
                "agent": {"node_group": "node", "placement": "0-1:0-3"},
            },
            "node_groups": [
                {"label": "b", "node_ranks": "1", "env_configs": [{"node_ranks": 1, "env_vars": [{"A": 1}]}]},
                {
                    "label": "arm",
                    "node_ranks": [2],
                    "hardware": {"type": "Franka", "configs": [{"node_rank": 2, "robot_ip": "10.0.0.1"}]},
                },
            ],
        },
        "actor": {
            "model": {"tensor_model_parallel_size": 2, "model_path": "/nowhere", "precision": "fp16"},
            "offload_weight": True,
            "optim": {"lr": "1e-06", "lr_scheduler": "cosine"},
        },
        "rollout": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
    },
    "roll": {
        "num_gpus_per_node": 8,
        "num_nodes": 2,
        "train": {**TRAIN, "prompts_per_step": 16, "max_staleness": 0, "minibatch_size": None},
        "async_generation_ratio": 0,
        "rollout_batch_size": 32,
        "dual_clip_loss": True,
        "pg_clip": 0.2,
        "adv_estimator": "reinforce",
        "advantage_clip": 2.0,
        "whiten_advantages": True,
        "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
        "gamma": 1,
        "sequence_length": 2048,
        "eval_steps": -1,
        "system_envs": {"A": "1"},
        "pretrain": "/nowhere",
        "actor_train": {
            "device_mapping": "list(range(0,16))",
            "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}},
        },
        "actor_infer": {
            "device_mapping": [0, 1, 2, 3],
            "strategy_args": {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}},
            "num_gpus_per_worker": 2,
            "generating_args": {"max_new_tokens": 9, "temperature": 1, "top_p": 1, "top_k": -1},
        },
        "rewards": {
            "rule": {"world_size": 4},
            "judge": {"device_mapping": "0-3", "strategy_args": {"strategy_name": "sglang"}},
        },
        "train_env_manager": {"num_env_groups": 4, "group_size": 2, "max_env_num_per_worker": 4},
    },
    "loop": {
        "train": {**TRAIN, "clip_range": None, "max_staleness": None},
        "rl": {
            "params": {
                "ppo_epsilon": 0.1,
                "baseline": "leave_one_out",
                "rollouts_per_scenario": 8,
            },
            "optimization": {
                "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-6, "betas": [0.9, 0.95]},
                "lr_scheduler": {"_target_": "get_const_lr"},
            },
            "dtype": "bf16",
            "num_scenario_runners": 4,
            "eval": {"enable": True, "eval_every_n_iterations": 5, "overrides": {"llm": {"temperature": 0.0}}},
            "async_rollouts": False,
            "inference_requires_memory_gb": 20,
            "learning_requires_memory_gb": 20,
            "gpu_allocation": {"learning_gpus": [0, 1, 2, 3], "inference_gpus": [2, 3]},
        },
        "llm": {
            "base_model_path": "/nowhere",
            "lora_rank": 4,
            "lora_target_modules": ["q_proj"],
            "adapter_path": None,
            "vllm_class": {"max_new_tokens": 9, "top_k": None},
            "max_gpu_mem_utilization": 0.9,
            "vllm_server": {"gpus_per_vllm_server": 2, "max_model_len": 4096},
        },
    },
}
MACHINES = {"nodes": [{"count": 3, "accelerators": 4, "memory_gb": 80, "host_memory_gb": 512}]}
ODD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    10**9,
    10**40,
    16**5000,
    1.5,
    float("inf"),
    float("nan"),
    "",
    " ",
    "all",
    "0-1",
    "0-99",
    "-",
    "0:0",
    "x",
    "x" * 5000,
    "${nowhere}",
    "${cluster}",
    "${oc.env:NOWHERE}",
    "\x00",
    "\x1b[2J",
    "~nobody/x",
    "list(range(0,4))",
    "[0",
    [],
    {},
    [[]],
    [None],
    [0, 0],
    [{}],
    {"a": 1},
    {"placement": "0"},
    {"node_rank": 0},
    {"device_mapping": "x"},
    {None: 1},
    {1: {2: 3}},
]


def places(value, path=()):
    """The paths of all values in a config."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


def changed(config, path, value):
    copied = copy.deepcopy(config)
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_plan_as_they_are(name):
    assert roost.plan(CONFIGS[name]).components


@settings(max_examples=400)
@given(st.data(), st.sampled_from(sorted(CONFIGS)), st.booleans())
def test_one_odd_value(data, name, on_machines):
    config = CONFIGS[name]
    path = data.draw(st.sampled_from(list(places(config))))
    mutated = changed(config, path, data.draw(st.sampled_from(ODD)))
    try:
        plan = roost.plan(mutated, MACHINES if on_machines else None)
    except roost.ConfigError as error:
        assert error.findings
        assert all(finding.what and str(finding) for finding in error.findings)
        return
    # As text: a plan that holds NaN equals no other.
    assert roost.Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@settings(max_examples=200)
@given(st.data())
def test_odd_machines(data):
    described = {
        "nodes": [
            {"accelerators": 8, "memory_gb": 80, "hardware": {"Franka": 1}, "count": 2, "accelerator_type": "NV_GPU"}
        ],
        "node_groups": [
            {
                "label": "a",
                "node_ranks": "0",
                "hardware": "Franka",
                "software": [{"node_ranks": 0, "env_vars": {"A": 1}}],
            }
        ],
    }
    path = data.draw(st.sampled_from(list(places(described))))
    mutated = changed(described, path, data.draw(st.sampled_from(ODD)))
    try:
        roost.plan({"cluster": {"num_nodes": 1, "component_placement": {"actor": "all"}}}, mutated)
    except roost.ConfigError as error:
        assert error.findings
