"""Settings that only a run shows: passes over the data, and the engine that one of ROLL's strategies starts."""

import json

import pytest

from tests.local_ray import ACCELERATORS
from tests.trainer.live.jobs import ARITHMETIC, config, trained


@pytest.mark.long
def test_a_run_ends_after_its_passes_over_the_data(model, tmp_path):
    """Nine tasks, four of a step: two steps a pass, and the ninth is left over."""
    job = config(model, {"actor": 0, "rollout": 1})
    del job["train"]["max_steps"]
    reported = []
    done = trained({**job, "runner": {"max_steps": -1, "max_epochs": 2}}, tmp_path / "run", reported=reported)
    assert done.state.step == len(done.run.steps()) == 4
    assert "4 steps: max_epochs 2 over 9 tasks, 4 of them a step" in reported


def test_fewer_tasks_than_a_step_takes(model, tmp_path):
    job = config(model, {"actor": 0, "rollout": 1}, prompts_per_step=10)
    del job["train"]["max_steps"]
    with pytest.raises(ValueError, match="max_epochs 2 makes no step: the task has 9 training tasks, a step uses 10"):
        trained({**job, "runner": {"max_epochs": 2}}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_built_in_engine_for_hugging_faces_in_rolls_notation(model, tmp_path):
    drawn = {"max_new_tokens": 3, "top_p": 1, "top_k": -1}
    job = {
        "num_gpus_per_node": ACCELERATORS,
        "pretrain": str(model),
        "actor_train": {"device_mapping": [0]},
        "actor_infer": {
            "device_mapping": [1],
            "strategy_args": {"strategy_name": "hf_infer"},
            "generating_args": drawn,
        },
        "adv_estimator": "reinforce",
        "max_steps": 1,
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 2,
        "train": {"task": ARITHMETIC, "engine_options": {"max_context": 64}},
    }
    assert trained(job, tmp_path / "run").state.step == 1


@pytest.mark.long
def test_a_script_of_verl(model, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "reward_model": {"ground_truth": str(a + b)}} for a in range(3) for b in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    arguments = f"""algorithm.adv_estimator=rloo data.train_files={tmp_path}/train.jsonl data.train_batch_size=4
        data.max_prompt_length=8 data.max_response_length=3 actor_rollout_ref.model.path={model}
        {actor}.ppo_mini_batch_size=4 {rollout}.n=2 {rollout}.name=hf {rollout}.tensor_model_parallel_size=1
        trainer.n_gpus_per_node=1 trainer.total_training_steps=1 +train.engine_options.max_context=64"""
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {' '.join(arguments.split())}\n")
    done = trained(script, tmp_path / "run")
    assert done.state.step == len(done.run.steps()) == 1


@pytest.mark.long
def test_a_script_of_trl(model, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"""--num_processes 1 --model_name_or_path {model} --dataset_name {tmp_path}/train.jsonl --max_steps 2
        --num_generations 2 --per_device_train_batch_size 4 --steps_per_generation 2 --max_completion_length 3
        --loss_type dr_grpo --scale_rewards False --learning_rate 1e-4 --gradient_checkpointing False
        train.engine_options.max_context=64
        train.rewards.exact._target_=roost.rollout.rewards.math_answer.ExactAnswer"""
    script = tmp_path / "run.sh"
    script.write_text(f"trl grpo {' '.join(flags.split())}\n")
    done = trained(script, tmp_path / "run")
    assert done.state.step == len(done.run.steps()) == 1
