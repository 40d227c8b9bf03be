"""Keys of verl that no setting follows from, with the reasons."""

from __future__ import annotations

from dataclasses import replace

from roost.config.known_keys.tables import DATA, FILES, LOGGING, NOT_FOLLOWED, OFF, REWARD, START, Effect, Entry, Known

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUPS, CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"
CLIP_RATIO = 0.2
_SPEED = Known(Effect.SPEED, "it tunes verl's workers, which Roost does not run")
_BACKEND = Known(Effect.BACKEND, "it sets up parts of verl that Roost does not run")
_OTHER_CLIP = Known(
    Effect.TRAINING,
    "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 where they are left out",
    "write clip_ratio_low and clip_ratio_high",
    (None, CLIP_RATIO),
)
_SERVED = Known(Effect.NOTHING, "engines compute in the learner's compute_dtype, which is the same")
_SHAPED = Known(Effect.NOTHING, "overlong shaping counts from max_new_tokens")
_SAMPLED = Known(Effect.TRAINING, "Roost samples until all groups of a step differ", "remove it", (None, 0))
_GENERATED = Known(
    Effect.TRAINING,
    "a step has data.train_batch_size prompts, and dynamic sampling takes others one at a time",
    "remove it, or write the number of prompts as data.train_batch_size",
)
_METRIC = Known(Effect.NOTHING, "groups with equal rewards are replaced")
_CHOSEN = Known(Effect.NOTHING, "bypass_mode says whether the ratio is against the engine's log-probs")
_PURE_GRADIENT = Known(
    Effect.TRAINING, "Roost clips the ratio, as ppo_clip does", "remove it, or write ppo_clip", (None, "ppo_clip")
)
_LOOP = Known(
    Effect.TRAINING,
    "it changes how samples are generated, and Roost does not run verl's agent loops",
    "write an agent or an environment in train.task",
    (None, "", "null", "single_turn_agent"),
)
_BEFORE = Known(
    Effect.NOTHING, "Roost evaluates before the first step wherever eval_every is above 0", harmless=(None, True)
)
_OFF = replace(NOT_FOLLOWED, harmless=OFF)  # off in verl too
TABLE = (
    Entry(LOGGING, "trainer.{logger,project_name,experiment_name,log_val_generations,rollout_data_dir}"),
    Entry(LOGGING, "trainer.validation_data_dir *.disable_log_stats"),
    Entry(_BEFORE, "trainer.val_before_train"),
    Entry(FILES, "trainer.{default_local_dir,default_hdfs_dir,del_local_ckpt_after_load} *.checkpoint.*"),
    Entry(START, "trainer.{resume_mode,resume_from_path}"),
    Entry(
        _SPEED,
        """*micro_batch_size* *use_dynamic_bsz *max_token_len_per_gpu *.enable_gradient_checkpointing
        *.enable_activation_offload *.use_remove_padding *.use_torch_compile *.enforce_eager *.enable_chunked_prefill
        *.enable_prefix_caching *.max_num_batched_tokens *.max_num_seqs *.max_model_len *.load_format *.layered_summon
        *.use_shm trainer.balance_batch data.{filter_overlong_prompts_workers,dataloader_num_workers}
        *.log_prob_* *.update_weights_bucket_megabytes *.free_cache_engine *.forward_prefetch *.fsdp_size""",
    ),
    Entry(_LOOP, "*.agent.{default_agent_loop,agent_loop_config_path}"),
    Entry(_BACKEND, "*fsdp_config.* *.megatron.* ray_kwargs.* *.engine_kwargs.* *.mode *.agent.* *.override_config.*"),
    Entry(_BACKEND, "actor_rollout_ref.ref.* *.profiler.* *.trust_remote_code data.{return_raw_chat,tokenizer}"),
    Entry(replace(NOT_FOLLOWED, harmless=(None, "constant")), "*.optim.lr_decay_style"),
    # With true verl samples at val_kwargs.temperature, as Roost does.
    Entry(replace(NOT_FOLLOWED, harmless=(*OFF, True)), "*.val_kwargs.do_sample"),
    Entry(
        _OFF,
        """*.{ignore_eos,skip_rollout,skip.enable,prometheus.enable,use_prefix_grouper}
        *.{calculate_entropy,calculate_sum_pi_squared,sum_pi_squared_checkpointing,entropy_checkpointing,use_liger}
        *.{entropy_from_logits_with_chunking,tiled_mlp.enabled,trace.token2text,mtp.enable}
        *.{multi_turn.enable,multi_turn.use_inference_chat_template,over_sample_rate,optim.lr_warmup_steps_ratio}
        algorithm.{use_pf_ppo,use_kl_in_reward} trainer.esi_redundant_time critic.{enable,shuffle}
        critic.optim.min_lr_ratio global_profiler.*""",
    ),
    Entry(
        replace(DATA, harmless=OFF),
        "data.{return_raw_input_ids,return_full_prompt,validation_shuffle,trust_remote_code,use_shm,need_tools_kwargs}",
    ),
    Entry(
        replace(REWARD, harmless=OFF),
        "{reward,reward_model}.{enable,enable_resource_pool,launch_reward_fn_async,reward_model.enable}",
    ),
    Entry(_SERVED, f"{ROLLOUT}.dtype"),
    Entry(_OTHER_CLIP, f"{ACTOR}.clip_ratio"),
    Entry(_PURE_GRADIENT, f"{CORRECTION}.loss_type"),
    Entry(_CHOSEN, f"{ROLLOUT}.calculate_log_probs {ACTOR}.use_rollout_log_probs"),
    Entry(_SAMPLED, f"{GROUPS}.max_num_gen_batches"),
    Entry(_GENERATED, "data.gen_batch_size"),
    Entry(_METRIC, f"{GROUPS}.metric"),
    Entry(
        _SHAPED,
        """{reward,reward_model}.reward_kwargs.max_resp_len {reward,reward_model}.reward_kwargs.overlong_buffer_cfg.log
        reward_model.overlong_buffer.log""",
    ),
    Entry(_SPEED, "critic.{ppo_*,forward_*} *.use_fused_kernels *.expert_parallel_size *.multi_stage_wake_up *.dtype"),
    Entry(
        _BACKEND,
        """critic.{strategy,megatron.*,model.*} trainer.{use_legacy_worker_impl,device} *.override_optimizer_config.*
        *.optim.optimizer_impl""",
    ),
    Entry(REWARD, "reward.* reward_model.* custom_reward_function.*"),
    Entry(DATA, "data.*"),
)
