"""Words and numbers of the three notations, and those that Roost does not follow."""

import re

import pytest

from roost.config.compose import load
from roost.config.data import Teacher
from roost.config.findings import Findings
from roost.config.job import TRAINED, Notation
from roost.config.notations.dialects import DERIVED_FROM, UNLIKE
from roost.config.notations.notation import read_job
from roost.config.notations.rlinf_train import ADV_TYPES
from roost.config.notations.roll_train import ADV_ESTIMATORS
from roost.config.notations.words import AGGREGATIONS, SCHEDULES
from roost.config.train import (
    SETTINGS,
    AdvantageEstimator,
    AdvantageLevel,
    DiscountLevel,
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    OldLogprobs,
    OptimizerType,
    PolicyLoss,
    RewardScope,
    Whitening,
    WsdDecayStyle,
    value_of,
)
from tests.config.test_training_read import config_of, merged, read, whats
from tests.grid import grid

RLINF, ROLL, LOOP = TRAINED


def case(notation, written, *, id, **expected):
    """Keys as dotted paths, and what the settings become."""
    return pytest.param(notation, written, expected, id=f"{notation}-{id}")


def with_all(config, written):
    for path, value in written.items():
        config = merged(config, path.split("."), value)
    return config


MEGATRON_ACTOR = {"actor.training_backend": "megatron"}
MEGATRON_LEARNER = {"actor_train.strategy_args.strategy_name": "megatron_train"}
LOW, HIGH = "algorithm.clip_ratio_low", "algorithm.clip_ratio_high"
EACH = "actor_train.training_args.per_device_train_batch_size"
ROUNDS = "actor_train.training_args.gradient_accumulation_steps"
GROUP_SIZE = "num_return_sequences_in_group"
LORA, BACKEND = "actor.model.is_lora", "rollout.rollout_backend"
STRATEGY = "actor_train.strategy_args"
MEGATRON = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}}
EIGHT = {
    "num_gpus_per_node": 8,
    "actor_train.device_mapping": "list(range(0,8))",
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
}
PG_WORKER = {"actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"}
NORMALIZE = "algorithm.normalize_advantages"
DRAWN = "actor_infer.generating_args"
BY_GROUP = {"grouping": "traj_group_id", "method": "mean_std"}
ADAMW = "rl.optimization.optimizer"
TWO_LEARNERS = "rl.gpu_allocation.learning_gpus"
ENVIRONMENTS = {"train_env_manager": {"num_env_groups": 8, "group_size": 16}}
CRITIC = {"cluster.component_placement": {"actor,critic": 0, "rollout": 1}}
DOMAINS = {"rewards": {"math": {"world_size": 1}, "code": {"world_size": 1}}}
MASKS = {
    "max_len_mask": True,
    "difficulty_mask": True,
    "difficulty_low_threshold": 0.1,
    "error_max_len_clip": True,
    "error_max_len_threshold": 9,
}
TOKEN_KL = {"add_token_level_kl": True, "kl_penalty": "k3", "target_kl": 0.1, "kl_horizon": 10}


@grid(
    ("notation", "written", "expected"),
    [
        case(RLINF, {"algorithm.ratio_clip_eps": 0.25}, clip_range=0.25, clip_range_high=0.25, id="clip"),
        case(
            RLINF, {"algorithm.ratio_clip_eps": 0.25, HIGH: 0.5}, clip_range=0.25, clip_range_high=0.5, id="clip-high"
        ),
        case(
            RLINF, {"algorithm.ratio_clip_eps": 0.25, LOW: None}, clip_range=0.25, clip_range_high=0.25, id="clip-null"
        ),
        case(RLINF, {LOW: 0.5, HIGH: 0.5}, clip_range=0.5, clip_range_high=0.5, id="clip-range"),
        case(RLINF, {"algorithm.recompute_logprobs": True}, old_logprobs=OldLogprobs.RECOMPUTE, id="recomputes"),
        case(RLINF, {"algorithm.recompute_logprobs": False}, old_logprobs=OldLogprobs.ROLLOUT, id="does-not-recompute"),
        case(
            RLINF,
            {"algorithm.importance_sampling_fix": True, "algorithm.importance_sampling_clip": 5},
            old_logprobs=OldLogprobs.DECOUPLED,
            importance_weight_cap=5,
            id="weighs-by-the-engine",
        ),
        case(
            RLINF,
            {"algorithm.recompute_logprobs": True, "train.max_staleness": 1},
            old_logprobs=OldLogprobs.DECOUPLED,
            id="recomputes-with-a-lag",
        ),
        case(
            RLINF,
            {"algorithm.kl_beta": 0.1, "algorithm.kl_penalty_type": "kl"},
            kl_coef=0.1,
            kl_estimator=KlEstimator.K1,
            id="divergence",
        ),
        case(RLINF, {"algorithm.kl_beta": 0, "algorithm.kl_penalty_type": "abs"}, kl_coef=0, id="no-divergence"),
        case(RLINF, {"algorithm.n_minibatches": 4, "actor.global_batch_size": 8}, minibatch_size=64, id="counted"),
        case(RLINF, {"actor.global_batch_size": 128}, minibatch_size=128, id="sized"),
        case(
            RLINF,
            {"actor.lr_sched.lr_decay_style": "cosine"},
            lr_scheduler_type=LrSchedulerType.COSINE,
            id="decay-style",
        ),
        case(
            RLINF,
            {"actor.optim.lr_scheduler": "torch_constant"},
            lr_scheduler_type=LrSchedulerType.CONSTANT,
            id="scheduler",
        ),
        case(
            RLINF,
            {
                **MEGATRON_ACTOR,
                "actor.lr_sched": {
                    "lr_decay_style": "linear",
                    "lr_decay_iters": 40,
                    "lr_warmup_fraction": 0.1,
                    "lr_warmup_iters": 9,
                    "min_lr": 1e-7,
                },
                "actor.optim": {"lr": 1e-6, "min_lr": 5e-7, "lr_warmup_steps": 7},
            },
            lr_scheduler_type=LrSchedulerType.LINEAR,
            decay_steps=40,
            warmup_ratio=0.1,
            warmup_steps=0,
            min_learning_rate=1e-7,
            id="schedule-of-megatron",
        ),
        case(
            RLINF,
            {
                **MEGATRON_ACTOR,
                "actor.lr_sched": {"lr_decay_style": "WSD", "lr_decay_iters": 40, "lr_wsd_decay_iters": 8},
                "actor.optim": {"lr": 1e-6, "optimizer": "muon", "optimizer_cpu_offload": True},
            },
            lr_scheduler_type=LrSchedulerType.WSD,
            wsd_decay_steps=8,
            wsd_decay_style=WsdDecayStyle.EXPONENTIAL,
            optimizer=OptimizerType.MUON,
            optimizer_cpu_offload=True,
            id="muon-and-wsd-of-megatron",
        ),
        case(
            ROLL,
            {"actor_train.training_args.optim": "adamw_bnb_8bit"},
            optimizer=OptimizerType.ADAMW_8BIT,
            id="8bit-adamw-of-roll",
        ),
        case(
            LOOP,
            {"rl.optimization.optimizer._target_": "torch.optim.Muon"},
            optimizer=OptimizerType.MUON,
            id="muon-of-ml-loop",
        ),
        case(
            RLINF,
            {**MEGATRON_ACTOR, "actor.lr_sched": {"lr_warmup_fraction": None, "lr_warmup_iters": 9}},
            warmup_ratio=0,
            warmup_steps=9,
            decay_steps=None,
            id="warm-up-of-megatron",
        ),
        case(
            RLINF,
            {
                "actor.training_backend": "fsdp",
                "actor.lr_sched": {"lr_decay_iters": 10, "min_lr": 1e-7, "lr_warmup_iters": 3},
                "actor.optim": {
                    "lr": 1e-6,
                    "lr_scheduler": "cosine",
                    "total_training_steps": 50,
                    "lr_warmup_steps": 5,
                    "min_lr_rate": 0.1,
                },
                "algorithm.n_minibatches": 4,
            },
            lr_scheduler_type=LrSchedulerType.COSINE,
            decay_steps=200,
            warmup_steps=20,
            min_learning_rate=1e-7,
            id="schedule-of-fsdp",
        ),
        case(
            RLINF,
            {
                "actor.training_backend": "fsdp",
                "actor.optim": {"lr_scheduler": "cosine", "total_training_steps": 50, "lr_warmup_steps": 5},
                "actor.global_batch_size": 16,
                "algorithm.n_minibatches": None,
                "data.rollout_batch_size": 8,
                "algorithm.group_size": 8,
            },
            decay_steps=200,
            warmup_steps=20,
            id="schedule-of-fsdp-by-batch-size",
        ),
        case(
            RLINF,
            {
                "actor.training_backend": "fsdp",
                "actor.optim": {"lr_scheduler": "cosine", "total_training_steps": 50, "lr_warmup_steps": 5},
                "algorithm.n_minibatches": 2,
                "algorithm.update_epoch": 3,
            },
            decay_steps=300,
            warmup_steps=30,
            id="schedule-of-fsdp-with-epochs",
        ),
        case(
            RLINF,
            {
                "actor.training_backend": "fsdp",
                "actor.optim": {
                    "lr_warmup_steps": -1,
                    "lr_warmup_steps_ratio": 0.05,
                    "total_training_steps": 100,
                    "min_lr": 0.0,
                },
            },
            warmup_ratio=0.05,
            warmup_steps=0,
            decay_steps=100,
            id="warm-up-ratio-of-fsdp",
        ),
        case(
            RLINF,
            {"actor.optim": {"lr_scheduler": "torch_cosine", "total_training_steps": 9, "lr_warmup_steps_ratio": 0.5}},
            lr_scheduler_type=LrSchedulerType.COSINE,
            warmup_ratio=0,
            decay_steps=9,
            min_learning_rate=1e-6,
            id="cosine-of-torch",
        ),
        case(RLINF, {"actor.optim.lr_warmup_steps": 6}, warmup_steps=6, id="warm-up"),
        case(
            RLINF,
            {"algorithm.clip_log_ratio_min": -10, "algorithm.clip_log_ratio_max": 5},
            log_ratio_clip=10,
            log_ratio_clip_high=5,
            id="log-ratios",
        ),
        case(RLINF, {"algorithm.clip_log_ratio_min": None}, log_ratio_clip=20, id="no-clamp"),
        case(RLINF, {**MEGATRON_ACTOR, "algorithm.early_stop_imp_ratio": 5.0}, max_mean_ratio=5, id="early-stop"),
        case(
            RLINF,
            {"actor.training_backend": "fsdp", "algorithm.early_stop_imp_ratio": 5.0},
            max_mean_ratio=0,
            id="early-stop-of-fsdp",
        ),
        case(
            RLINF,
            {"algorithm.loss_agg_func": "token-mean", "algorithm.training_batch_size_per_gpu": 1, **MEGATRON_ACTOR}
            | {"algorithm.use_valid_token_scale": True},
            loss_aggregation=LossAggregation.TOKEN_MEAN,
            id="exact-mean-of-tokens",
        ),
        case(
            RLINF,
            {"runner.enable_dynamic_batch_size": True, "runner.max_tokens_per_mbs": 28672},
            micro_batch_tokens=28672,
            id="dynamic-batches",
        ),
        case(
            RLINF,
            {"runner.enable_dynamic_batch_size": False, "runner.max_tokens_per_mbs": 28672},
            micro_batch_tokens=8192,
            id="fixed-batches",
        ),
        case(
            RLINF,
            {
                "algorithm.down_sampling.do_down_sampling": True,
                "algorithm.down_sampling.down_sampling_config": {
                    "down_sample_to_n": 16,
                    "reject_equal_reward": False,
                    "roc_error_ratio": True,
                    "min_zero_reward_trace_num": 2,
                    "min_non_zero_reward_trace_num": 3,
                },
            },
            keep_generations=16,
            keep_others=2,
            keep_positive=3,
            keep_by_tool_errors=True,
            drop_equal_groups=False,
            id="down-sampling",
        ),
        case(
            RLINF,
            {
                "algorithm.down_sampling.do_down_sampling": False,
                "algorithm.down_sampling.down_sampling_config.down_sample_to_n": 16,
            },
            keep_generations=0,
            id="no-down-sampling",
        ),
        case(
            LOOP,
            {"rl.abs_log_prob_diff_threshold": 0.7, "rl.learning_max_seq_len": 16000},
            max_logprob_mismatch=0.7,
            max_learn_tokens=16000,
            id="mismatch-and-length",
        ),
        case(
            LOOP,
            {"rl.abs_log_prob_diff_threshold": float("inf"), "rl.learning_max_seq_len": None},
            max_logprob_mismatch=0,
            max_learn_tokens=None,
            id="no-mismatch-and-length",
        ),
        case(LOOP, {}, early_stop_kl=20, skip_outlier_gradients=False, id="limits-left-out"),
        case(
            LOOP,
            {"rl.params.high_kl_threshold": 3.5, "rl.params.skip_outlier_grads": True},
            early_stop_kl=3.5,
            skip_outlier_gradients=True,
            id="limits",
        ),
        case(LOOP, {"rl.params.high_kl_threshold": float("inf")}, early_stop_kl=0, id="no-limit"),
        case(
            RLINF,
            {"critic.optim.lr_warmup_steps": 6, "critic.optim.lr": 1e-5, **CRITIC},
            critic_lr_warmup_steps=6,
            id="critic",
        ),
        case(
            ROLL,
            {
                "critic": {"device_mapping": [0], "training_args": {"warmup_steps": 5}},
                "actor_train.training_args.warmup_steps": 9,
            },
            critic_lr_warmup_steps=5,
            warmup_steps=9,
            id="warm-up-of-the-critic",
        ),
        case(
            ROLL,
            {
                "actor_train.training_args.lr_scheduler_type": "cosine_with_min_lr",
                "actor_train.training_args.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
                "actor_train.training_args.learning_rate": 1e-6,
                "actor_train.training_args.warmup_ratio": 0.03,
            },
            lr_scheduler_type=LrSchedulerType.COSINE,
            warmup_ratio=0.03,
            min_learning_rate=1e-7,
            id="least-rate",
        ),
        case(
            ROLL,
            {
                "actor_train.training_args.lr_scheduler_type": "warmup_stable_decay",
                "actor_train.training_args.lr_scheduler_kwargs": {
                    "num_decay_steps": 4,
                    "decay_type": "linear",
                    "min_lr_ratio": 0.1,
                },
                "actor_train.training_args.learning_rate": 1e-6,
            },
            lr_scheduler_type=LrSchedulerType.WSD,
            wsd_decay_steps=4,
            wsd_decay_style=WsdDecayStyle.LINEAR,
            min_learning_rate=1e-7,
            id="warm-up-stable-decay-of-roll",
        ),
        case(
            ROLL,
            {
                **MEGATRON_LEARNER,
                "actor_train.training_args.lr_scheduler_type": "warmup_stable_decay",
                "actor_train.training_args.lr_scheduler_kwargs": {
                    "wsd_decay_steps": 4,
                    "lr_wsd_decay_style": "linear",
                    "min_lr": 1e-7,
                    "lr_decay_steps": 20,
                },
                "actor_train.training_args.learning_rate": 1e-6,
            },
            lr_scheduler_type=LrSchedulerType.WSD,
            decay_steps=20,
            wsd_decay_steps=4,
            wsd_decay_style=WsdDecayStyle.LINEAR,
            min_learning_rate=1e-7,
            id="warm-up-stable-decay-of-megatron",
        ),
        case(
            LOOP,
            {
                "rl.optimization.lr_scheduler": {
                    "_target_": "transformers.get_cosine_schedule_with_warmup",
                    "num_warmup_steps": 10,
                },
                "rl.params.total_iterations": 50,
            },
            lr_scheduler_type=LrSchedulerType.COSINE,
            warmup_ratio=0.2,
            id="cosine",
        ),
        case(
            RLINF,
            {LORA: True, "actor.model.lora_rank": 8},
            lora_rank=8,
            lora_alpha=16,
            id="lora",
        ),
        case(RLINF, {LORA: False, "actor.model.lora_rank": 8}, lora_rank=None, id="no-lora"),
        case(RLINF, {"actor.model.precision": "bf16"}, compute_dtype="bfloat16", weight_dtype="float32", id="bf16"),
        case(
            RLINF,
            {"actor.fsdp_config.gradient_checkpointing": False},
            activation_checkpointing=False,
            id="fsdp-recomputes-nothing",
        ),
        case(
            RLINF,
            {"actor.training_backend": "megatron", "actor.model.recompute_granularity": "full"},
            activation_checkpointing=True,
            id="megatron-recomputes-all",
        ),
        case(
            RLINF,
            {"actor.training_backend": "megatron", "actor.model.recompute_granularity": "selective"},
            activation_checkpointing=False,
            id="megatron-recomputes-attention",
        ),
        case(
            RLINF,
            {"actor.model.tensor_model_parallel_size": 2, "actor.model.recompute_granularity": "selective"},
            activation_checkpointing=False,
            id="without-a-backend-megatrons-key-counts",
        ),
        case(
            RLINF,
            {"actor.fsdp_config.gradient_checkpointing": False, "actor.model.recompute_granularity": "full"},
            activation_checkpointing=False,
            id="without-a-backend-fsdps-key-comes-first",
        ),
        case(RLINF, {"actor.model.precision": "32"}, compute_dtype="float32", id="precision-as-a-word"),
        case(
            RLINF,
            {"algorithm.adv_type": "raw"},
            advantage_estimator=AdvantageEstimator.REWARD,
            whiten_advantages=Whitening.NONE,
            id="raw",
        ),
        case(
            RLINF,
            {"algorithm.adv_type": "reinpp"},
            advantage_estimator=AdvantageEstimator.REWARD,
            whiten_advantages=Whitening.TOKENS_CLAMPED,
            id="reinpp",
        ),
        case(RLINF, {"algorithm.adv_type": "gae"} | CRITIC, whiten_advantages=Whitening.TOKENS_BIASED, id="gae"),
        case(
            RLINF,
            {"algorithm.adv_type": "gae", NORMALIZE: False} | CRITIC,
            whiten_advantages=Whitening.NONE,
            id="gae-as-it-is",
        ),
        case(
            RLINF,
            {"algorithm.adv_type": "gae", "algorithm.gamma": 0.9, "algorithm.gae_lambda": 0.5} | CRITIC,
            gamma=0.9,
            gae_lambda=0.5,
            id="gae-discounts",
        ),
        case(RLINF, {"algorithm.adv_type": "grpo", "algorithm.gamma": 0.9}, gamma=1.0, id="grpo-does-not-discount"),
        case(
            RLINF,
            {"algorithm.adv_type": "grpo_dynamic"},
            advantage_level=AdvantageLevel.SAMPLE,
            step_gamma=0.0,
            id="dynamic-by-turn",
        ),
        case(
            RLINF,
            {"algorithm.adv_type": "grpo_dynamic", "algorithm.advantage_mode": "trajectory"},
            advantage_level=AdvantageLevel.EPISODE,
            step_gamma=0.0,
            id="dynamic-by-trajectory",
        ),
        case(RLINF, {NORMALIZE: True}, whiten_advantages=Whitening.TOKENS_BIASED, id="normalised"),
        case(RLINF, {NORMALIZE: False}, whiten_advantages=Whitening.NONE, id="not-normalised"),
        case(RLINF, {"actor.training_backend": "fsdp"}, dual_clip=3.0, id="dual-clip-of-fsdp"),
        case(RLINF, {"actor.training_backend": "megatron"}, dual_clip=None, id="dual-clip-of-megatron"),
        case(
            RLINF,
            {"actor.training_backend": "fsdp", "algorithm.clip_ratio_c": None},
            dual_clip=None,
            id="dual-clip-switched-off",
        ),
        case(
            RLINF,
            {"actor.training_backend": "fsdp", "algorithm.clip_ratio_c": 5.0},
            dual_clip=5.0,
            id="dual-clip-as-written",
        ),
        case(RLINF, {"algorithm.entropy_bonus": 0.5}, entropy_coef=0.5, id="entropy"),
        case(
            RLINF,
            {"algorithm.entropy_bonus": 0.5, "algorithm.calculate_entropy": False},
            entropy_coef=0,
            id="entropy-not-computed",
        ),
        case(RLINF, {"runner.max_steps": 7}, max_steps=7, max_epochs=None, id="steps"),
        case(RLINF, {"runner.max_steps": -1, "runner.max_epochs": 3}, max_steps=None, max_epochs=3, id="epochs"),
        case(RLINF, {"runner.max_epochs": 3}, max_steps=None, max_epochs=3, id="epochs-alone"),
        case(RLINF, {"runner.max_steps": 7, "runner.max_epochs": 3}, max_steps=7, max_epochs=3, id="steps-and-epochs"),
        case(
            RLINF,
            {"runner.max_steps": -1, "runner.max_epochs": 3, "runner.task_type": "embodied"},
            max_steps=3,
            max_epochs=None,
            id="epochs-without-data",
        ),
        case(
            RLINF,
            {"runner.max_steps": -1, "runner.max_epochs": 3, "train.max_steps": 9},
            max_steps=9,
            max_epochs=3,
            id="steps-of-train-and-epochs",
        ),
        case(RLINF, {"runner.max_steps": -1, "train.max_steps": 9}, max_steps=9, max_epochs=None, id="steps-of-train"),
        case(RLINF, {"runner.max_steps": 9, "runner.max_epochs": -1}, max_steps=9, max_epochs=None, id="no-epochs"),
        case(RLINF, {"runner.save_interval": -1, "runner.val_check_interval": -1}, checkpoint_every=0, id="no-saves"),
        case(RLINF, {BACKEND: "sglang"}, engine="sglang", id="engine"),
        case(RLINF, {BACKEND: "sglang", "train.engine": "torch"}, engine="torch", id="engine-of-train"),
        case(
            ROLL,
            {},
            clip_range=0.2,
            clip_range_high=0.2,
            dual_clip=None,
            kl_coef=0,
            advantage_estimator=AdvantageEstimator.GAE,
            whiten_advantages=Whitening.NONE,
            max_steps=500,
            prompts_per_step=128,
            num_generations=1,
            seed=42,
            temperature=0.95,
            top_p=0.7,
            top_k=50,
            learning_rate=5e-5,
            weight_decay=0,
            lr_scheduler_type=LrSchedulerType.LINEAR,
            loss_aggregation=LossAggregation.SEQ_MEAN,
            checkpoint_every=50,
            eval_every=0,
            id="nothing",
        ),
        case(
            ROLL,
            {"validation.data_args.template": "a"},
            eval_every=10,
            eval_temperature=0.95,
            eval_top_p=0.7,
            eval_top_k=50,
            id="tries",
        ),
        case(
            ROLL,
            {"validation.generating_args": {"top_p": 0.6, "top_k": -1}},
            eval_top_p=0.6,
            eval_top_k=0,
            id="tries-otherwise",
        ),
        case(ROLL, {"val_env_manager": {"num_env_groups": 1}}, eval_top_p=None, eval_top_k=None, id="games-as-trained"),
        case(ROLL, {"eval_steps": -1, "val_env_manager": {"num_env_groups": 1}}, eval_every=0, id="never-tries"),
        case(
            ROLL,
            {"adv_estimator": "reinforce"},
            advantage_estimator=AdvantageEstimator.REWARD,
            whiten_advantages=Whitening.NONE,
            id="plain",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", "whiten_advantages": False},
            advantage_estimator=AdvantageEstimator.REWARD,
            whiten_advantages=Whitening.NONE,
            id="not-whitened",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", "whiten_advantages": True},
            advantage_estimator=AdvantageEstimator.REWARD,
            whiten_advantages=Whitening.TOKENS,
            id="whitened",
        ),
        case(
            ROLL,
            {"adv_estimator": "grpo", "whiten_advantages": True, "advantage_clip": 2.0},
            advantage_estimator=AdvantageEstimator.GRPO,
            whiten_advantages=Whitening.TOKENS,
            advantage_clip=2.0,
            id="grpo-whitened",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "group"},
            advantage_estimator=AdvantageEstimator.GRPO,
            id="normalised-by-group",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch"},
            advantage_estimator=AdvantageEstimator.REINFORCE,
            id="normalised-by-batch",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", "norm_mean_type": "batch", "gamma": 0.9, "reward_clip": 5.0},
            advantage_estimator=AdvantageEstimator.REWARD,
            reward_baseline=RewardScope.BATCH,
            gamma=0.9,
            reward_clip=5.0,
            id="mean-alone",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", "norm_mean_type": "batch", "whiten_advantages": True, **DOMAINS},
            reward_baseline=RewardScope.TAG,
            whiten_by_tag=True,
            id="domains-apart",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", **MASKS},
            mask_truncated=True,
            min_group_reward=0.1,
            max_group_reward=1.0,
            max_error_tokens=9,
            id="masks",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", **TOKEN_KL},
            kl_penalty_coef=0.2,
            kl_penalty_estimator=KlEstimator.K3,
            kl_penalty_target=0.1,
            kl_penalty_horizon=10,
            id="token-kl",
        ),
        case(ROLL, {"adv_estimator": "reinforce", "init_kl_coef": 0.5}, kl_penalty_coef=0.0, id="no-token-kl"),
        case(
            ROLL,
            {"rl_loss_coef": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.1},
            policy_loss_coef=0.5,
            kl_coef=0.05,
            id="loss-weight",
        ),
        case(
            ROLL,
            {"adv_estimator": "gigpo", "step_reward_weight": 0.3, "reward_normalization": BY_GROUP, **ENVIRONMENTS},
            advantage_estimator=AdvantageEstimator.GIGPO,
            advantage_level=AdvantageLevel.SAMPLE,
            step_gamma=0.95,
            step_reward_weight=0.3,
            reward_std=RewardScope.GROUP,
            state_normalization="mean_std",
            state_scope="batch",
            id="gigpo",
        ),
        case(
            ROLL,
            {"adv_estimator": "gigpo", **ENVIRONMENTS},
            advantage_estimator=AdvantageEstimator.GIGPO,
            step_gamma=0.95,
            reward_baseline=RewardScope.NONE,
            reward_std=RewardScope.NONE,
            state_normalization="none",
            id="gigpo-without-normalisation",
        ),
        case(
            ROLL,
            {"adv_estimator": "step_reinforce", "step_reward_gamma": 0.5, **ENVIRONMENTS},
            advantage_estimator=AdvantageEstimator.REWARD,
            step_gamma=0.5,
            id="step-returns",
        ),
        case(
            ROLL,
            {"adv_estimator": "agentic_reinforce", **ENVIRONMENTS},
            discount_level=DiscountLevel.TURN,
            id="discount-by-turn",
        ),
        case(
            ROLL,
            {"adv_estimator": "gae", **ENVIRONMENTS, "reward_normalization": {"grouping": "tags", "method": "mean"}},
            advantage_estimator=AdvantageEstimator.GAE,
            reward_baseline=RewardScope.TAG,
            id="gae-of-tags",
        ),
        case(LOOP, {"rl.params.rloo_kl_lambda": 0.5}, advantage_offset=0.5, id="offset"),
        case(
            ROLL,
            {"adv_estimator": "grpo", **ENVIRONMENTS},
            advantage_estimator=AdvantageEstimator.REWARD,
            id="grpo-of-agents",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", **ENVIRONMENTS, "reward_normalization": BY_GROUP},
            advantage_estimator=AdvantageEstimator.GRPO,
            id="agents-by-group",
        ),
        case(
            ROLL,
            {"adv_estimator": "reinforce", **ENVIRONMENTS, "reward_normalization": {"method": "identity"}},
            advantage_estimator=AdvantageEstimator.REWARD,
            id="agents-as-they-are",
        ),
        case(RLINF, {"algorithm.shuffle_rollout": False}, shuffle_minibatches=False, id="order"),
        case(ROLL, {f"{DRAWN}.stop_strings": ["</code>"]}, stop_strings=("</code>",), id="stop-strings"),
        case(ROLL, {f"{DRAWN}.repetition_penalty": 1.1}, repetition_penalty=1.1, id="repetition"),
        case(ROLL, {f"{DRAWN}.top_k": -1, f"{DRAWN}.top_p": 1}, top_k=0, top_p=1, temperature=0.95, id="all-tokens"),
        case(
            ROLL,
            {**ENVIRONMENTS, "train_env_manager.generating_args.temperature": 0.5},
            temperature=0.5,
            id="drawn-by-environments",
        ),
        case(
            ROLL,
            {**ENVIRONMENTS, f"{DRAWN}.top_p": 1, "train_env_manager.generating_args.temperature": 0.5},
            temperature=0.95,
            id="drawn-by-the-engine",
        ),
        case(ROLL, {"sequence_length": 4096}, max_new_tokens=3072, id="sequence-length"),
        case(ROLL, {"sequence_length": 4096, "prompt_length": 96}, max_new_tokens=4000, id="prompt-length"),
        case(ROLL, {f"{DRAWN}.max_new_tokens": 9}, max_new_tokens=9, id="new-tokens"),
        case(
            ROLL,
            {**ENVIRONMENTS, "sequence_length": 4096, f"{DRAWN}.max_new_tokens": 9},
            max_new_tokens=9,
            id="tokens-of-a-turn",
        ),
        case(ROLL, {"loss_agg_mode": "seq-mean-token-sum"}, loss_aggregation=LossAggregation.SEQ_SUM, id="sums"),
        case(ROLL, {"actor_infer.strategy_args.strategy_name": "hf_infer"}, engine="torch", id="hugging-face"),
        case(
            ROLL,
            {"actor_infer.strategy_args.strategy_name": "vllm", "train.engine": "torch"},
            engine="torch",
            id="engine-of-train",
        ),
        case(ROLL, {"pg_clip": 0.25}, clip_range=0.25, clip_range_high=0.25, id="clip"),
        case(
            ROLL,
            {"pg_clip": 0.25, "pg_clip_high": 0.5},
            clip_range=0.25,
            clip_range_high=0.25,
            id="clip-range-not-used",
        ),
        case(
            ROLL,
            {"pg_clip": 0.25, "pg_clip_low": 0.25, "pg_clip_high": 0.5, "use_pg_clip_range": True},
            clip_range=0.25,
            clip_range_high=0.5,
            id="clip-range",
        ),
        case(ROLL, {"dual_clip_loss": True}, dual_clip=1.4, id="dual-clip"),
        case(ROLL, {"dual_clip_loss": True, "pg_clip": 0.25}, dual_clip=1.5, id="dual-clip-of-the-clip"),
        case(ROLL, {"kl_loss_coef": 0.5}, kl_coef=0, id="divergence-not-used"),
        case(ROLL, {"kl_loss_coef": 0.5, "use_kl_loss": True}, kl_coef=0.5, id="divergence"),
        case(ROLL, {"async_generation_ratio": 0}, max_staleness=0, old_logprobs=OldLogprobs.RECOMPUTE, id="no-lag"),
        case(ROLL, {"async_generation_ratio": 1}, max_staleness=1, old_logprobs=OldLogprobs.DECOUPLED, id="lag"),
        case(ROLL, {"async_generation_ratio": 1.5}, max_staleness=2, id="lag-of-a-part"),
        case(ROLL, {"rollout_batch_size": 64, GROUP_SIZE: 4}, prompts_per_step=64, num_generations=4, id="groups"),
        case(ROLL, {"rollout_batch_size": 64, **ENVIRONMENTS}, prompts_per_step=4, num_generations=16, id="episodes"),
        case(ROLL, {**EIGHT, EACH: 1, ROUNDS: 32}, minibatch_size=256, id="minibatch-of-all-devices"),
        case(
            ROLL, {**EIGHT, EACH: 1, ROUNDS: 32, STRATEGY: MEGATRON}, minibatch_size=128, id="minibatch-of-cut-models"
        ),
        case(ROLL, {**EIGHT, ROUNDS: 32}, minibatch_size=512, id="minibatch-not-given"),
        case(
            ROLL,
            {**PG_WORKER, "actor_train.pg_variant": "vanilla"},
            importance_sampling_level=ImportanceSamplingLevel.NONE,
            id="vanilla",
        ),
        case(
            ROLL,
            {**PG_WORKER, "actor_train.pg_variant": "ppo"},
            importance_sampling_level=ImportanceSamplingLevel.TOKEN,
            id="ppo",
        ),
        case(
            ROLL,
            {**PG_WORKER, "actor_train.pg_variant": "tis", "pg_clip": 0.3},
            loss_type=PolicyLoss.CISPO,
            clip_range=1.0,
            clip_range_high=0.0,
            id="tis",
        ),
        case(
            ROLL,
            {**PG_WORKER, "actor_train.pg_variant": "cispo", "dual_clip_loss": True},
            loss_type=PolicyLoss.CISPO,
            clip_range=0.1,
            clip_range_high=0.1,
            dual_clip=None,
            id="cispo",
        ),
        case(
            ROLL,
            {**PG_WORKER, "actor_train.pg_variant": "topr", "actor_train.topr_positive_weight": 0.5},
            loss_type=PolicyLoss.TOPR,
            topr_positive_weight=0.5,
            topr_negative_weight=1.0,
            id="topr",
        ),
        case(
            ROLL,
            {**PG_WORKER, "actor_train.pg_variant": "kimi15"},
            loss_type=PolicyLoss.KIMI15,
            kimi15_tau=0.1,
            id="kimi15",
        ),
        case(
            ROLL,
            {"importance_sampling": "seq"},
            importance_sampling_level=ImportanceSamplingLevel.SEQUENCE,
            id="gspo",
        ),
        case(
            ROLL,
            {"ratio_type": "segment", **ENVIRONMENTS},
            importance_sampling_level=ImportanceSamplingLevel.TURN_MEAN,
            id="segments",
        ),
        case(
            ROLL,
            {"ratio_type": "segment", "importance_sampling": "token"},
            importance_sampling_level=ImportanceSamplingLevel.TOKEN,
            id="segments-without-environments",
        ),
        case(
            ROLL,
            {"train_infer_correction": {"is_weight": {"enabled": True}}},
            rollout_is=ImportanceSamplingLevel.TOKEN,
            importance_weight_cap=1.2,
            rollout_rejection={},
            id="correction",
        ),
        case(
            ROLL,
            {"async_generation_ratio": 1, "train_infer_correction": {"is_weight": {"enabled": False}}},
            rollout_is=ImportanceSamplingLevel.NONE,
            old_logprobs=OldLogprobs.DECOUPLED,
            id="stale-without-weights",
        ),
        case(
            ROLL,
            {
                "train_infer_correction": {
                    "is_weight": {"enabled": True, "weight_type": "geometric", "upper_bound": None},
                    "filters": [
                        {"enabled": True, "agg_type": "sequence", "ratio_low": 0.5},
                        {"enabled": True, "agg_type": "sequence", "ratio_high": 1.1, "diff_enabled": True},
                        {"agg_type": "token"},
                    ],
                }
            },
            rollout_is=ImportanceSamplingLevel.SEQUENCE,
            importance_weight_cap=0.0,
            rollout_rejection={"trajectory": {"ratio": [0.8, 1.1], "difference": [-0.2, 0.2]}},
            id="filters",
        ),
        case(
            RLINF,
            {"algorithm.loss_type": "decoupled_actor_critic", "algorithm.behave_weight_threshold": 2.0},
            old_logprobs=OldLogprobs.DECOUPLED,
            importance_weight_cap=0.0,
            rollout_rejection={"token": [None, 2.0]},
            id="decoupled",
        ),
        case(ROLL, {"response_length": 99}, max_new_tokens=99, id="response-length"),
        case(ROLL, {"max_ckpt_to_keep": 0}, keep_checkpoints=3, id="keeps-all"),
        case(ROLL, {"max_ckpt_to_keep": 7}, keep_checkpoints=7, id="keeps"),
        case(ROLL, {"actor_train.model_args.lora_rank": 8}, lora_rank=8, id="lora"),
        case(
            ROLL,
            {
                "actor_train.strategy_args.strategy_name": "fsdp2_train",
                "actor_train.model_args.disable_gradient_checkpointing": True,
            },
            activation_checkpointing=False,
            id="no-gradient-checkpointing",
        ),
        case(
            ROLL,
            {
                "actor_train.strategy_args": {
                    "strategy_name": "megatron_train",
                    "strategy_config": {"recompute_granularity": "full"},
                },
                "actor_train.model_args.disable_gradient_checkpointing": True,
            },
            activation_checkpointing=True,
            id="recomputing-of-megatron",
        ),
        case(ROLL, {"actor_train.model_args.dtype": "bf16"}, compute_dtype="bfloat16", id="bf16"),
        case(ROLL, {"actor_infer.strategy_args.strategy_name": "vllm"}, engine="vllm", id="engine"),
        case(ROLL, {"adv_estimator": "grpo"}, gae_lambda=1.0, value_clip=0.2, id="no-critic"),
        case(
            ROLL,
            {"adv_estimator": "gae", "critic_warmup": 3, "loss_agg_mode": "token-mean"},
            gae_lambda=0.95,
            value_clip=0,
            critic_warmup_steps=3,
            value_loss_aggregation=LossAggregation.SEQ_MEAN,
            id="critic",
        ),
        *(
            case(
                RLINF,
                {
                    **CRITIC,
                    "algorithm.adv_type": "gae",
                    "algorithm.loss_agg_func": "seq-mean-token-sum",
                    "algorithm.training_batch_size_per_gpu": size,
                },
                value_loss_aggregation=mode,
                id=f"critic-of-micro-batches-of-{size}",
            )
            for size, mode in ((1, LossAggregation.SEQ_MEAN), (4, LossAggregation.TOKEN_MEAN))
        ),
        case(ROLL, {"train.advantage_estimator": "gae"}, gae_lambda=0.95, value_clip=0, id="critic-of-train"),
        case(ROLL, {"adv_estimator": "gae", "value_clip": 0.5}, value_clip=0.5, id="clip-of-values"),
        case(ROLL, {"adv_estimator": "gae", "train.value_clip": 0.5}, value_clip=0.5, id="clip-of-values-in-train"),
        case(ROLL, {"adv_estimator": "gae", "lambd": 0.5}, gae_lambda=0.5, id="critic-as-written"),
        case(
            ROLL,
            {"actor_train.training_args.lr_scheduler_type": "constant_with_warmup"},
            lr_scheduler_type=LrSchedulerType.CONSTANT,
            id="schedule",
        ),
        case(
            LOOP,
            {},
            clip_range=pytest.approx(0.1 / 1.1),
            clip_range_high=0.1,
            max_staleness=0,
            lora_rank=None,
            max_steps=200,
            prompts_per_step=40,
            num_generations=6,
            ppo_epochs=2,
            minibatch_size=30,
            learning_rate=5e-5,
            weight_decay=0.01,
            max_grad_norm=0.1,
            lr_scheduler_type=LrSchedulerType.CONSTANT,
            advantage_estimator=AdvantageEstimator.LEAVE_ONE_OUT,
            normalize_by_std=False,
            min_abs_advantage=0.01,
            temperature=1.0,
            max_new_tokens=1500,
            top_p=1.0,
            engine="torch",
            id="nothing",
        ),
        case(LOOP, {"rl.params.ppo_epsilon": 0.25}, clip_range=0.2, clip_range_high=0.25, id="clip"),
        case(
            LOOP,
            {"rl.params.do_ppo_clipping": False, "rl.params.loss_type": "pg_per_token"},
            importance_sampling_level=ImportanceSamplingLevel.NONE,
            id="no-clip",
        ),
        case(
            LOOP,
            {"rl.params.loss_type": "pg_per_turn"},
            importance_sampling_level=ImportanceSamplingLevel.TURN,
            id="turn",
        ),
        case(
            LOOP,
            {"rl.params.loss_type": "pg_per_trajectory"},
            importance_sampling_level=ImportanceSamplingLevel.TRAJECTORY,
            id="trajectory",
        ),
        case(
            LOOP,
            {"rl.params.baseline": "leave_none_out"},
            advantage_estimator=AdvantageEstimator.GROUP_MEAN,
            id="baseline",
        ),
        case(
            LOOP,
            {"rl.params.baseline": "leave_one_out", "rl.params.adv_normalization": True},
            advantage_estimator=AdvantageEstimator.LEAVE_ONE_OUT,
            normalize_by_std=True,
            id="normalised",
        ),
        case(LOOP, {"llm.vllm_server.gpus_per_vllm_server": 1}, engine="vllm", id="server"),
        case(LOOP, {"llm.inference_server_class": "phi_agents.vllm.VLLMServer"}, engine="vllm", id="server-class"),
        case(
            LOOP,
            {"llm.vllm_server.max_model_len": 4096, "llm.vllm_server.eager_mode": True},
            engine_options={"max_context": 4096, "args": ("--enforce-eager",)},
            id="server-options",
        ),
        case(
            LOOP,
            {"llm.vllm_server.max_model_len": 4096, "train.engine": "torch"},
            engine="torch",
            engine_options={},
            id="engine-of-train",
        ),
        case(
            LOOP,
            {"rl.num_scenario_runners": 32, TWO_LEARNERS: [0, 1]},
            max_concurrent_episodes=64,
            id="runners-of-each-learner",
        ),
        case(LOOP, {"rl.dtype": "bf16"}, compute_dtype="bfloat16", id="bf16"),
        case(LOOP, {"rl.eval.enable": False, "rl.eval.eval_every_n_iterations": 5}, eval_every=0, id="no-eval"),
        case(
            LOOP,
            {
                "rl.eval.enable": True,
                "rl.eval.eval_every_n_iterations": 5,
                "rl.eval.overrides": {"llm": {"temperature": 0.0}, "rl": {"params": {"rollouts_per_scenario": 2}}},
            },
            eval_every=5,
            eval_samples=2,
            eval_temperature=0,
            id="eval",
        ),
        case(
            LOOP,
            {"rl.optimization.lr_scheduler._target_": "phi_agents.rl.rl_utils.get_const_lr"},
            lr_scheduler_type=LrSchedulerType.CONSTANT,
            id="schedule",
        ),
        case(LOOP, {"rl.async_rollouts": True}, max_staleness=1, old_logprobs=OldLogprobs.DECOUPLED, id="lag"),
        case(LOOP, {"rl.recompute_rollout_probs": True}, old_logprobs=OldLogprobs.RECOMPUTE, id="recomputes"),
        case(
            LOOP,
            {"rl.recompute_rollout_probs": False, "rl.async_rollouts": True},
            old_logprobs=OldLogprobs.ROLLOUT,
            id="does-not-recompute",
        ),
        case(LOOP, {"rl.params.minibatch_size": 60}, minibatch_size=60, id="minibatch"),
        case(LOOP, {"rl.params.strictly_on_policy": True}, minibatch_size=240, id="on-policy"),
        case(LOOP, {f"{ADAMW}.betas": [0.5, 0.75]}, adam_beta1=0.5, adam_beta2=0.75, id="betas"),
        case(LOOP, {f"{ADAMW}.betas": "x"}, adam_beta1=0.9, adam_beta2=0.999, id="betas-of-no-use"),
        case(
            LOOP,
            {"llm.lora_rank": 4, "llm.lora_alpha": 12, "llm.lora_target_modules": ["q_proj", "v_proj"]},
            lora_rank=4,
            lora_alpha=12,
            lora_target_modules=("q_proj", "v_proj"),
            id="lora",
        ),
        case(
            LOOP,
            {"train.clip_range": 0.5},
            clip_range=0.5,
            clip_range_high=0.5,
            id="train-before-the-notations-default",
        ),
    ],
)
def test_what_a_notation_says(notation, written, expected):
    settings, findings = read(with_all(config_of(notation), written))
    assert not findings.found
    found = {name: value_of(settings, name) for name in expected}
    assert found == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
    }


NAMED = {
    "algorithm.adv_type": (RLINF, ADV_TYPES, "advantage_estimator"),
    "adv_estimator": (ROLL, ADV_ESTIMATORS, "advantage_estimator"),
    "algorithm.loss_agg_func": (RLINF, AGGREGATIONS, "loss_aggregation"),
    "loss_agg_mode": (ROLL, AGGREGATIONS, "loss_aggregation"),
    "actor_train.training_args.lr_scheduler_type": (ROLL, SCHEDULES, "lr_scheduler_type"),
}


@pytest.mark.parametrize(
    ("path", "word"), [pytest.param(path, word, id=f"{path}-{word}") for path in NAMED for word in NAMED[path][1]]
)
def test_words_of_other_programs(path, word):
    notation, meanings, name = NAMED[path]
    # A critic is what gae needs, and environments what the words of ROLL's agentic pipeline need.
    beside = CRITIC if notation is RLINF else ENVIRONMENTS if word in ("gigpo", "agentic_reinforce") else {}
    settings, findings = read(with_all(config_of(notation), {path: word} | beside))
    assert value_of(settings, name) is meanings[word]
    assert not findings.found


@pytest.mark.parametrize("path", NAMED)
def test_a_word_that_roost_does_not_have(path):
    _, findings = read(with_all(config_of(NAMED[path][0]), {path: "embodied_sac"}))
    assert whats(findings) == ["embodied_sac is not supported"]


def test_a_word_that_only_roost_has_is_a_value_of_train():
    _, findings = read(with_all(config_of(RLINF), {"algorithm.adv_type": "gigpo"}))
    (found,) = findings.errors
    assert (found.code, found.fix) == ("RST-T013", "remove it, and write train.advantage_estimator: gigpo")


@pytest.mark.parametrize(
    ("notation", "written", "train"),
    [
        pytest.param(RLINF, {"algorithm.ratio_clip_eps": 0.2}, {"clip_range": 0.3}, id="clip"),
        pytest.param(RLINF, {"algorithm.adv_type": "grpo"}, {"advantage_estimator": "gae"}, id="estimator"),
        pytest.param(RLINF, {"algorithm.n_minibatches": 4}, {"minibatch_size": 128}, id="minibatches"),
        pytest.param(RLINF, {"actor.model.precision": "bf16"}, {"compute_dtype": "float32"}, id="precision"),
        pytest.param(ROLL, {"async_generation_ratio": 1}, {"max_staleness": 2}, id="lag"),
        pytest.param(ROLL, {"rollout_batch_size": 64}, {"prompts_per_step": 32}, id="groups"),
        pytest.param(LOOP, {"rl.params.ppo_epsilon": 0.2}, {"clip_range_high": 0.1}, id="epsilon"),
        pytest.param(RLINF, {"runner.max_steps": 5}, {"max_steps": 6}, id="steps"),
        pytest.param(ROLL, {"response_length": 5}, {"max_new_tokens": 6}, id="tokens"),
        pytest.param(ROLL, {"whiten_advantages": True}, {"whiten_advantages": "none"}, id="whitening"),
    ],
)
def test_train_may_not_contradict_what_other_keys_amount_to(notation, written, train):
    _, findings = read(with_all(config_of(notation, **train), written))
    assert len(findings.found) == 1
    assert re.search(rf" but .*{next(iter(written))}.* makes? it ", findings.found[0].what), findings.found[0].what


def test_train_may_say_the_same_again():
    assert not read(with_all(config_of(RLINF, clip_range=0.1, clip_range_high=0.1), {"algorithm.ratio_clip_eps": 0.1}))[
        1
    ].found


# What else a config must say for the other program to read the key at all.
READ_ONLY_WITH = {
    "algorithm.filter_rewards": {"runner.task_type": "embodied"},
    "actor_train.pg_variant": PG_WORKER,
    "student_train.pg_variant": PG_WORKER,
}


@pytest.mark.parametrize(
    ("notation", "unlike"),
    [pytest.param(notation, each, id=each.path) for notation in TRAINED for each in UNLIKE[notation]],
)
def test_what_roost_does_not_follow_is_said(notation, unlike):
    config = with_all(config_of(notation), READ_ONLY_WITH.get(unlike.path, {}))
    if unlike.path.startswith("student_"):  # the learner and the engine, where the policy is taught
        roles = {"actor_train": "student_train", "actor_infer": "student_infer"}
        config = {roles.get(name, name): value for name, value in config.items()} | {"is_pure_opd": False}
    without = whats(read(config)[1])
    for value in unlike.harmless:
        assert whats(read(with_all(config, {unlike.path: value}))[1]) == without
    settings, findings = read(with_all(config, {unlike.path: 5}))
    assert [what for what in whats(findings) if what not in without] == ["is 5, which Roost does not follow"]
    assert not findings.has_errors
    assert settings == read(config)[0]


@pytest.mark.parametrize(
    ("notation", "written"),
    [
        pytest.param(RLINF, {"algorithm.sampling_params.min_new_tokens": 5}, id="min-new-tokens"),
        pytest.param(RLINF, {"algorithm.early_stop_imp_ratio": 5, "actor.training_backend": "fsdp"}, id="early-stop"),
        pytest.param(RLINF, {"algorithm.use_valid_token_scale": True}, id="token-scale"),
        pytest.param(RLINF, {"runner.early_stop.enabled": False, "runner.early_stop.patience": 5}, id="no-early-stop"),
        pytest.param(RLINF, {"runner.only_eval": False}, id="trains"),
        pytest.param(RLINF, {"algorithm.filter_rewards": True, "runner.task_type": "reasoning"}, id="filter-rewards"),
        pytest.param(ROLL, {"add_len_reward": True}, id="length-reward"),
        pytest.param(ROLL, {"pg_variant": "topr"}, id="variant-at-the-top"),
        pytest.param(ROLL, {"max_len_mask": True, **ENVIRONMENTS}, id="length-mask-of-agents"),
        pytest.param(ROLL, {"difficulty_mask": True, **ENVIRONMENTS}, id="difficulty-mask-of-agents"),
        pytest.param(ROLL, {"error_max_len_clip": True, **ENVIRONMENTS}, id="error-clip-of-agents"),
        pytest.param(ROLL, {"norm_mean_type": "batch", "adv_estimator": "grpo"}, id="mean-of-grpo"),
        pytest.param(ROLL, {"norm_std_type": "batch", "adv_estimator": "grpo"}, id="std-of-grpo"),
    ],
)
def test_a_key_that_the_other_program_ignores_is_not_warned_about(notation, written):
    assert not read(with_all(config_of(notation), written))[1].found


@pytest.mark.parametrize(
    ("written", "unread"),
    [
        ({"actor_train.pg_variant": "topr"}, ["pg_variant"]),
        ({"actor_train.pg_variant": "vanilla"}, ["pg_variant"]),
        ({"actor_train.pg_variant": "ppo", "actor_train.cispo_epsilon_low": 0.3}, ["cispo_epsilon_low"]),
        ({**PG_WORKER, "actor_train.pg_variant": "cispo", "actor_train.tis_upper_bound": 2.0}, ["tis_upper_bound"]),
        ({**PG_WORKER, "actor_train.pg_variant": "topr", "actor_train.topr_positive_weight": 0.5}, []),
    ],
)
def test_keys_of_variants_that_the_worker_does_not_read_are_named(written, unread):
    settings, findings = read(with_all(config_of(ROLL), written))
    assert [finding.where.path[-1] for finding in findings.found] == unread
    assert {finding.code for finding in findings.found} <= {"RST-T014"}
    if "pg_variant" in unread:
        assert settings == read(config_of(ROLL))[0]


@pytest.mark.parametrize(
    ("written", "count"),
    [
        pytest.param({"actor.model.precision": "fp16"}, 1, id="half"),
        pytest.param({"actor.model.precision": "fp16", "train.compute_dtype": "bfloat16"}, 0, id="half-and-chosen"),
    ],
)
def test_what_is_done_otherwise_is_said(written, count):
    _, findings = read(with_all(config_of(RLINF), written))
    assert len(findings.warnings) == len(findings.found) == count


@pytest.mark.parametrize(
    ("notation", "written", "path", "what"),
    [
        pytest.param(
            RLINF,
            {"runner.max_steps": -1},
            "runner.max_steps",
            "is -1, which leaves the end to max_epochs, but that is not given",
            id="no-end",
        ),
        pytest.param(
            RLINF, {"runner.only_eval": True}, "runner.only_eval", "is true, but Roost trains", id="evaluation"
        ),
        pytest.param(
            LOOP,
            {"llm.adapter_path": "an/adapter"},
            "llm.adapter_path",
            "is an adapter to start from, which training does not take",
            id="adapter",
        ),
        pytest.param(
            LOOP,
            {"rl.optimization.optimizer._target_": "torch.optim.SGD"},
            "rl.optimization.optimizer._target_",
            "is 'torch.optim.SGD'; the optimizers are AdamW, Muon, AdamW8bit",
            id="optimizer",
        ),
        pytest.param(
            ROLL,
            {"actor_train.training_args.optim": "sgd"},
            "actor_train.training_args.optim",
            "sgd is not supported",
            id="ROLL optimizer",
        ),
        pytest.param(
            LOOP,
            {"rl.optimization.lr_scheduler._target_": "torch.optim.lr_scheduler.StepLR"},
            "rl.optimization.lr_scheduler._target_",
            "torch.optim.lr_scheduler.StepLR is not supported",
            id="schedule",
        ),
        pytest.param(
            ROLL,
            {"adv_estimator": "reinforce", "norm_mean_type": "day"},
            "norm_mean_type",
            "takes statistics over 'day'",
            id="statistics",
        ),
        pytest.param(
            ROLL,
            {"adv_estimator": "reinforce", "norm_mean_type": "running"},
            "norm_mean_type",
            "norm_mean_type is running; Roost takes the statistics of the step alone",
            id="running",
        ),
        pytest.param(
            RLINF,
            {"algorithm.adv_type": "reinpp", "algorithm.use_reinpp_baseline": True},
            "algorithm.use_reinpp_baseline",
            "subtracts the mean reward of the group",
            id="reinpp-baseline",
        ),
        pytest.param(
            RLINF,
            {"algorithm.adv_type": "reinpp", "algorithm.reinpp_kl_beta": 0.1},
            "algorithm.reinpp_kl_beta",
            "counts the KL of generated tokens, from each token to the last of its sample",
            id="reinpp-kl",
        ),
        pytest.param(
            RLINF,
            {"algorithm.adv_type": "gae"},
            "algorithm.adv_type",
            "is gae, but no critic is placed: advantages are rewards, normalised over all tokens of a step",
            id="gae-without-a-critic",
        ),
        pytest.param(
            RLINF,
            {
                "algorithm.down_sampling.do_down_sampling": True,
                "algorithm.down_sampling.down_sampling_config.reject_equal_reward": True,
            },
            "algorithm.down_sampling.down_sampling_config.reject_equal_reward",
            "leaves out groups whose samples all have the same reward",
            id="equal-groups",
        ),
        pytest.param(
            RLINF,
            {"algorithm.loss_agg_func": "token-mean", "algorithm.training_batch_size_per_gpu": 4},
            "algorithm.loss_agg_func",
            "is token-mean over all tokens of a minibatch",
            id="mean-of-micro-batches",
        ),
        pytest.param(
            RLINF,
            {"algorithm.loss_agg_func": "token-mean", "runner.enable_dynamic_batch_size": True},
            "algorithm.loss_agg_func",
            "is token-mean over all tokens of a minibatch",
            id="mean-of-dynamic-micro-batches",
        ),
        pytest.param(
            RLINF,
            {"runner.resume_dir": "results/checkpoints/global_step_40"},
            "runner.resume_dir",
            "is 'results/checkpoints/global_step_40', which Roost does not follow",
            id="resume",
        ),
        pytest.param(
            RLINF,
            {"algorithm.clip_log_ratio_min": 3},
            "algorithm.clip_log_ratio_min",
            "is 3; it must be a number that is at most 0",
            id="lower-clamp",
        ),
        pytest.param(
            ROLL,
            {"sequence_length": 1000},
            "sequence_length",
            "leaves -24 tokens for a completion",
            id="no-room",
        ),
        pytest.param(
            ROLL,
            {"sequence_length": 4096, f"{DRAWN}.max_new_tokens": 9},
            f"{DRAWN}.max_new_tokens",
            "is 9, but completions get 3072 tokens, as in ROLL",
            id="tokens-replaced",
        ),
    ],
)
def test_what_a_notation_says_and_roost_does_not_do(notation, written, path, what):
    _, findings = read(with_all(config_of(notation), written))
    assert [(".".join(finding.where.path), finding.what) for finding in findings.found] == [(path, what)]


@grid(
    ("word", "limits"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "cosine", "min_lr_ratio": 0.5}),
    ],
)
def test_arguments_that_megatrons_scheduler_does_not_read_are_named(word, limits):
    arguments = {"lr_scheduler_type": word, "lr_scheduler_kwargs": limits}
    written = {**MEGATRON_LEARNER, "actor_train.training_args": arguments}
    settings, findings = read(with_all(config_of(ROLL), written))
    assert [finding.what for finding in findings.found] == [f"{name} is not followed" for name in limits]
    assert (value_of(settings, "min_learning_rate"), value_of(settings, "wsd_decay_steps")) == (0.0, None)


def test_the_table_of_what_settings_are_made_of_knows_only_settings():
    assert all(set(made) <= set(SETTINGS) for made in DERIVED_FROM.values())


OPD = {
    "num_gpus_per_node": 2,
    "pretrain": "small",
    "student_train": {"device_mapping": [0], "training_args": {"learning_rate": 3e-6}},
    "student_infer": {"device_mapping": [1], "generating_args": {"temperature": 0.5}},
    "teacher": {"device_mapping": [0], "model_args": {"model_name_or_path": "large"}},
    "adv_estimator": "gae",
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "train": {"task": {"_target_": "a.B"}},
}


def test_rolls_students_are_distilled_from_the_teacher_alone():
    settings, findings = read(OPD)
    assert not findings.has_errors
    assert settings.advantage.advantage_estimator is AdvantageEstimator.TEACHER
    assert settings.teachers == (Teacher(),)
    assert (settings.learner.model, settings.learner.loss.kl_coef) == ("small", 0), "the reference's KL is off"
    assert (settings.learner.optimizer.learning_rate, settings.sampling.temperature) == (3e-6, 0.5)


def test_roll_adds_the_kl_from_teachers_to_the_rewards():
    roles = {
        "math": {"device_mapping": [0], "opd_kl_coef": 0.3, "tag_included": ["aime"]},
        "code": {"device_mapping": [1]},
    }
    mixed = config_of(Notation.ROLL) | {"use_opd": True, "adv_estimator": "reinforce", "kl_penalty": "abs"}
    settings, _ = read(mixed | {"teacher": roles, "opd_kl_coef": 0.7})
    assert settings.advantage.advantage_estimator is AdvantageEstimator.REWARD
    assert settings.teachers == (
        Teacher("teacher.math", 0.3, KlEstimator.ABS, ("aime",)),
        Teacher("teacher.code", 0.7, KlEstimator.ABS),
    )
    assert not read(mixed | {"teacher": roles, "use_opd": False})[0].teachers
    settings, _ = read(mixed | {"teacher": roles["code"], "train": mixed["train"] | {"teacher": {"coef": 0.1}}})
    assert settings.teachers == (Teacher(coef=0.1, estimator=KlEstimator.ABS),), "train changes single keys"


@pytest.mark.parametrize(
    "written", [{}, {"algorithm.use_valid_token_scale": False}, {"actor.training_backend": "fsdp"}]
)
def test_a_mean_of_tokens_in_micro_batches_of_one_sample_is_one_of_samples(written):
    keys = {"algorithm.loss_agg_func": "token-mean", "algorithm.training_batch_size_per_gpu": 1, **written}
    settings, findings = read(with_all(config_of(RLINF), keys))
    assert settings.learner.loss.loss_aggregation is LossAggregation.SEQ_MEAN
    assert not findings.found


@pytest.mark.parametrize(
    ("written", "command"),
    [("auto", "--resume"), ("results/checkpoints/global_step_40", "--resume 40"), ("my/folder", "--resume")],
)
def test_the_command_that_goes_on_is_named(written, command):
    _, findings = read(with_all(config_of(RLINF), {"runner.resume_dir": written}))
    (warning,) = findings.warnings
    assert warning.fix == f"remove it, and run: roost train CONFIG {command}"
    _, findings = read(with_all(config_of(ROLL), {"resume_from_checkpoint": True}))
    assert [warning.fix for warning in findings.warnings] == ["remove it, and run: roost train CONFIG --resume"]


@pytest.mark.parametrize(("key", "bound"), [("tis_upper_bound", 0.5), ("tis_lower_bound", 1.5)])
def test_bounds_of_tis_that_no_clip_range_expresses(key, bound):
    keys = {**PG_WORKER, "actor_train.pg_variant": "tis", f"actor_train.{key}": bound}
    (error,) = read(with_all(config_of(ROLL), keys))[1].errors
    assert (error.code, error.where.path) == ("RST-T013", ("actor_train", key))


def test_filters_that_contradict_each_other_are_refused_at_their_place():
    filters = [{"enabled": True, "ratio_high": 1.0}, {"enabled": True, "ratio_low": 1.1, "ratio_high": 2.0}]
    (error,) = read(with_all(config_of(ROLL), {"train_infer_correction": {"filters": filters}}))[1].errors
    assert error.code == "RST-T093"
    assert (error.where.path[:2], error.where.path[-1]) == (("train_infer_correction", "filters"), "ratio_low")


@pytest.mark.parametrize(
    ("keys", "is_noted"),
    [
        ({"async_generation_ratio": 1}, True),
        ({"async_generation_ratio": 0}, False),
        ({"async_generation_ratio": 1, "train_infer_correction.is_weight.enabled": False}, False),
        ({"async_generation_ratio": 1, "train.old_logprobs": "decoupled"}, False),
    ],
    ids=["left out", "not stale", "turned off", "written"],
)
def test_weights_that_roll_does_not_have_are_noted(keys, is_noted):
    findings = Findings()
    read_job(load(with_all(config_of(ROLL), keys), (), findings), findings)
    assert any(note.where.path == ("async_generation_ratio",) for note in findings.notes) == is_noted
