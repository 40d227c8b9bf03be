"""A job composed from a tree of groups as ml-loop's is: what its files and overrides say arrives as written."""

import pytest

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.config.train import AdvantageEstimator, LrSchedulerType, value_of

TREE = {
    "config.yaml": """
defaults:
  - rl/optimization: adamw_const_lr
  - rl/gpu_allocation: six_learn_two_infer
  - rl/params: default
  - llm: small_train
  - _self_
experiment_name: null
rl:
  seed: null
  fsdp: True
  cloud_path: experiments/${experiment_name}/${now:%Y-%m-%d}/
  max_ckpts: 7
  async_rollouts: False
  recompute_rollout_probs: True
  dtype: bf16
  num_scenario_runners: null
  rollouts_fraction: 0.9
  rollouts_per_scenario_fraction: 0.75
  eval: {enable: False, eval_every_n_iterations: 1}
""",
    "global/appworld.yaml": """
defaults:
  - _self_
  - /rl/scenario_sampler: train
experiment_name: my-agents
rl:
  scenario_runner: {_target_: my_agents.Runner}
  eval:
    enable: True
    eval_every_n_iterations: 5
    overrides:
      llm: {temperature: 0.0}
      rl: {params: {rollouts_per_scenario: 2}}
""",
    "rl/scenario_sampler/train.yaml": "_target_: my_agents.Sampler\ndataset_name: train\n",
    "rl/gpu_allocation/four_learn_four_infer.yaml": "learning_gpus: [0,1,2,3]\ninference_gpus: [4,5,6,7]\n",
    "rl/optimization/adamw_const_lr.yaml": """
optimizer: {_target_: torch.optim.AdamW, fused: True, weight_decay: 0.02, lr: 3e-5}
lr_scheduler: {_target_: phi_agents.rl.rl_utils.get_const_lr}
""",
    "rl/params/default.yaml": """
total_iterations: 90
epochs_per_iteration: 3
scenarios_per_iteration: 16
rollouts_per_scenario: 8
minibatch_size: 64
loss_type: pg_per_token
do_ppo_clipping: True
ppo_epsilon: 0.1
abs_adv_threshold: 0.02
pos_adv_only: false
max_grad_norm: 0.25
baseline: leave_one_out
adv_normalization: false
strictly_on_policy: false
""",
    "rl/params/debug.yaml": """
defaults: [default]
total_iterations: 1000
scenarios_per_iteration: 2
rollouts_per_scenario: 2
minibatch_size: 4
ppo_epsilon: 0.25
""",
    "llm/small_train.yaml": "defaults: [small_eval]\ntemperature: 0.5\n",
    "llm/small_eval.yaml": """
inference_server_class: phi_agents.vllm.vllm_server.VLLMServer
vllm_server: {max_model_len: 32_768, gpus_per_vllm_server: 4, enable_prefix_caching: True, eager_mode: False}
vllm_class: {_target_: phi_agents.rl.llm.VLLMQwen25, max_new_tokens: 700, top_p: null, top_k: null, min_p: null}
base_model_path: some/model
adapter_path: null
lora_target_modules: ["q_proj", "v_proj"]
lora_rank: 4
lora_alpha: 12
lora_dropout: 0.0
temperature: 0.1
""",
}
COMMAND = ("rl/gpu_allocation=four_learn_four_infer", "+global@_global_=appworld")
AS_WRITTEN = {
    "name": "my-agents",
    "task": {"_target_": "my_agents.Runner"},
    "model": "some/model",
    "max_steps": 90,
    "prompts_per_step": 16,
    "num_generations": 8,
    "ppo_epochs": 3,
    "minibatch_size": 64,
    "rollout_fraction": 0.9,
    "group_fraction": 0.75,
    "learning_rate": 3e-5,
    "weight_decay": 0.02,
    "max_grad_norm": 0.25,
    "lr_scheduler_type": LrSchedulerType.CONSTANT,
    "advantage_estimator": AdvantageEstimator.LEAVE_ONE_OUT,
    "normalize_by_std": False,
    "min_abs_advantage": 0.02,
    "clip_range_high": 0.1,
    "max_new_tokens": 700,
    "temperature": 0.5,
    "top_p": 1.0,
    "lora_rank": 4,
    "lora_alpha": 12,
    "lora_target_modules": ("q_proj", "v_proj"),
    "compute_dtype": "bfloat16",
    "engine": "vllm",
    "engine_options": {"max_context": 32768},
    "keep_checkpoints": 7,
    "eval_every": 5,
    "eval_samples": 2,
    "eval_temperature": 0.0,
}


@pytest.fixture
def config(tmp_path):
    for name, text in TREE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "config.yaml"


def read(config, *overrides):
    findings = Findings()
    source = load(config, [*COMMAND, "+train={}", *overrides], findings)
    assert source is not None, findings.found
    job = read_job(source, findings)
    assert not findings.errors
    warned = [(warning.where.key_path, warning.what) for warning in findings.warnings]
    assert warned == [("rl.scenario_sampler", "is not followed")]
    return job


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        pytest.param((), {}, id="nothing"),
        pytest.param(
            ("rl/params=debug",),
            {
                "max_steps": 1000,
                "prompts_per_step": 2,
                "num_generations": 2,
                "minibatch_size": 4,
                "clip_range_high": 0.25,
            },
            id="debug",
        ),
        pytest.param(
            ("rl.params.total_iterations=3", "rl.optimization.optimizer.lr=1e-4", "llm.lora_rank=16"),
            {"max_steps": 3, "learning_rate": 1e-4, "lora_rank": 16},
            id="single-keys",
        ),
        pytest.param(("rl.params.adv_normalization=true",), {"normalize_by_std": True}, id="normalised"),
        pytest.param(("+train.engine=torch",), {"engine": "torch", "engine_options": {}}, id="engine-of-train"),
        pytest.param(
            ("+train.engine_options.max_context=64",), {"engine_options": {"max_context": 64}}, id="options-of-train"
        ),
    ],
)
def test_a_composed_job_arrives_as_written(config, overrides, changed):
    settings = read(config, *overrides).training
    for name, value in {**AS_WRITTEN, **changed}.items():
        assert value_of(settings, name) == (pytest.approx(value) if isinstance(value, float) else value), name


def test_devices_of_a_composed_job(config):
    actor, rollout = read(config).components
    assert (actor.requested.devices, rollout.requested.devices) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert rollout.parallel.tensor == 4
    assert (actor.model.path, actor.model.lora_rank) == ("some/model", 4)
