"""The section `train`: every setting with its type, default, range, description and its key in each notation.

The reader, the JSON Schema, the settings page and `roost explain` all follow these declarations.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import EnumType
from types import NoneType
from typing import Any

from roost.config.data import SCENARIO, Teacher, read_teachers
from roost.config.engine_options import is_count
from roost.config.findings import Findings, Where
from roost.config.job import AUTO, MICRO_BATCH_TOKENS, ParallelSizes
from roost.config.learning import (
    HIGHEST_RATE,
    ROLL_LEARNERS,
    USUAL_RATES,
    AdvantageSettings,
    LossSettings,
    OptimizerSettings,
    Setting,
    roll_learner_keys,
    setting,
    unlike_usual,
)
from roost.config.train_choices import (
    AdvantageEstimator,
    AdvantageLevel,
    DiscountLevel,
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    Objective,
    OldLogprobs,
    OptimizerType,
    PolicyLoss,
    RewardScope,
    RolloutLogprobs,
    Whitening,
    WsdDecayStyle,
)

# Names from other files that are used together with the section.
__all__ = [
    "HIGHEST_RATE",
    "ROLL_LEARNERS",
    "USUAL_RATES",
    "AdvantageEstimator",
    "AdvantageLevel",
    "AdvantageSettings",
    "DiscountLevel",
    "ImportanceSamplingLevel",
    "KlEstimator",
    "LossAggregation",
    "LossSettings",
    "LrSchedulerType",
    "Objective",
    "OldLogprobs",
    "OptimizerSettings",
    "OptimizerType",
    "PolicyLoss",
    "RewardScope",
    "RolloutLogprobs",
    "Setting",
    "Whitening",
    "WsdDecayStyle",
    "unlike_usual",
]

IN_FLIGHT = ("drop", "drain", "hold")
FLOAT_TYPES = ("float32", "bfloat16", "float16")
ENGINES = ("torch", "vllm", "sglang")
LARGEST_VOCABULARY = 1_000_000  # as top_k it means all tokens; RLinf's configs have it


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A LoRA adapter that is trained instead of all weights."""

    lora_rank: int = setting(16, "Train a LoRA adapter of this rank instead of all weights.", minimum=1)
    lora_alpha: float = setting(
        32.0,
        "LoRA alpha. Default: twice the rank.",
        roll=roll_learner_keys("model_args.lora_alpha"),
        loop="llm.lora_alpha",
    )
    lora_target_modules: tuple[str, ...] = setting(
        (), "Modules that get an adapter. Default: all linear layers but the last.", loop="llm.lora_target_modules"
    )


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The trained model and its passes."""

    model: str = field(
        metadata={"setting": Setting("Folder or hub name of a Hugging Face model. Default: the placed model's.")}
    )
    weight_dtype: str = setting("float32", "Data type of the master weights.", choices=FLOAT_TYPES)
    compute_dtype: str = setting("float32", "Data type of the forward and backward pass.", choices=FLOAT_TYPES)
    micro_batch_tokens: int = setting(MICRO_BATCH_TOKENS, "Tokens packed into one micro-batch.", minimum=1)
    logit_tokens: int | None = None  # tokens whose logits are in memory at once; None: what fits in LOGIT_BYTES
    activation_checkpointing: bool | str | None = setting(
        None,
        "Recompute activations in the backward pass. auto: of as few layers as the plan has memory for. Default: on "
        "GPUs, of all layers.",
        words=(AUTO,),
    )
    recomputed_layers: int | None = None  # first layers with activation checkpointing, from the plan; None: all
    compile: bool | None = setting(
        None,
        "Compile decoder layers with torch.compile; the first step then takes one to two minutes longer. Default: on "
        "GPUs, for models of 0.2 B parameters and more.",
    )
    router_aux_loss_coef: float = setting(0.0, "Coefficient of the load-balancing loss of a mixture of experts.")
    router_replay: bool = False  # route tokens to the experts the engine chose; from the sampling settings
    parallel: ParallelSizes = ParallelSizes()  # from the plan
    adapter: AdapterSettings | None = None
    # The next three are from the sampling settings: the learner's log-probs follow them.
    temperature: float = 1.0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    offloads: tuple[str, ...] = ()  # any of weight, grad, optimizer
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling of completions."""

    max_new_tokens: int = setting(
        256,
        "Maximum tokens per completion.",
        minimum=1,
        rlinf="algorithm.sampling_params.max_new_tokens",
        loop="llm.vllm_class.max_new_tokens",
    )
    temperature: float = setting(
        1.0, "Sampling temperature.", rlinf="algorithm.sampling_params.temperature", loop="llm.temperature"
    )
    top_p: float = setting(
        1.0,
        "Nucleus sampling: smallest set of tokens with this total probability.",
        maximum=1,
        rlinf="algorithm.sampling_params.top_p",
        loop="llm.vllm_class.top_p",
    )
    top_k: int = setting(
        0,
        "Sample from the k most likely tokens; 0: from all.",
        rlinf="algorithm.sampling_params.top_k",
        loop="llm.vllm_class.top_k",
    )
    min_p: float = setting(
        0.0,
        "Drop tokens below this fraction of the most likely token's probability.",
        maximum=1,
        loop="llm.vllm_class.min_p",
    )
    stop_strings: tuple[str, ...] = setting(
        (), "Strings that end a completion, beside those of an agent; the token in which one ends is its last."
    )
    min_new_tokens: int = setting(
        0,
        "Minimum tokens per completion: before, no end-of-text token is sampled, and no stop string ends it, except "
        "with SGLang, where a stop string does.",
    )
    repetition_penalty: float = setting(
        1.0,
        "Factor that makes tokens less likely which the prompt or the completion has already; 1: off. The learner's "
        "log-probs follow it.",
        rlinf="algorithm.sampling_params.repetition_penalty",
        loop="llm.vllm_class.repetition_penalty",
    )
    sampling_mask_replay: bool = setting(
        False,
        "With top_p, top_k or min_p: have the engine return the tokens that it sampled from, and compute the learner's "
        "log-probs over them.",
    )
    router_replay: bool = setting(
        False,
        "With a mixture of experts: have the engine return the experts that it chose for each token, and route by them "
        "in the learner.",
    )

    @property
    def truncated_by(self) -> tuple[str, ...]:
        """Settings that truncate the distribution that tokens are sampled from."""
        cuts = {"top_p": self.top_p < 1, "top_k": 0 < self.top_k < LARGEST_VOCABULARY, "min_p": self.min_p > 0}
        return tuple(name for name, is_cut in cuts.items() if is_cut)


MOST_ADAPTIVE_EPISODES = 4096


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Samples of a step, and when its rollout ends."""

    prompts_per_step: int = setting(
        32, "Prompts per step.", minimum=1, rlinf="data.rollout_batch_size", loop="rl.params.scenarios_per_iteration"
    )
    num_generations: int = setting(
        8,
        "Samples per prompt (group size).",
        minimum=1,
        rlinf="algorithm.group_size",
        loop="rl.params.rollouts_per_scenario",
    )
    extra_generations: int = setting(
        0,
        "Samples generated per prompt beyond num_generations; the slowest are cancelled.",
        roll="train_env_manager.group_size_redundancy",
    )
    rollout_fraction: float = setting(
        1.0, "Fraction of a step's samples at which the rollout ends.", maximum=1, loop="rl.rollouts_fraction"
    )
    group_fraction: float = setting(
        1.0,
        "Fraction of every group that must be finished by then.",
        maximum=1,
        loop="rl.rollouts_per_scenario_fraction",
    )
    dynamic_sampling: bool = setting(False, "Replace groups whose samples all have the same reward.")
    episode_attempts: int = setting(3, "Attempts per episode before it counts as failed.", minimum=1)
    max_concurrent_episodes: int | None = setting(
        None, "Episodes that run at the same time. Default: 1024 of a single turn, 256 of others.", minimum=1
    )
    adaptive_concurrency: bool = setting(
        False,
        "Let the number of concurrent episodes follow the engines' KV cache and queue, up to max_concurrent_episodes "
        "(default: 4096).",
    )
    episode_timeout_s: float = setting(3600.0, "Time limit of an episode, in seconds.")
    rollout_logprobs: RolloutLogprobs = setting(
        RolloutLogprobs.AUTO, "Samples whose log-probs are requested from the engine, which cost vLLM much time."
    )
    request_seeds: bool | None = setting(
        None, "Seed each request, to sample the same again. Default: on the built-in engine; slow on vLLM."
    )

    def concurrency(self, is_single_turn: bool) -> int:
        """Episodes that run at the same time; more of a single turn, which need nothing but the engine."""
        return self.max_concurrent_episodes or (1024 if is_single_turn else 256)

    @property
    def largest_concurrency(self) -> int:
        """Episodes of a single turn that may run at the same time, with `adaptive_concurrency` as well."""
        if self.adaptive_concurrency and self.max_concurrent_episodes is None:
            return MOST_ADAPTIVE_EPISODES
        return self.concurrency(is_single_turn=True)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Evaluations of the policy."""

    eval_every: int = setting(0, "Steps between evaluations; 0: at the end only.")
    eval_tasks: int = setting(64, "Prompts per evaluation; 0: all.")
    eval_samples: int = setting(
        1, "Samples per prompt in evaluations.", minimum=1, roll="validation.generating_args.num_return_sequences"
    )
    eval_temperature: float = setting(
        0.0, "Sampling temperature in evaluations.", roll="validation.generating_args.temperature"
    )
    eval_top_p: float | None = setting(
        None, "top_p in evaluations. Default: top_p.", maximum=1, roll="validation.generating_args.top_p"
    )
    eval_top_k: int | None = setting(None, "top_k in evaluations. Default: top_k.")


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Checkpoints of the run."""

    checkpoint_every: int = setting(20, "Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: int = setting(3, "Checkpoints to keep.", minimum=1, loop="rl.max_ckpts")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """A whole training run."""

    learner: LearnerSettings
    name: str = setting(
        "run",
        "Name of the run's folder in runs/. Default: the config's file name.",
        rlinf="runner.logger.experiment_name",
        roll="exp_name",
        loop="experiment_name",
    )
    objective: Objective = setting(
        Objective.RL, "rl: from rewards of generated samples; sft: on given completions, without engines."
    )
    completion: str = setting(
        "",
        "With objective: sft, the column with the text to learn. Default: the assistant messages, else the answer.",
        roll="response_key",
    )
    max_sequence_tokens: int | None = setting(
        None, "With objective: sft, leave out conversations of more tokens.", minimum=1
    )
    task: Mapping[str, Any] = setting(
        {}, "The scenario: `_target_`, a class that makes tasks and runs episodes, and its arguments."
    )
    data: Mapping[str, Any] = setting(
        {},
        "Prompts from data files: `path`, `prompt`, `answer` and others; without a task each is answered in one turn.",
    )
    teacher: Mapping[str, Any] = setting(
        {},
        "A placed model that the policy is distilled from, on its own samples (`model`, `coef`, `estimator`, `tags`; "
        "several by name), or with objective: sft on given completions (`model`, `weight`, `divergence`, `top_k` ...).",
    )
    rewards: Mapping[str, Any] = setting(
        {}, "Reward functions beside the task's own: by name, `_target_`, `tags`, `weight` and arguments."
    )
    max_steps: int | None = setting(
        100, "Training steps.", minimum=1, roll="max_steps", loop="rl.params.total_iterations"
    )
    max_epochs: int | None = setting(
        None,
        "Passes over the training tasks; the run ends after these or after `max_steps`, whichever is less.",
        minimum=1,
    )
    seed: int = setting(0, "Random seed.", rlinf="actor.seed", roll="seed", loop="rl.seed")
    ppo_epochs: int = setting(
        1,
        "Optimization epochs per step.",
        minimum=1,
        rlinf="algorithm.update_epoch",
        roll="ppo_epochs",
        loop="rl.params.epochs_per_iteration",
    )
    shuffle_minibatches: bool = setting(
        True, "Spread the samples of a step over its minibatches at random.", rlinf="algorithm.shuffle_rollout"
    )
    minibatches: int = setting(
        1,
        "Samples per optimizer step. Default: all of a step.",
        name="minibatch_size",
        minimum=1,
        loop="rl.params.minibatch_size",
    )
    max_staleness: int = setting(0, "Policy versions that a sample may be behind the learner.", maximum=1000)
    in_flight: str | None = setting(
        None,
        "What a weight update does to requests in flight. Default: drain; with max_staleness hold, or drop for an "
        "adapter and with an engine other than torch.",
        choices=IN_FLIGHT,
    )
    max_skipped_steps: int = setting(
        3, "Optimizer steps skipped in a row (loss or gradient not finite) after which the run stops; 0: never."
    )
    critic_learning_rate: float | None = setting(
        None,
        "Learning rate of the critic. Default: the policy's.",
        rlinf="critic.optim.lr",
        roll="critic.training_args.learning_rate",
    )
    critic_lr_warmup_steps: int | None = setting(
        None,
        "Optimizer steps of the critic's warm-up. Default: the policy's.",
        rlinf="critic.optim.lr_warmup_steps|critic.lr_sched.lr_warmup_iters",
        roll="critic.training_args.warmup_steps",
    )
    critic_warmup_steps: int = setting(
        0,
        "Training steps at the beginning in which the critic alone learns.",
        rlinf="algorithm.critic_warmup_steps",
        roll="critic_warmup",
    )
    reference_sync_steps: int = setting(
        0, "Copy the policy to the reference every so many steps (TRL's ref_model_sync_steps); 0: never."
    )
    engine: str = setting("torch", "Inference engine.", choices=ENGINES)
    engine_options: Mapping[str, Any] = setting(
        {},
        "Options of the engine's server: `max_context` (tokens of prompt and completion together; default: the "
        "model's), `memory_fraction` (of each device), `args` (its own flags), `env`, `python` (an interpreter that "
        "has the engine), `host`, `api_key`, `served_name`, `weight_transfer` (ipc or nccl).",
    )
    advantage: AdvantageSettings = AdvantageSettings()
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def uses_reference(self) -> bool:
        """True if the KL from the reference is in the loss or in the rewards."""
        return self.learner.loss.kl_coef != 0 or self.advantage.kl_penalty_coef != 0

    @property
    def moves_reference(self) -> bool:
        """True if the reference is updated during the run, so that checkpoints must include it."""
        return self.uses_reference and self.reference_sync_steps > 0

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """Models that the policy is distilled from."""
        return read_teachers(self.teacher, Where(), Findings())

    @property
    def critic_alone_steps(self) -> int:
        """Training steps at the beginning in which the policy does not learn."""
        has_critic = self.advantage.advantage_estimator is AdvantageEstimator.GAE
        return self.critic_warmup_steps if has_critic else 0

    def with_schedule(self) -> TrainSettings:
        """The settings with the optimizer steps of the policy's schedule, which begins when the policy learns."""
        steps = max(1, self.max_steps - self.critic_alone_steps) if self.max_steps else 0
        optimizer = replace(self.learner.optimizer, total_steps=steps * self.optimizer_steps)
        return replace(self, learner=replace(self.learner, optimizer=optimizer))

    @property
    def critic_optimizer(self) -> OptimizerSettings:
        """The policy's optimizer over the whole run, with the critic's own learning rate and warm-up if it has them."""
        found = replace(self.learner.optimizer, total_steps=(self.max_steps or 0) * self.optimizer_steps)
        rate, warmup = self.critic_learning_rate, self.critic_lr_warmup_steps
        found = found if rate is None else replace(found, learning_rate=rate)
        return found if warmup is None else replace(found, warmup_steps=warmup, warmup_ratio=0.0)

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.num_generations

    @property
    def kv_sequences(self) -> tuple[int, int] | None:
        """Most sequences in the KV caches at once, and their length; None if either has no bound.

        >>> rollout = RolloutSettings(prompts_per_step=10, num_generations=8)
        >>> TrainSettings(LearnerSettings("m"), rollout=rollout, engine_options={"max_context": 100}).kv_sequences
        (80, 100)
        >>> RolloutSettings().largest_concurrency, RolloutSettings(adaptive_concurrency=True).largest_concurrency
        (1024, 4096)
        """
        context: Any = self.engine_options.get("max_context")
        rollout, evaluation = self.rollout, self.evaluation
        if not is_count(context) or rollout.dynamic_sampling or self.max_staleness:
            return None
        most = rollout.largest_concurrency
        sampled = rollout.prompts_per_step * (rollout.num_generations + rollout.extra_generations)
        evaluated = evaluation.eval_tasks * evaluation.eval_samples or most  # 0 tasks: all
        return min(max(sampled, evaluated), most), int(context)

    @property
    def in_flight_mode(self) -> str:
        """How a weight sync treats requests in flight: by default hold or drop with staleness, else drain."""
        if self.in_flight is not None:
            return self.in_flight
        if not self.max_staleness:
            return "drain"
        # Only the built-in engine reports the policy version of each token.
        can_hold = self.engine == "torch" and self.learner.adapter is None
        return "hold" if can_hold else "drop"

    def longest_sample(self, sequence: int | None = None, positions: int | None = None) -> int:
        """Tokens of the longest sample; of a completion alone where nothing bounds its prompt; 0 if nothing is known.

        `sequence` is the notation's own limit; no sample goes beyond the `positions` of the model, unless max_context
        does.

        >>> sampling, learner = SamplingSettings(max_new_tokens=100), LearnerSettings("m")
        >>> task = {"_target_": SCENARIO, "max_prompt_tokens": 50}
        >>> TrainSettings(learner, sampling=sampling, task=task).longest_sample()
        150
        >>> TrainSettings(learner, sampling=sampling, engine_options={"max_context": 120}).longest_sample(200)
        120
        >>> TrainSettings(learner, sampling=sampling).longest_sample(200, positions=80)
        80
        """
        if self.objective is Objective.SFT:
            return self.max_sequence_tokens or 0
        completion, context = self.sampling.max_new_tokens, self.engine_options.get("max_context")
        # Only data alone are answered in one turn.
        prompt = self.task.get("max_prompt_tokens") if self.task.get("_target_") == SCENARIO else None
        of_turn = prompt + completion if is_count(prompt) else None
        limits = [limit for limit in (context, of_turn, sequence) if is_count(limit)]
        longest, end = max(min(limits, default=0), completion), context if is_count(context) else positions
        return longest if end is None else min(longest, end)

    @property
    def minibatch_size(self) -> int:
        return self.samples_per_step // self.minibatches

    @property
    def step_count(self) -> int:
        """The number of steps; call `for_tasks` first if epochs decide it."""
        if self.max_steps is None:
            raise ValueError("the number of steps depends on the number of tasks: call for_tasks first")
        return self.max_steps

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of a training step, for the learning-rate schedule."""
        return self.ppo_epochs * self.minibatches

    def for_tasks(self, count: int) -> TrainSettings:
        """The settings with their number of steps, for this number of training tasks.

        A pass over the data has as many steps as there are whole batches; the run ends after `max_epochs` passes, or
        after `max_steps`, whichever is less.

        >>> rollout = RolloutSettings(prompts_per_step=4)
        >>> settings = TrainSettings(LearnerSettings("m"), max_steps=None, max_epochs=3, rollout=rollout)
        >>> settings.for_tasks(10).step_count
        6
        """
        if self.max_epochs is None:
            return self
        bound = count // self.rollout.prompts_per_step * self.max_epochs
        steps = bound if self.max_steps is None else min(bound, self.max_steps)
        return replace(self, max_steps=steps, max_epochs=None).with_schedule()


# Settings that have no effect in supervised training, which has no engines, rewards or advantages.
NOT_IN_SFT = frozenset(
    (
        *("rewards", "ppo_epochs", "max_staleness", "in_flight", "critic_learning_rate", "engine"),
        *("critic_lr_warmup_steps", "critic_warmup_steps", "reference_sync_steps"),
        *("engine_options", "eval_samples", "eval_temperature", "eval_top_p", "eval_top_k", "num_generations"),
        *("extra_generations", "rollout_fraction", "group_fraction", "dynamic_sampling", "episode_attempts"),
        *(
            "adaptive_concurrency",
            "max_concurrent_episodes",
            "episode_timeout_s",
            "rollout_logprobs",
            "request_seeds",
            "sampling_mask_replay",
            "router_replay",
        ),
    )
)


# Where each class is in TrainSettings, in the order of the settings page.
PARTS: Mapping[str, type] = {
    "": TrainSettings,
    "rollout": RolloutSettings,
    "sampling": SamplingSettings,
    "learner.optimizer": OptimizerSettings,
    "advantage": AdvantageSettings,
    "learner.loss": LossSettings,
    "learner": LearnerSettings,
    "learner.adapter": AdapterSettings,
    "evaluation": EvaluationSettings,
    "checkpoint": CheckpointSettings,
}


def _declared(part: str) -> tuple[Setting, ...]:
    """The settings that the class of a part declares."""
    hints = typing.get_type_hints(PARTS[part])
    found = []
    for each in fields(PARTS[part]):
        declared: Setting | None = each.metadata.get("setting")
        if declared is None:
            continue
        kind = hints[each.name]
        if NoneType in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
        kind = typing.get_origin(kind) or kind
        name = declared.name or each.name
        choices = tuple(kind.__members__.values()) if isinstance(kind, EnumType) else declared.choices
        path = (*(part.split(".") if part else ()), name)
        found.append(replace(declared, name=name, type=kind, choices=choices, path=path))
    return tuple(found)


SETTINGS_OF: Mapping[str, tuple[Setting, ...]] = {part: _declared(part) for part in PARTS}
SETTINGS = {each.name: each for part in SETTINGS_OF.values() for each in part}


def value_of(settings: TrainSettings, name: str) -> Any:
    """The value of a setting; None for those of an adapter that is not trained."""
    found: Any = settings
    for attribute in SETTINGS[name].path:
        found = None if found is None else getattr(found, attribute)
    return found


def default_of(name: str) -> Any:
    """Roost's default of a setting; None where it has none, or where it depends on other settings."""
    value = value_of(TrainSettings(LearnerSettings(""), name=""), name)
    return None if name == "minibatch_size" or value in ("", {}) else value
