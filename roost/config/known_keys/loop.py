"""Keys of ml-loop that no setting declares: followed otherwise, or not, with the reasons."""

from __future__ import annotations

from roost.config.known_keys.tables import FILES, HYDRA, LOGGING, PLACING, SAMPLING, Effect, Entry, Known

TASK = Known(Effect.TRAINING, "train.task runs the episodes and chooses the scenarios", "set it in train.task")
ADAPTER = Known(Effect.TRAINING, "Roost's adapters are on all linear layers, without dropout", "remove it")
TOKENIZER = Known(
    Effect.TRAINING, "the model's own tokenizer and chat template are used", "save them in the model's folder"
)
START = Known(Effect.TRAINING, "Roost starts from the base model", "merge the adapter into the model first")
EVALUATION = Known(
    Effect.TRAINING,
    "the evaluations of Roost have settings of their own",
    "write eval_tasks, eval_samples and eval_temperature in train",
)
OPTIMIZER = Known(
    Effect.TRAINING,
    "Roost's schedules are constant, linear, cosine or wsd, over the run",
    "write lr_scheduler_type, warmup_steps, decay_steps and min_learning_rate in train",
)
UNREAD = Known(Effect.TRAINING, "ml-loop reads it in rl.params alone", "write it in rl.params")
SPEED = Known(Effect.SPEED, "it tunes ml-loop's workers, which Roost does not run")
LEARNER = Known(Effect.BACKEND, "set-up of ml-loop's learner; Roost's has its own")
ENGINE = Known(Effect.BACKEND, "set-up of ml-loop's servers", "write engine_options in train")

TABLE = (
    Entry(
        PLACING,
        """rl.gpu_allocation.** rl.{async_rollouts,inference_requires_memory_gb,learning_requires_memory_gb}
        rl.recompute_rollout_probs llm.vllm_server.{gpus_per_vllm_server,enable_sleep_mode}
        llm.{max_gpu_mem_utilization,base_model_path,lora_rank} train.**""",
    ),
    Entry(TASK, "rl.{scenario_runner,scenario_sampler}.** rl.extra_appworld_datasets.** appworld.**"),
    Entry(UNREAD, "rl.{high_kl_threshold,skip_outlier_grads,rloo_kl_lambda}"),
    Entry(SAMPLING, "llm.vllm_class.{frequency_penalty,presence_penalty,stop,**} llm.frequency_penalty"),
    Entry(TOKENIZER, "llm.{chat_template,tokenizer_path}"),
    Entry(ADAPTER, "llm.{lora_dropout,lora_bias} llm.lora.**"),
    Entry(START, "llm.adapter_path"),
    Entry(EVALUATION, "rl.eval.{script,overrides.**,summaries.**,scenario_sampler.**,n_iterations}"),
    Entry(OPTIMIZER, "rl.optimization.optimizer.{amsgrad,maximize} rl.optimization.lr_scheduler.**"),
    Entry(LOGGING, "wandb.** dry_run wandb_project log_dir"),
    Entry(FILES, "rl.cloud_path llm.parameter_count"),
    Entry(SPEED, "rl.{stress_test_iters,fsdp} rl.optimization.optimizer.fused llm.compile_torch_model"),
    Entry(LEARNER, "rl.accelerate.**"),
    Entry(ENGINE, "llm.vllm_server.** llm.vllm_class._target_ llm.inference_server_class.**"),
    Entry(HYDRA, "hydra.** defaults.**"),
)
OWNED = ("rl", "llm")
