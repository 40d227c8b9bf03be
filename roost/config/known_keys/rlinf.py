"""Keys of RLinf that no setting declares: followed otherwise, or not, with the reasons."""

from __future__ import annotations

from dataclasses import replace

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

TEMPLATE = replace(DATA, reason="the template writes the places of images", harmless=(None, True))
CHOICES = Known(Effect.NOTHING, "robo2vlm has columns of fixed names, and no reward reads solutions")
TABLES = Known(
    Effect.TRAINING, "it belongs to an agent of RLinf's that Roost does not have", "write the agent in train.task"
)
EPISODES = Known(
    Effect.TRAINING, "it belongs to RLinf's embodied or video data, which Roost does not read", "remove it"
)
FINE_TUNING = Known(Effect.TRAINING, "it belongs to RLinf's supervised data", "write it for roost sft")
BATCH = Known(Effect.NOTHING, "RLinf evaluates the whole validation set at once")
AGENT = Known(Effect.TRAINING, "train.task runs the episodes", "set it in train.task")
AGENT_LOOP = Known(
    Effect.TRAINING,
    "it belongs to an agent or a tool of RLinf's that Roost does not have; it has search servers and code judges",
    "write train.task: AgentScenario with an agent that calls them (docs/agents.md)",
)
TURNS = Known(Effect.NOTHING, "Roost learns from all turns of an episode, whatever their number")
BATCHES = Known(Effect.TRAINING, "Roost learns from all samples of a step", "remove it")
FORMAT = Known(
    Effect.TRAINING,
    "of samples with a reward Roost prefers those with fewer failed tool calls; the format is for the reward to judge",
    "write a reward for the format",
)
SCHEDULE = Known(
    Effect.TRAINING,
    "Roost's schedules are constant, linear, cosine or wsd after a warm-up from 0, and weight decay is constant",
    "write lr_scheduler_type, warmup_steps, decay_steps and min_learning_rate in train",
)
CYCLES = replace(SCHEDULE, harmless=(None, 0.5))
CRITIC = Known(
    Effect.TRAINING,
    "the critic has the policy's optimizer but for critic_learning_rate and critic_lr_warmup_steps",
    "remove it",
)
PEAK = Known(Effect.NOTHING, "RLinf's highest rate is optim.lr")
EMBODIED = Known(
    Effect.TRAINING,
    "it belongs to RLinf's embodied algorithms, which Roost does not have",
    "write advantage_estimator in train",
)
STALENESS = Known(
    Effect.TRAINING, "Roost's engines get the new weights after every step", "write max_staleness in train"
)
EARLY_STOP = Known(Effect.TRAINING, "a run of Roost ends after its steps or passes", "write max_steps in train")
OF_EARLY_STOP = Known(Effect.NOTHING, "RLinf reads it only with runner.early_stop.enabled")
ONLY_EVAL = Known(Effect.TRAINING, "Roost trains", "remove it")
MODEL_CHANGE = Known(
    Effect.TRAINING, "Roost trains all weights, or an adapter on all linear layers, with no other loss", "remove it"
)
SPEED = Known(Effect.SPEED, "it tunes RLinf's workers, which Roost does not run")
UNREAD = Known(Effect.NOTHING, "RLinf does not read it")
ORDER = Known(Effect.NOTHING, "RLinf evaluates every task, in whatever order")
NAMES = Known(Effect.NOTHING, "a name of RLinf's workers")
LEARNER = Known(Effect.BACKEND, "set-up of RLinf's learner; Roost's has its own")
TOKENIZER = Known(Effect.BACKEND, "the model's own tokenizer is used")
ENGINE = Known(Effect.BACKEND, "set-up of RLinf's engine", "write engine_options in train")

TABLE = (
    Entry(
        PLACING,
        """cluster.** runner.{task_type,seq_length}
        {actor,critic,inference,reference,actor_inference,critic_inference}.model.tensor_model_parallel_size
        {actor,critic,inference,reference,actor_inference,critic_inference}.model.pipeline_model_parallel_size
        {actor,critic,inference,reference,actor_inference,critic_inference}.model.context_parallel_size
        {actor,critic,inference,reference,actor_inference,critic_inference}.model.{expert_model_parallel_size,expert_tensor_parallel_size}
        actor.model.seq_length
        {actor,critic,inference,reference,actor_inference,critic_inference}.model.{model_path,precision,is_lora,lora_rank}
        {actor,critic,inference,reference}.{micro_batch_size,training_backend,enable_offload,offload_weight,offload_grad,offload_optimizer}
        {actor,critic,inference,reference}.fsdp_config.{sharding_strategy,fsdp_size}
        {rollout,reward,env}.model.{model_path,precision,is_lora,lora_rank}
        rollout.{tensor_parallel_size,pipeline_parallel_size,gpu_memory_utilization,enable_sleep_mode,rollout_backend}
        critic.use_critic_model algorithm.recompute_logprobs""",
    ),
    Entry(CHOICES, "data.{choice_key,solution_key}"),
    Entry(TEMPLATE, "data.use_chat_template"),
    Entry(TABLES, "data.{is_markdown,unique_columns,is_hybrid,enable_zh,norm_column}"),
    Entry(
        EPISODES,
        """data.{video_root,video_backend,video_fps,video_nframes,video_max_pixels,video_tolerance_s,video_in_chunk_offsets}
        data.{tasks,task_subtasks.**,modalities,sampling_mode,behavior_dataset_root,fine_grained_level,macro_stride}
        data.{tolerance_s,use_skill,data_root,repo_id}""",
    ),
    Entry(
        FINE_TUNING,
        """data.{eval_data_paths,answer_separator,data_path,train_data_path,val_data_path,dataset_path,split,max_length}
        data.max_seq_length runner.val_split""",
    ),
    Entry(BATCH, "data.val_rollout_batch_size"),
    Entry(
        REWARD,
        "reward.{standalone_realworld,reward_mode,reward_threshold,env_reward_weight,reward_weight,model.**}",
    ),
    Entry(AGENT_LOOP, "agentloop.** tools.** agentlightning.**"),
    Entry(AGENT, "agent.** env.** eval.**"),
    Entry(LOGGING, "agentloop.print_outputs"),
    Entry(TURNS, "agentloop.is_dynamic_rollout_batch"),
    Entry(BATCHES, "algorithm.max_num_gen_batches"),
    Entry(
        Known(Effect.FOLLOWED, "keep_generations and others in train"),
        "algorithm.down_sampling.do_down_sampling",
    ),
    Entry(FORMAT, "algorithm.down_sampling.down_sampling_config.roc_answer_format"),
    Entry(
        SCHEDULE,
        """actor.optim.{warmup_style,lr_warmup_fraction,lr_decay_steps,value_lr,critic_warmup_steps}
        actor.lr_sched.{lr_warmup_init,start_weight_decay,end_weight_decay,weight_decay_incr_style}""",
    ),
    Entry(CYCLES, "{actor,critic}.optim.num_cycles"),
    Entry(PEAK, "{actor,critic}.lr_sched.max_lr"),
    Entry(
        CRITIC,
        """critic.optim.{weight_decay,adam_beta1,adam_beta2,adam_eps,clip_grad,optimizer,value_lr,critic_warmup_steps}
        critic.optim.{lr_scheduler,min_lr,min_lr_rate,lr_warmup_steps_ratio,total_training_steps,warmup_style}
        critic.optim.{lr_warmup_fraction,lr_decay_steps}
        critic.lr_sched.{lr_decay_style,lr_warmup_fraction,lr_warmup_init,lr_decay_iters,min_lr,start_weight_decay}
        critic.lr_sched.{end_weight_decay,weight_decay_incr_style,lr_wsd_decay_iters,lr_wsd_decay_style}""",
    ),
    Entry(
        EMBODIED,
        """algorithm.{actor_agg_q,agg_q,backup_entropy,bootstrap_type,critic_actor_ratio,critic_subsample_size,dagger.**}
        algorithm.{demo_buffer.**,replay_buffer.**,entropy_tuning.**,enable_drq,entropy_type,kl_penalty}
        algorithm.{logprob_type,num_updates_per_step,reward_coef,reward_type,rewards_lower_bound,rewards_upper_bound}
        algorithm.{target_update_freq,tau,auto_reset,ignore_terminations,require_values,rollout_epoch}
        algorithm.{eval_rollout_epoch,use_fixed_reset_state_ids,length_params.**,num_group_envs,n_chunk_steps}
        algorithm.{staleness_threshold,proximal_logprob_type,offline_data_ratio,bc_coef,filter_rewards}
        algorithm.sampling_params.{temperature_train,temperature_eval,add_BOS}
        {actor,critic}.critic_optim.** actor.sft_loss_weight actor.enable_sft_co_train""",
    ),
    Entry(
        SAMPLING,
        """algorithm.sampling_params.{do_sample,presence_penalty,frequency_penalty}
        rollout.sampling_params.** rollout.{eos,padding}""",
    ),
    Entry(
        LOSS,
        "algorithm.entropy_bonus_type",
    ),
    Entry(START, "runner.{resume_dir,ckpt_path} actor.{checkpoint_load_path,model.ckpt_path,model.lora_path}"),
    Entry(ONLY_EVAL, "runner.only_eval"),
    Entry(EARLY_STOP, "runner.early_stop.enabled runner.early_stop.**"),
    Entry(OF_EARLY_STOP, "runner.early_stop.{patience,min_delta,monitor}"),
    Entry(STALENESS, "actor.sync_weight_no_wait"),
    Entry(
        MODEL_CHANGE,
        "actor.model.{dropout,attention_dropout,hidden_dropout,moe_aux_loss_coeff,moe_router_bias_update_rate}",
    ),
    Entry(FROZEN, "actor.model.{freeze_vit,trainable_modules}"),
    Entry(
        LOGGING,
        """runner.logger.{logger_backends,project_name,log_path,wandb_proxy,**} runner.{log_interval,per_worker_log}
        runner.{per_worker_log_path,print_outputs} reward.random_print_percent
        rollout.{print_outputs,disable_log_stats}""",
    ),
    Entry(FILES, "runner.{experiment_name,output_dir} rollout.validate_save_dir"),
    Entry(
        SPEED,
        """algorithm.logprob_forward_micro_batch_size data.{num_workers,process_workers,process_batch_size,lazy_loading}
        data.{lazy_load,prefetch_factor,parquet_cache_size,pin_memory,persistent_workers}
        {actor,critic,inference,reference}.model.{recompute_*,tp_comm_overlap*,*_fusion}
        {actor,critic,inference,reference}.model.{sequence_parallel,moe_token_dispatcher_type}
        {actor,critic,inference,reference}.model.virtual_pipeline_model_parallel_size
        {actor,critic,inference}.{calculate_flops,enable_dp_load_balance,eval_batch_size,pack_traj}""",
    ),
    Entry(
        UNREAD,
        """algorithm.{rollout_batch_size_per_gpu,val_rollout_batch_size_per_gpu,use_critic,use_value_loss,value_cliprange}
        algorithm.sampling_params.{min_new_tokens,stop_token_ids} runner.{random_seed,num_success_frames}
        runner.{num_fail_frames,fail_success_ratio}""",
    ),
    Entry(ORDER, "data.validation_shuffle"),
    Entry(
        NAMES,
        """{actor,rollout,critic,inference,reward,env,reference,agentloop}.group_name actor.spec_name
        {actor,rollout,critic,inference,reward,env,reference}.channel""",
    ),
    Entry(
        LEARNER,
        """{actor,critic,inference,reference}.{fsdp_config.**,megatron.**,mcore_gpt,checkpoint_save_path,load_from_actor}
        {actor,critic,inference,reference}.{model_type,use_checkpoint} {critic,inference,reference}.checkpoint_load_path
        {actor,critic}.optim.{bf16,fp16,loss_scale,loss_scale_window,initial_loss_scale,min_loss_scale,hysteresis}
        {actor,critic}.optim.{overlap_grad_reduce,overlap_param_gather,overlap_param_gather_with_optimizer_step}
        {actor,critic}.optim.{use_distributed_optimizer,use_precision_aware_optimizer}
        critic.optim.optimizer_cpu_offload
        {actor,critic}.optim.{optimizer_enable_pin,optimizer_offload_fraction,align_param_gather,fused,foreach}""",
    ),
    Entry(MODEL, "{actor,critic,inference,reference,rollout}.model.**"),
    Entry(TOKENIZER, "{actor,critic,inference,reference,rollout,reward}.tokenizer.**"),
    Entry(ENGINE, "rollout.**"),
    Entry(HYDRA, "hydra.** defaults.**"),
    Entry(PLACING, "train.**"),
)
# Sections in which a key that is not in the table is unknown; elsewhere it is the user's own.
OWNED = ("algorithm", "data", "reward", "runner", "actor", "critic")
