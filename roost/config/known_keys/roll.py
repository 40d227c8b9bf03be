"""Keys of ROLL that no setting declares: followed otherwise, or not, with the reasons."""

from __future__ import annotations

from roost.config.known_keys.tables import (
    DATA,
    FILES,
    FROZEN,
    HYDRA,
    LOGGING,
    LOSS,
    MODEL,
    PLACING,
    REWARD,
    SAMPLING,
    START,
    Effect,
    Entry,
    Known,
)

ENVIRONMENT = Known(Effect.TRAINING, "train.task runs the episodes", "set it in train.task")
EVALUATION = Known(Effect.TRAINING, "the evaluations of Roost have settings of their own", "write eval_tasks in train")
CRITIC = Known(
    Effect.TRAINING, "the critic has the policy's settings but for its learning rate and warm-up", "remove it"
)
MODEL_CHANGE = Known(Effect.TRAINING, "Roost trains all weights, or an adapter on all linear layers", "remove it")
OTHER_TRAINING = Known(
    Effect.TRAINING,
    "it belongs to ROLL's DPO, which Roost does not have",
    "remove it",
)
JUDGE_TEMPLATE = Known(Effect.BACKEND, "a reward's engine applies its model's own chat template")
WORKERS = Known(Effect.BACKEND, "a class of ROLL's workers; Roost has its own")
SCHEDULE = Known(
    Effect.TRAINING,
    "Roost's schedules are constant, linear, cosine or wsd",
    "write lr_scheduler_type, warmup_steps and min_learning_rate in train",
)
MODEL_CONFIG = Known(
    Effect.TRAINING, "Roost builds the model from its own config.json", "change the config.json of a copy of the model"
)
SPEED = Known(Effect.SPEED, "it tunes ROLL's workers, which Roost does not run")
UNREAD = Known(Effect.NOTHING, "ROLL does not read it")
UNUSED = Known(Effect.NOTHING, "ROLL reads it for no prompt of RLVR; the training columns and template are used")
COPIES = Known(Effect.NOTHING, "it makes batches divisible by copying samples; Roost's need not be divisible")
OVERWRITTEN = Known(Effect.NOTHING, "ROLL overwrites it")
SOURCE = Known(Effect.NOTHING, "only other keys refer to it")
POLICIES = "{actor_train,student_train}"  # roles that learn from rewards or on their own samples
LEARNERS = "{actor_train,student_train,sft_train,student}"
LEARNER = Known(Effect.BACKEND, "set-up of ROLL's learner; Roost's has its own")
STRATEGY = Known(Effect.BACKEND, "options of a backend that Roost does not use, or sets up by itself")

TABLE = (
    Entry(Known(Effect.FOLLOWED, "clip_range and clip_range_high in train"), "use_pg_clip_range"),
    Entry(
        Known(Effect.FOLLOWED, "task in train"),
        """custom_envs.*.{env_type,env_config,env_manager_cls,max_steps,max_tokens_per_step,history_length}
        custom_envs.*.{agent_system_template,agent_template,pre_step_template,next_step_template}""",
    ),
    Entry(
        PLACING,
        """num_gpus_per_node num_nodes async_generation_ratio pretrain reward_pretrain teacher_pretrain train.**
        system_envs.**
        prompt_length response_length sequence_length adv_estimator enable_reference use_kl_loss
        ROLE.{device_mapping,num_gpus_per_worker,world_size,system_envs.**}
        ROLE.strategy_args.strategy_name
        ROLE.strategy_args.strategy_config.{tensor_parallel_size,pipeline_parallel_size,data_parallel_size}
        ROLE.strategy_args.strategy_config.{tensor_model_parallel_size,pipeline_model_parallel_size,context_parallel_size}
        ROLE.strategy_args.strategy_config.{expert_model_parallel_size,gpu_memory_utilization,mem_fraction_static}
        ROLE.strategy_args.strategy_config.{expert_tensor_parallel_size,enable_sleep_mode,fsdp_size}
        ROLE.model_args.{model_name_or_path,dtype,lora_rank,lora_target,ulysses_size}
        ROLE.training_args.per_device_train_batch_size
        {train,val}_env_manager.{num_env_groups,group_size,group_size_redundancy,max_env_num_per_worker}""",
    ),
    Entry(
        Known(Effect.FOLLOWED, "data in train"),
        "{actor_train,student_train}.data_args.domain_interleave_probs.** tag_to_template.**",
    ),
    Entry(
        Known(Effect.FOLLOWED, "teacher in train"),
        "reference.{opd_kl_coef,tag_included} teacher.*.{opd_kl_coef,tag_included}",
    ),
    Entry(UNUSED, "ROLE.data_args.{id,response} validation.data_args.{messages,prompt,tag,domain_interleave_probs.**}"),
    Entry(
        DATA,
        """ROLE.data_args.{template,file_name,eval_file_name,dataset_type,domain_interleave_probs,domain_interleave_probs.**}
        ROLE.data_args.{tag,prompt,messages,dataset_name,eval_dataset_name,custom_data_kwargs_func,max_samples}
        ROLE.data_args.{chosen,rejected,system,**} vlm_filter.** val_prompt_length val_sequence_length""",
    ),
    Entry(
        REWARD,
        "rewards.*.{response_filter_config.**,reward_manager_config,generating_args.**}",
    ),
    Entry(
        JUDGE_TEMPLATE,
        "rewards.*.data_args.template {reward,reward_model}.{worker_cls,data_args.**,generating_args.**}",
    ),
    Entry(UNREAD, "rewards.*.format_pattern rewards.*.generating_args.{num_return_sequences,num_beams}"),
    Entry(
        ENVIRONMENT,
        """custom_envs.*.** custom_envs.*.{tool_wrapper.**,agent_runner_cls}
        {train,val}_env_manager.{llm_proxy.**,generating_args.**,worker_cls,group_filter_cls}
        parse_tool_call_parameter_to_dict skip_mock_system_prompt
        agent_config_common.** rollout_mock.** user_defined_rollout_loop_cls""",
    ),
    Entry(
        SAMPLING,
        """ENGINE.generating_args.include_stop_str_in_output
        validation.generating_args.{stop_strings,repetition_penalty}
        ENGINE.generating_args.{presence_penalty,frequency_penalty,min_p,eos_token_id,pad_token_id}""".replace(
            "ENGINE", "{actor_infer,student_infer,validation}"
        ),
    ),
    Entry(
        EVALUATION,
        "validation.data_args.** val_greedy val_n_sample",
    ),
    Entry(
        LOSS,
        """mask_type postive_loss_coef use_topr_neg_loss_coef use_policy_loss_type
        use_topr_loss l2 minibatch_data_iter_num
        teachers_kl_coef""",
    ),
    Entry(
        Known(Effect.FOLLOWED, "rollout_is and rollout_rejection in train"),
        "train_infer_correction.{filters.**,is_weight.detach}",
    ),
    Entry(
        CRITIC,
        """critic.training_args.{weight_decay,warmup_ratio,lr_scheduler_type,adam_beta1,adam_beta2}
        critic.training_args.{adam_epsilon,gradient_accumulation_steps,num_train_epochs}""",
    ),
    Entry(
        MODEL_CHANGE,
        f"{LEARNERS}.model_args.{{lora_dropout,additional_target,adapter_name_or_path,moe_aux_loss_coef}}",
    ),
    Entry(FROZEN, f"{LEARNERS}.model_args.freeze_module_prefix"),
    Entry(
        OTHER_TRAINING,
        "chosen_key rejected_key beta ipo label_smoothing dpo.** sft_loss_weight",
    ),
    Entry(
        Known(Effect.TRAINING, "the teacher sees the policy's own prompt, without a solution", "remove it"),
        "opsd_mode opsd_solution_key opsd_max_solution_length",
    ),
    Entry(Known(Effect.BACKEND, "Roost sends the teacher's distribution through Ray"), "logits_transfer_backend"),
    Entry(
        Known(Effect.NOTHING, "ROLL cannot read the column of difficulties, and weighs all samples alike"),
        "difficulty_loss_weight",
    ),
    Entry(WORKERS, "ROLE.worker_cls ROLE.name"),
    Entry(START, "resume_from_checkpoint"),
    Entry(SCHEDULE, f"{LEARNERS}.training_args.lr_scheduler_kwargs.**"),
    Entry(MODEL_CONFIG, f"{LEARNERS}.model_args.model_config_kwargs.**"),
    Entry(LOGGING, "track_with tracker_kwargs.** logging_dir logging_steps report_length_and_rewards"),
    Entry(
        FILES,
        """output_dir base_dir checkpoint_config.** rollout_dump_dir render_save_dir save_logging_board_dir
        length_profiler_dir profiler_output_dir profiler_timeline profiler_memory model_name""",
    ),
    Entry(
        SPEED,
        """rpc_timeout generate_opt_level is_num_return_sequences_expand max_running_requests
        max_additional_running_prompts local_rank is_offload_states balance_length
        is_offload_optimizer_states_in_train_step model_update_buffer_size_mb model_download_type router_args.**
        teacher.use_sequence_packing
        ROLE.{infer_batch_size,model_update_frequency,backend_timeout,max_concurrency,offload_nccl,use_sequence_packing}
        ROLE.{use_dynamic_batching_in_train,max_tokens_per_microbatch_in_train,sequence_length_round_in_train}
        ROLE.{use_dynamic_batching_in_infer,max_tokens_per_microbatch_in_infer,sequence_length_round_in_infer}
        ROLE.{sequence_packing_args.**,logits_in_fp32,apply_loss_scale}
        ROLE.data_args.{preprocessing_num_workers,cache_path,num_workers}
        custom_envs.*.{use_thread_lock,max_env_step_concurrent} {train,val}_env_manager.max_traj_per_env""",
    ),
    Entry(
        UNREAD,
        """add_len_reward use_reward_scaling use_reward_norm reward_norm reward_scale reward_shift pg_variant
        ROLE.use_remove_padding validation.eval_steps {train,val}_env_manager.format_penalty
        ROLE.generating_args.{do_sample,num_beams,length_penalty,max_length,logprobs} ROLE.pg_variant
        ROLE.data_args.{dataset_dir,interleave_probs,overwrite_cache} dataset_filter.**
        {actor_infer,student_infer,reference,critic,teacher}.data_args.template teacher.*.data_args.template
        validation.data_args.template""",
    ),
    Entry(
        OVERWRITTEN,
        f"""{{actor_infer,student_infer}}.generating_args.num_return_sequences
        validation.generating_args.max_new_tokens student.training_args.{{max_steps,seed}}
        {POLICIES}.training_args.{{num_train_epochs,max_steps,seed}}
        ROLE.checkpoint_config.**""",
    ),
    Entry(
        SOURCE,
        """max_tokens_per_step max_actions_per_traj env_manager_cls agent_runner_cls *_template *_pattern
        default_history_length *_format_penalty custom_env.**""",
    ),
    Entry(
        LEARNER,
        """enable_old_logprobs_recompute pure_opd_pipeline_type teacher.** ROLE.training_args.**
        ROLE.model_args.{disable_gradient_checkpointing,gradient_checkpointing_use_reentrant}
        ROLE.model_args.{attn_implementation,flash_attn,device_map,vision_dp,autocast_adapter_dtype}
        ROLE.{model_args.**,generating_args.**}""",
    ),
    Entry(
        STRATEGY,
        """ROLE.strategy_args.strategy_config.**
        ROLE.strategy_args.strategy_config.virtual_pipeline_model_parallel_size""",
    ),
    Entry(MODEL, "ROLE.model_args.{model_type,num_labels,model_config_kwargs.**}"),
    Entry(COPIES, "batch_adjust_mode"),
    Entry(HYDRA, "hydra.** defaults.**"),
)
OWNED = (
    *("", "ROLE", "rewards", "train_env_manager", "val_env_manager", "reward_normalization"),
    "train_infer_correction",
)
