"""What the three notations say in words and numbers of their own, and what of that Roost does not follow."""

import pytest

from roost.spec.job import Notation
from roost.spec.training import Behaviour, Estimator, KlEstimator, RatioLevel, Schedule
from roost.spec.training_dialects import ESTIMATORS, MADE_OF, MEANS, SCHEDULES
from roost.spec.training_keys import KEYS
from roost.spec.training_unlike import UNLIKE
from tests.spec.settings_page import kept
from tests.spec.test_training_read import config_of, merged, read, whats

RLINF, ROLL, LOOP = Notation


def case(notation, written, *, id, **expected):
    """Keys as dotted paths, and what the settings become."""
    return pytest.param(notation, written, expected, id=f"{notation}-{id}")


def with_all(config, written):
    for path, value in written.items():
        config = merged(config, path.split("."), value)
    return config


LOW, HIGH = "algorithm.clip_ratio_low", "algorithm.clip_ratio_high"
EACH = "actor_train.training_args.per_device_train_batch_size"
ROUNDS = "actor_train.training_args.gradient_accumulation_steps"
GROUP_SIZE = "num_return_sequences_in_group"
LORA, BACKEND = "actor.model.is_lora", "rollout.rollout_backend"
STRATEGY = "actor_train.strategy_args"
MEGATRON = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}}
EIGHT = {"num_gpus_per_node": 8, "actor_train.device_mapping": "list(range(0,8))", "rollout_batch_size": 64}
PG_WORKER = {"actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"}
ENVIRONMENTS = {"train_env_manager": {"num_env_groups": 8, "group_size": 16}}


@pytest.mark.parametrize(
    ("notation", "written", "expected"),
    [
        case(RLINF, {"algorithm.ratio_clip_eps": 0.25}, clip_low=0.75, clip_high=1.25, id="clip"),
        case(RLINF, {"algorithm.ratio_clip_eps": 0.25, HIGH: 0.5}, clip_low=0.75, clip_high=1.5, id="clip-high"),
        case(RLINF, {"algorithm.ratio_clip_eps": 0.25, LOW: None}, clip_low=0.75, clip_high=1.25, id="clip-null"),
        case(RLINF, {LOW: 0.5, HIGH: 0.5}, clip_low=0.5, clip_high=1.5, id="clip-range"),
        case(RLINF, {"algorithm.recompute_logprobs": True}, behaviour=Behaviour.RECOMPUTED, id="recomputes"),
        case(RLINF, {"algorithm.recompute_logprobs": False}, behaviour=Behaviour.ENGINE, id="does-not-recompute"),
        case(
            RLINF,
            {"algorithm.recompute_logprobs": True, "train.max_policy_lag": 1},
            behaviour=Behaviour.PROXIMAL,
            id="recomputes-with-a-lag",
        ),
        case(
            RLINF,
            {"algorithm.kl_beta": 0.1, "algorithm.kl_penalty_type": "kl"},
            kl_coefficient=0.1,
            kl_estimator=KlEstimator.K1,
            id="divergence",
        ),
        case(RLINF, {"algorithm.kl_beta": 0, "algorithm.kl_penalty_type": "abs"}, kl_coefficient=0, id="no-divergence"),
        case(RLINF, {"algorithm.n_minibatches": 4, "actor.global_batch_size": 8}, minibatch_size=4, id="counted"),
        case(RLINF, {"actor.global_batch_size": 128}, minibatch_size=2, id="sized"),
        case(RLINF, {"actor.lr_sched.lr_decay_style": "cosine"}, schedule=Schedule.COSINE, id="decay-style"),
        case(RLINF, {"actor.optim.lr_scheduler": "torch_constant"}, schedule=Schedule.CONSTANT, id="scheduler"),
        case(
            RLINF,
            {LORA: True, "actor.model.lora_rank": 8},
            adapter_rank=8,
            adapter_alpha=16,
            id="lora",
        ),
        case(RLINF, {LORA: False, "actor.model.lora_rank": 8}, adapter_rank=None, id="no-lora"),
        case(RLINF, {"actor.model.precision": "bf16"}, compute_type="bfloat16", weight_type="float32", id="bf16"),
        case(RLINF, {"actor.model.precision": "32"}, compute_type="float32", id="precision-as-a-word"),
        case(RLINF, {BACKEND: "sglang"}, engine="sglang", id="engine"),
        case(RLINF, {BACKEND: "sglang", "train.engine": "torch"}, engine="torch", id="engine-of-train"),
        case(ROLL, {}, clip_low=0.8, clip_high=1.2, dual_clip=None, kl_coefficient=0, id="nothing"),
        case(ROLL, {"pg_clip": 0.25}, clip_low=0.75, clip_high=1.25, id="clip"),
        case(ROLL, {"pg_clip": 0.25, "pg_clip_high": 0.5}, clip_low=0.75, clip_high=1.25, id="clip-range-not-used"),
        case(
            ROLL,
            {"pg_clip": 0.25, "pg_clip_low": 0.25, "pg_clip_high": 0.5, "use_pg_clip_range": True},
            clip_low=0.75,
            clip_high=1.5,
            id="clip-range",
        ),
        case(ROLL, {"dual_clip_loss": True}, dual_clip=1.4, id="dual-clip"),
        case(ROLL, {"dual_clip_loss": True, "pg_clip": 0.25}, dual_clip=1.5, id="dual-clip-of-the-clip"),
        case(ROLL, {"kl_loss_coef": 0.5}, kl_coefficient=0, id="divergence-not-used"),
        case(ROLL, {"kl_loss_coef": 0.5, "use_kl_loss": True}, kl_coefficient=0.5, id="divergence"),
        case(ROLL, {"async_generation_ratio": 0}, max_policy_lag=0, behaviour=Behaviour.RECOMPUTED, id="no-lag"),
        case(ROLL, {"async_generation_ratio": 1}, max_policy_lag=1, behaviour=Behaviour.PROXIMAL, id="lag"),
        case(ROLL, {"async_generation_ratio": 1.5}, max_policy_lag=2, id="lag-of-a-part"),
        case(ROLL, {"rollout_batch_size": 64, GROUP_SIZE: 4}, groups=64, group_size=4, id="groups"),
        case(ROLL, {"rollout_batch_size": 64, **ENVIRONMENTS}, groups=4, group_size=16, id="episodes"),
        case(ROLL, {**EIGHT, EACH: 1, ROUNDS: 32}, minibatch_size=2, id="minibatch-of-all-devices"),
        case(ROLL, {**EIGHT, EACH: 1, ROUNDS: 32, STRATEGY: MEGATRON}, minibatch_size=4, id="minibatch-of-cut-models"),
        case(ROLL, {**EIGHT, ROUNDS: 32}, minibatch_size=1, id="minibatch-not-given"),
        case(ROLL, {**PG_WORKER, "actor_train.pg_variant": "vanilla"}, ratio=RatioLevel.NONE, id="vanilla"),
        case(ROLL, {**PG_WORKER, "actor_train.pg_variant": "ppo"}, ratio=RatioLevel.TOKEN, id="ppo"),
        case(ROLL, {"actor_train.pg_variant": "vanilla"}, ratio=RatioLevel.TOKEN, id="vanilla-of-another-worker"),
        case(ROLL, {"response_length": 99}, max_tokens=99, id="response-length"),
        case(ROLL, {"max_ckpt_to_keep": 0}, keep_checkpoints=3, id="keeps-all"),
        case(ROLL, {"max_ckpt_to_keep": 7}, keep_checkpoints=7, id="keeps"),
        case(ROLL, {"actor_train.model_args.lora_rank": 8}, adapter_rank=8, id="lora"),
        case(ROLL, {"actor_train.model_args.dtype": "bf16"}, compute_type="bfloat16", id="bf16"),
        case(ROLL, {"actor_infer.strategy_args.strategy_name": "vllm"}, engine="vllm", id="engine"),
        case(ROLL, {"adv_estimator": "grpo"}, gae_lambda=1.0, value_clip=0.2, id="no-critic"),
        case(ROLL, {"adv_estimator": "gae"}, gae_lambda=0.95, value_clip=0, id="critic"),
        case(ROLL, {"train.estimator": "gae"}, gae_lambda=0.95, value_clip=0, id="critic-of-train"),
        case(ROLL, {"adv_estimator": "gae", "value_clip": 0.5}, value_clip=0.5, id="clip-of-values"),
        case(ROLL, {"adv_estimator": "gae", "train.value_clip": 0.5}, value_clip=0.5, id="clip-of-values-in-train"),
        case(ROLL, {"adv_estimator": "gae", "lambd": 0.5}, gae_lambda=0.5, id="critic-as-written"),
        case(
            ROLL,
            {"actor_train.training_args.lr_scheduler_type": "constant_with_warmup"},
            schedule=Schedule.CONSTANT,
            id="schedule",
        ),
        case(LOOP, {}, clip_low=1 / 1.1, clip_high=1.1, max_policy_lag=0, adapter_rank=None, id="nothing"),
        case(LOOP, {"rl.ppo_epsilon": 0.25}, clip_low=0.8, clip_high=1.25, id="clip"),
        case(LOOP, {"rl.do_ppo_clipping": False, "rl.loss_type": "pg_per_token"}, ratio=RatioLevel.NONE, id="no-clip"),
        case(LOOP, {"rl.loss_type": "pg_per_turn"}, ratio=RatioLevel.TURN, id="turn"),
        case(LOOP, {"rl.loss_type": "pg_per_trajectory"}, ratio=RatioLevel.TRAJECTORY, id="trajectory"),
        case(LOOP, {"rl.baseline": "leave_none_out"}, estimator=Estimator.GROUP_MEAN, id="baseline"),
        case(
            LOOP,
            {"rl.baseline": "leave_none_out", "rl.adv_normalization": True},
            estimator=Estimator.GRPO,
            id="normalised",
        ),
        case(LOOP, {"rl.async_rollouts": True}, max_policy_lag=1, behaviour=Behaviour.PROXIMAL, id="lag"),
        case(LOOP, {"rl.recompute_rollout_probs": True}, behaviour=Behaviour.RECOMPUTED, id="recomputes"),
        case(
            LOOP,
            {"rl.recompute_rollout_probs": False, "rl.async_rollouts": True},
            behaviour=Behaviour.ENGINE,
            id="does-not-recompute",
        ),
        case(LOOP, {"rl.minibatch_size": 32}, minibatch_size=8, id="minibatch"),
        case(LOOP, {"rl.strictly_on_policy": True}, minibatch_size=1, id="on-policy"),
        case(LOOP, {"rl.optimizer.betas": [0.5, 0.75]}, beta1=0.5, beta2=0.75, id="betas"),
        case(LOOP, {"rl.optimizer.betas": "x"}, beta1=0.9, beta2=0.999, id="betas-of-no-use"),
        case(LOOP, {"llm.lora.r": 4, "llm.lora.lora_alpha": 12}, adapter_rank=4, adapter_alpha=12, id="lora"),
        case(LOOP, {"train.clip_low": 0.5}, clip_low=0.5, clip_high=1.1, id="train-before-the-notations-default"),
    ],
)
def test_what_a_notation_says(notation, written, expected):
    settings, findings = read(with_all(config_of(notation), written))
    assert not findings.found
    assert {name: kept(settings, name) for name in expected} == pytest.approx(expected)


NAMED = {
    "algorithm.adv_type": (RLINF, ESTIMATORS, "estimator"),
    "adv_estimator": (ROLL, ESTIMATORS, "estimator"),
    "algorithm.loss_agg_func": (RLINF, MEANS, "mean"),
    "loss_agg_mode": (ROLL, MEANS, "mean"),
    "actor_train.training_args.lr_scheduler_type": (ROLL, SCHEDULES, "schedule"),
}


@pytest.mark.parametrize(
    ("path", "word"), [pytest.param(path, word, id=f"{path}-{word}") for path in NAMED for word in NAMED[path][1]]
)
def test_words_of_other_programs(path, word):
    notation, meanings, name = NAMED[path]
    settings, findings = read(with_all(config_of(notation), {path: word}))
    assert kept(settings, name) is meanings[word]
    assert not findings.found


@pytest.mark.parametrize("path", NAMED)
def test_a_word_that_roost_does_not_have(path):
    _, findings = read(with_all(config_of(NAMED[path][0]), {path: "embodied_sac"}))
    assert whats(findings) == ["embodied_sac is nothing Roost has"]


@pytest.mark.parametrize(
    ("notation", "written", "train"),
    [
        pytest.param(RLINF, {"algorithm.ratio_clip_eps": 0.2}, {"clip_low": 0.7}, id="clip"),
        pytest.param(RLINF, {"algorithm.adv_type": "grpo"}, {"estimator": "gae"}, id="estimator"),
        pytest.param(RLINF, {"algorithm.n_minibatches": 4}, {"minibatch_size": 128}, id="minibatches"),
        pytest.param(RLINF, {"actor.model.precision": "bf16"}, {"compute_type": "float32"}, id="precision"),
        pytest.param(ROLL, {"async_generation_ratio": 1}, {"max_policy_lag": 2}, id="lag"),
        pytest.param(ROLL, {"rollout_batch_size": 64}, {"groups": 32}, id="groups"),
        pytest.param(LOOP, {"rl.ppo_epsilon": 0.2}, {"clip_high": 1.1}, id="epsilon"),
    ],
)
def test_train_may_not_contradict_what_other_keys_amount_to(notation, written, train):
    _, findings = read(with_all(config_of(notation, **train), written))
    assert len(findings.found) == 1
    assert "but the config's other settings make it" in findings.found[0].what


def test_train_may_say_the_same_again():
    assert not read(with_all(config_of(RLINF, clip_low=0.9, clip_high=1.1), {"algorithm.ratio_clip_eps": 0.1}))[1].found


MEGATRON_ACTOR = {"actor.training_backend": "megatron"}
# What else a config must say for the other program to read the key at all.
READ_ONLY_WITH = {
    "algorithm.early_stop_imp_ratio": MEGATRON_ACTOR,
    "algorithm.use_valid_token_scale": MEGATRON_ACTOR,
    "algorithm.filter_rewards": {"runner.task_type": "embodied"},
    "actor_train.pg_variant": PG_WORKER,
}


@pytest.mark.parametrize(
    ("notation", "unlike"),
    [pytest.param(notation, each, id=each.path) for notation in Notation for each in UNLIKE[notation]],
)
def test_what_roost_does_not_follow_is_said(notation, unlike):
    config = with_all(config_of(notation), READ_ONLY_WITH.get(unlike.path, {}))
    for value in unlike.harmless:
        assert not read(with_all(config, {unlike.path: value}))[1].found
    settings, findings = read(with_all(config, {unlike.path: 5}))
    assert whats(findings) == ["is 5, which Roost does not follow"]
    assert not findings.has_errors
    assert settings == read(config)[0]


@pytest.mark.parametrize(
    ("notation", "written"),
    [
        pytest.param(RLINF, {"algorithm.sampling_params.min_new_tokens": 5}, id="min-new-tokens"),
        pytest.param(RLINF, {"algorithm.early_stop_imp_ratio": 5, "actor.training_backend": "fsdp"}, id="early-stop"),
        pytest.param(RLINF, {"algorithm.use_valid_token_scale": True}, id="token-scale"),
        pytest.param(RLINF, {"algorithm.filter_rewards": True, "runner.task_type": "reasoning"}, id="filter-rewards"),
        pytest.param(ROLL, {"add_len_reward": True}, id="length-reward"),
        pytest.param(ROLL, {"pg_variant": "topr"}, id="variant-at-the-top"),
        pytest.param(ROLL, {"actor_train.pg_variant": "topr"}, id="variant-of-a-worker-without-variants"),
        pytest.param(ROLL, {"max_len_mask": True, **ENVIRONMENTS}, id="length-mask-of-agents"),
        pytest.param(ROLL, {"difficulty_mask": True, **ENVIRONMENTS}, id="difficulty-mask-of-agents"),
        pytest.param(ROLL, {"error_max_len_clip": True, **ENVIRONMENTS}, id="error-clip-of-agents"),
        pytest.param(ROLL, {"norm_mean_type": "batch", "adv_estimator": "grpo"}, id="mean-of-grpo"),
        pytest.param(ROLL, {"norm_std_type": "batch", "adv_estimator": "grpo"}, id="std-of-grpo"),
    ],
)
def test_a_key_that_the_other_program_ignores_is_not_warned_about(notation, written):
    assert not read(with_all(config_of(notation), written))[1].found


@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_advantages_that_are_even_already_are_not_warned_about(estimator):
    assert not read(with_all(config_of(ROLL), {"adv_estimator": estimator, "whiten_advantages": True}))[1].found


@pytest.mark.parametrize(
    ("written", "count"),
    [
        pytest.param({"runner.max_epochs": 5, "runner.max_steps": -1}, 1, id="passes"),
        pytest.param({"runner.max_epochs": 5, "runner.max_steps": 20}, 0, id="steps"),
        pytest.param({"runner.max_epochs": 5, "train.steps": 20}, 0, id="steps-of-train"),
        pytest.param({"actor.model.precision": "fp16"}, 1, id="half"),
        pytest.param({"actor.model.precision": "fp16", "train.compute_type": "bfloat16"}, 0, id="half-and-chosen"),
    ],
)
def test_what_is_done_otherwise_is_said(written, count):
    _, findings = read(with_all(config_of(RLINF), written))
    assert len(findings.warnings) == len(findings.found) == count


def test_the_table_of_what_settings_are_made_of_knows_only_settings():
    names = {key.name for key in KEYS}
    assert all(set(made) <= names for made in MADE_OF.values())
