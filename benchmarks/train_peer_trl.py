"""TRL's side, run by the interpreter that has `trl`: `train_peer_trl.py MODEL SETTINGS FILE`.

SETTINGS is a JSON object: the workload, `micro_batch` (samples in one pass), `generation` (dynamic or static, the cache
of `generate`, continuous, transformers' continuous batching, or vllm, in the same process), `threads`, and `device`
(cpu or cuda). For each step a JSON object is written to FILE: when it ended (seconds since the epoch), what was
generated, the mean reward and the norm of the gradient.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from train_workload import Workload, prompt, reward


def main() -> None:
    model, settings, file = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(settings["threads"])
    workload = Workload(**settings["workload"])
    with tempfile.TemporaryDirectory() as folder, file.open("w") as out:
        chosen = options(
            workload, settings["micro_batch"], settings["generation"], folder, settings.get("device", "cpu")
        )
        new_trainer(model, workload, chosen, out).train()


def new_trainer(model: str, workload: Workload, chosen: dict[str, Any], out: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    samples: list[tuple[int, float]] = []  # length and reward of the samples of this step

    def liked(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [reward(ids) for ids in completion_ids]
        samples.extend(zip(map(len, completion_ids), rewards, strict=True))
        return rewards

    return GRPOTrainer(
        # Without dropout, training and evaluation mode are the same.
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=liked,
        args=GRPOConfig(**chosen),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt(workload, index)} for index in range(workload.steps * workload.prompts)]
        ),
        processing_class=tokenizer,
        callbacks=[step_writer(samples, out)],
    )


def options(workload: Workload, micro_batch: int, generation: str, folder: str, device: str) -> dict[str, Any]:
    """TRL's settings. Work that Roost does not do here is off: recomputation, checkpoints, printed completions."""
    on_gpu = {"use_cpu": False, "bf16": True, "optim": "adamw_torch_fused"}  # weights stay in float32, as Roost's do
    return {
        "output_dir": folder,
        "max_steps": workload.steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": workload.samples // micro_batch,
        "num_generations": workload.group_size,
        "max_completion_length": workload.max_tokens,
        "temperature": 1.0,
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "num_iterations": 1,
        "beta": 0.0,
        "loss_type": "grpo",
        **(on_gpu if device == "cuda" else {"use_cpu": True, "bf16": False}),
        **(vllm_options(workload) if generation == "vllm" else {}),
        "gradient_checkpointing": False,
        "use_transformers_continuous_batching": generation == "continuous",
        "cache_implementation": "static" if generation == "static" else None,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": workload.seed,
    }


def vllm_options(workload: Workload) -> dict[str, Any]:
    """The engine sleeps while the model learns, so its share of the device can hold all samples of a step at once."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": workload.prompt_tokens + workload.max_tokens,
    }


def step_writer(samples: list[tuple[int, float]], out: Any) -> Any:
    from transformers import TrainerCallback

    class StepWriter(TrainerCallback):
        """Writes a line when a step is over, logging included."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if not samples:  # the summary at the end
                return
            row = {
                "step": state.global_step,
                "time": time.time(),
                "tokens": sum(length for length, _ in samples),
                "reward": mean(reward for _, reward in samples),
                "grad_norm": logs.get("grad_norm"),
                "samples": len(samples),
            }
            print(json.dumps(row), file=out, flush=True)
            print(f"TRL: step {row['step']}, {row['tokens']} tokens", file=sys.stderr, flush=True)
            samples.clear()

    return StepWriter()


if __name__ == "__main__":
    main()
