"""Rules about training: settings that cannot work with the placements, or with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roost.config.data import is_teacher
from roost.config.findings import Findings
from roost.config.job import Notation
from roost.config.learning import DIFFERENCE, GROUP_ESTIMATORS, RATIO
from roost.config.train import (
    HIGHEST_RATE,
    AdvantageEstimator,
    AdvantageSettings,
    ImportanceSamplingLevel,
    LossSettings,
    LrSchedulerType,
    Objective,
    OldLogprobs,
    OptimizerSettings,
    PolicyLoss,
    RewardScope,
    RolloutLogprobs,
    TrainSettings,
    default_of,
    unlike_usual,
)
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.shape import UnknownShape, shape_from_config
from roost.placement.rules.adapters import check_adapter
from roost.placement.rules.levels import PRODUCTS, check_levels
from roost.placement.rules.mesh import (
    check_experts,
    check_images,
    check_mesh,
    check_no_images,
    check_undivided,
    data_groups,
)
from roost.placement.rules.placing import SUPERVISED, At, Placing, check_components, check_teachers, spelled
from roost.placement.rules.rewards import check_rewards

NO_MASKS = ("vllm", "sglang")  # engines whose sampling masks Roost cannot read
BY_GROUP = (AdvantageEstimator.LEAVE_ONE_OUT, AdvantageEstimator.GROUP_MEAN)


def check_training(
    settings: TrainSettings, components: Sequence[ComponentPlan], notation: Notation, at: At, findings: Findings
) -> None:
    """Check all rules."""
    by_name = {part.name: part for part in components}
    placing = Placing(notation, by_name)
    if settings.objective is Objective.SFT:
        _check_supervised(settings, by_name, placing, at, findings)
        return
    check_components(settings, by_name, placing, at, findings)
    _check_batches(settings, by_name, notation, at, findings)
    _check_shaping(settings, at, findings)
    _check_sampling(settings, notation, at, findings)
    _check_loss(settings, at, findings)
    _check_types(settings, at, findings)
    _check_learners(settings, by_name, at, findings)
    _check_in_flight(settings, at, findings)
    check_experts(settings, by_name, at, findings)
    check_images(settings, by_name, at, findings)
    check_rewards(settings.rewards, by_name, at("rewards"), findings)


def _check_supervised(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], placing: Placing, at: At, findings: Findings
) -> None:
    learner = next((parts[name] for name in SUPERVISED if name in parts), None)
    if learner is None:
        findings.error("RST-T023", at("task"), "needs actor, a learner, which is not placed", fix=placing.fix("actor"))
    elif settings.minibatch_size < (groups := data_groups(learner)):
        findings.error(
            "RST-T026",
            at("prompts_per_step"),
            f"a minibatch of {settings.minibatch_size} rows cannot be spread over {groups} learners",
            fix="use larger minibatches, or fewer learners",
        )
    check_teachers(settings, parts, placing, at, findings)
    _check_distillation(settings, [*parts.values()], at, findings)
    _check_types(settings, at, findings)
    _check_learners(settings, parts, at, findings)
    check_undivided(parts, at, findings)
    check_no_images(settings, at, findings)


def _check_distillation(settings: TrainSettings, parts: Sequence[ComponentPlan], at: At, findings: Findings) -> None:
    """Warn about distillation from whole distributions, with their size if a model is on this machine."""
    distillation = settings.learner.loss.distillation
    if distillation is None or distillation.top_k:
        return
    sizes = [_vocabulary(part.model.config) for part in parts if is_teacher(part.name) or part.name in SUPERVISED]
    largest = max(sizes, default=0)
    known = f"4 bytes x {largest:,} tokens = {4 * largest / 1000:,.0f} KB"
    size = known if largest else "4 bytes x the size of the vocabulary, which is not known here,"
    findings.warn(
        "RST-T088",
        at("teacher"),
        "top_k is 0, so that logits of the whole vocabulary are sent for each learnt token",
        f"{size} go through the driver for each",
        "write top_k: 64",
    )


def _vocabulary(config: Mapping[str, Any] | None) -> int:
    """Vocabulary size by config.json; 0 if it is not known."""
    try:
        return shape_from_config(config or {}).vocabulary
    except UnknownShape:
        return 0


def _check_batches(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], notation: Notation, at: At, findings: Findings
) -> None:
    rollout, advantage = settings.rollout, settings.advantage
    estimator = advantage.advantage_estimator
    samples = rollout.prompts_per_step * rollout.num_generations // settings.minibatches
    if "actor" in parts and samples < (groups := data_groups(parts["actor"])):
        findings.error(
            "RST-T026",
            at("minibatch_size"),
            f"a minibatch of {samples} samples cannot be spread over {groups} learners",
            f"{rollout.prompts_per_step} groups of {rollout.num_generations}, split into {settings.minibatches}",
            "use larger minibatches, or fewer learners",
        )
    if advantage.normalize_by_std and estimator not in BY_GROUP:
        findings.error(
            "RST-T027",
            at("normalize_by_std"),
            f"is for leave_one_out and group_mean, but the estimator is {estimator.value}",
            fix="write normalize_by_std: false, or another advantage_estimator",
        )
    _check_groups(settings, notation, at, findings)
    _check_down_sampling(advantage, rollout.num_generations, at, findings)
    if advantage.positive_advantages_only and estimator is AdvantageEstimator.GAE:
        findings.error(
            "RST-T029",
            at("positive_advantages_only"),
            "chooses samples by their advantage, but with gae every token has one of its own",
            fix="write positive_advantages_only: false, or another advantage_estimator",
        )


def _check_groups(settings: TrainSettings, notation: Notation, at: At, findings: Findings) -> None:
    """Check that an estimator that compares samples of one prompt has several of them."""
    rollout, advantage = settings.rollout, settings.advantage
    estimator = advantage.advantage_estimator
    if rollout.num_generations < 2 and _compares(advantage):
        findings.error(
            "RST-T028",
            at("num_generations"),
            f"is {rollout.num_generations}, but {estimator.value} compares samples of one prompt",
            fix=f"write 2 or more{_or_no_groups(notation, at)}",
        )
    elif rollout.num_generations < 2 and rollout.dynamic_sampling:
        findings.error(
            "RST-T028",
            at("dynamic_sampling"),
            "would replace every group, as each has one sample",
            fix="write num_generations: 2 or more, or dynamic_sampling: false",
        )
    elif advantage.keep_generations == 1 and _compares(advantage):
        findings.error(
            "RST-T028",
            at("keep_generations"),
            f"is 1, but {estimator.value} compares samples of one prompt",
            "the others are dropped before",
            f"write 2 or more{_or_no_groups(notation, at)}",
        )


def _compares(advantage: AdvantageSettings) -> bool:
    """Return True if advantages come from samples of one prompt; GiGPO's may come from the whole step."""
    in_groups = advantage.reward_baseline is RewardScope.GROUP and advantage.state_scope == "group"
    is_gigpo = advantage.advantage_estimator is AdvantageEstimator.GIGPO
    return advantage.advantage_estimator in GROUP_ESTIMATORS or (is_gigpo and in_groups)


def _or_no_groups(notation: Notation, at: At) -> str:
    """The end of a fix: an estimator that needs no groups, by the job's own key."""
    place = at("advantage_estimator")
    if place.path[:1] == ("train",):
        return ", or advantage_estimator: reinforce++"
    if notation is Notation.RLINF:
        return ", or adv_type: reinpp"
    return f", or {place.key_path}=reinforce_plus_plus" if notation is Notation.VERL else ""


def _check_down_sampling(advantage: AdvantageSettings, generations: int, at: At, findings: Findings) -> None:
    kept, least = advantage.keep_generations, advantage.keep_positive + advantage.keep_others
    if kept and least > kept:
        findings.error(
            "RST-T086",
            at("keep_generations"),
            f"is {kept}, but keep_positive and keep_others are {least} together",
            f"{advantage.keep_positive} + {advantage.keep_others} = {least}",
            f"write {least} or more, or lower one of them",
        )
    if kept > generations:
        what, why = f"is {kept}, but groups have {generations} samples", "all are learnt from, as without it"
        findings.warn("RST-T087", at("keep_generations"), what, why, f"write less than {generations}, or remove it")
    idle = [key for key in ("keep_positive", "keep_others", "keep_by_tool_errors") if getattr(advantage, key)]
    for key in idle if not kept else ():
        why, fix = "keep_generations is 0: all samples are learnt from", "write keep_generations, or remove it"
        findings.warn("RST-T087", at(key), "has no effect", why, fix)


def _check_shaping(settings: TrainSettings, at: At, findings: Findings) -> None:
    advantage, longest = settings.advantage, settings.sampling.max_new_tokens
    if advantage.overlong_buffer_tokens > longest:
        findings.error(
            "RST-T097",
            at("overlong_buffer_tokens"),
            f"is {advantage.overlong_buffer_tokens}, but completions have at most {longest} tokens",
            f"max_new_tokens is {longest}: every completion would be penalised",
            f"write overlong_buffer_tokens: {longest // 4}, or raise max_new_tokens",
        )
    if not advantage.overlong_buffer_tokens and advantage.overlong_penalty != default_of("overlong_penalty"):
        why, fix = "overlong_buffer_tokens is 0", "write overlong_buffer_tokens, or remove it"
        findings.warn("RST-T094", at("overlong_penalty"), "has no effect", why, fix)
    if advantage.overlong_buffer_tokens and not advantage.overlong_penalty:
        why, fix = "overlong_penalty is 0", "write overlong_penalty: 1, or remove it"
        findings.warn("RST-T094", at("overlong_buffer_tokens"), "has no effect", why, fix)
    if settings.critic_warmup_steps and advantage.advantage_estimator is not AdvantageEstimator.GAE:
        why, fix = "there is no critic", "write advantage_estimator: gae, or remove it"
        findings.warn("RST-T094", at("critic_warmup_steps"), "has no effect", why, fix)
    elif settings.max_steps and settings.critic_warmup_steps >= settings.max_steps:
        what = f"is {settings.critic_warmup_steps}, but the run has {settings.max_steps} steps"
        why, fix = "the critic alone learns in them, the policy never", "write a smaller number, or more steps"
        findings.warn("RST-T085", at("critic_warmup_steps"), what, why, fix)
    if advantage.kl_penalty_coef and advantage.kl_penalty_target == 0:
        what, why = "is 0; it must be above 0", "the coefficient follows the KL over the target"
        findings.error("RST-T095", at("kl_penalty_target"), what, why, "write 0.1, or leave it out")
    for name, noun in (("reward_clip", "rewards"), ("advantage_clip", "advantages")):
        if getattr(advantage, name) == 0:
            what, fix = f"is 0, which clips all {noun} to 0", "write a number above 0, or null for no clip"
            findings.error("RST-T095", at(name), what, f"no sample counts with {noun} of 0", fix)
    low, high = advantage.min_group_reward, advantage.max_group_reward
    if low is not None and high is not None and low >= high and settings.rollout.num_generations > 1:
        what = f"is {low:g}, but max_group_reward is {high:g}"
        why = "groups are learnt from if their mean reward is above the one and below the other: none is"
        findings.error("RST-T099", at("min_group_reward"), what, why, f"write less than {high:g}, or leave one out")


def _check_sampling(settings: TrainSettings, notation: Notation, at: At, findings: Findings) -> None:
    sampling = settings.sampling
    for key, value, fix in (("temperature", 0, "write 1.0"), ("min_p", 1, "write 0.05")):
        if getattr(sampling, key) == value:
            findings.error("RST-T030", at(key), f"is {value}, so that all samples of a prompt are alike", fix=fix)
    evaluation = settings.evaluation
    if evaluation.eval_samples > 1 and evaluation.eval_temperature == 0:
        findings.warn(
            "RST-T030",
            at("eval_samples"),
            f"is {evaluation.eval_samples}, but eval_temperature is 0, so that the samples of a prompt are alike",
            "each takes the likeliest tokens; only an environment may make them differ",
            "write eval_temperature: 1.0, or eval_samples: 1",
        )
    if sampling.min_new_tokens > sampling.max_new_tokens:
        what = f"is {sampling.min_new_tokens}, but max_new_tokens is {sampling.max_new_tokens}"
        findings.error("RST-T140", at("min_new_tokens"), what, fix=f"write at most {sampling.max_new_tokens}")
    for key, fix in (("top_p", "write 0.95"), ("repetition_penalty", "write 1.1")):
        if (value := getattr(sampling, key)) <= 0:
            findings.error("RST-T140", at(key), f"is {value:g}; it must be above 0", fix=f"{fix}, or leave it out")
    if sampling.repetition_penalty > 0 and sampling.repetition_penalty != 1 and settings.engine == "sglang":
        findings.warn(
            "RST-T141",
            at("repetition_penalty"),
            "does not mean the same to SGLang and to the learner",
            "SGLang counts the tokens of the completion alone, the learner also those of the prompt",
            "write engine: vllm, or leave it out",
        )
    cuts = sampling.truncated_by
    if sampling.sampling_mask_replay:
        _check_replay(settings, at, findings)
    elif cuts:
        # Also a script of another framework takes overrides, but has no section `train`.
        written = "sampling_mask_replay: true" if notation.is_trained else "train.sampling_mask_replay=true"
        fix = f"write {written}, or leave top_p, top_k and min_p out"
        if settings.engine in NO_MASKS:
            fix = "leave top_p, top_k and min_p out; masks are replayed with the built-in engine alone"
        findings.warn(
            "RST-T031",
            at(cuts[0]),
            "samples from a part of the distribution, but the learner computes log-probs over all of it",
            f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}; old_logprobs "
            f"{settings.learner.loss.old_logprobs.value}",
            fix,
        )


def _check_replay(settings: TrainSettings, at: At, findings: Findings) -> None:
    sampling, key = settings.sampling, "sampling_mask_replay"
    if not sampling.truncated_by:
        why, fix = "no top_p, top_k or min_p truncates the distribution", "write one of them, or remove it"
        findings.warn("RST-T094", at(key), "has no effect", why, fix)
    elif settings.engine in NO_MASKS:
        why, fix = f"engine is {settings.engine}", f"write engine: torch, or {key}: false"
        findings.error("RST-T109", at(key), "needs an engine whose sampling masks Roost reads", why, fix)


def _check_loss(settings: TrainSettings, at: At, findings: Findings) -> None:
    loss = settings.learner.loss
    has_weights = loss.weight_level is not ImportanceSamplingLevel.NONE
    if settings.max_staleness and loss.old_logprobs is OldLogprobs.RECOMPUTE and not has_weights:
        findings.error(
            "RST-T032",
            at("old_logprobs"),
            "is recompute, but samples may be of an older policy",
            f"max_staleness is {settings.max_staleness}: the learner no longer has the weights that made them",
            "write old_logprobs: decoupled, or old_logprobs: rollout",
        )
    elif settings.max_staleness and not has_weights:
        is_decoupled = loss.old_logprobs is OldLogprobs.DECOUPLED
        if is_decoupled or loss.importance_sampling_level is ImportanceSamplingLevel.NONE:
            findings.warn(
                "RST-T126",
                at("rollout_is" if is_decoupled else "importance_sampling_level"),
                "is none, so nothing corrects for samples of an older policy",
                f"max_staleness is {settings.max_staleness}, and no ratio or weight is against the engine's log-probs",
                "write rollout_is: token",
            )
    if settings.rollout.rollout_logprobs is RolloutLogprobs.SOME and loss.uses_engine_logprobs:
        findings.error(
            "RST-T083",
            at("rollout_logprobs"),
            "is some, but the loss uses the log-probs of every sample",
            "it corrects for the engine's log-probs"
            if loss.old_logprobs is OldLogprobs.RECOMPUTE
            else f"old_logprobs is {loss.old_logprobs.value}",
            "write rollout_logprobs: all, or leave it out",
        )
    if loss.dual_clip is not None and loss.dual_clip <= 1:
        findings.error(
            "RST-T033",
            at("dual_clip"),
            f"is {loss.dual_clip:g}; it must be above 1",
            "before the first optimizer step all ratios are 1",
            "write dual_clip: 3.0, or leave it out",
        )
    if 0 < loss.max_mean_ratio <= 1:
        findings.error(
            "RST-T033",
            at("max_mean_ratio"),
            f"is {loss.max_mean_ratio:g}; it must be above 1",
            "before the first optimizer step all ratios are 1",
            "write max_mean_ratio: 5, or leave it out",
        )
    for name, side in (("log_ratio_clip", "below"), ("log_ratio_clip_high", "above")):
        if getattr(loss, name) == 0:
            what, why = f"is 0, with which no ratio is {side} 1", "log-ratios are clamped by it before all else"
            findings.error("RST-T095", at(name), what, why, "write a magnitude of 20, or leave it out")
    _check_kind_of_loss(loss, at, findings)
    check_levels(settings, at, findings)
    _check_correction(loss, at, findings)
    _check_truncated_rejection(settings, at, findings)


OF_LOSS_TYPES = {
    PolicyLoss.CISPO: ("cispo_mask",),
    PolicyLoss.SAPO: ("sapo_temperature_pos", "sapo_temperature_neg"),
    PolicyLoss.TOPR: ("topr_positive_weight", "topr_negative_weight"),
    PolicyLoss.KIMI15: ("kimi15_tau",),
}


def _check_kind_of_loss(loss: LossSettings, at: At, findings: Findings) -> None:
    """Check settings that belong to another loss_type, and settings that the loss_type needs."""
    for kind, names in OF_LOSS_TYPES.items():
        for name in names:
            if kind is not loss.loss_type and getattr(loss, name) != default_of(name):
                why, fix = f"loss_type is {loss.loss_type.value}", f"write loss_type: {kind.value}, or remove it"
                findings.warn("RST-T094", at(name), "has no effect", why, fix)
    is_without_ratio = loss.importance_sampling_level is ImportanceSamplingLevel.NONE
    if is_without_ratio and loss.loss_type is not PolicyLoss.PPO:
        findings.error(
            "RST-T095",
            at("loss_type"),
            f"is {loss.loss_type.value}, which needs an importance ratio",
            "importance_sampling_level is none: the loss is -A log p",
            "write importance_sampling_level: token, or remove loss_type",
        )
    for name in OF_LOSS_TYPES[PolicyLoss.SAPO]:
        if loss.loss_type is PolicyLoss.SAPO and getattr(loss, name) == 0:
            what, fix = "is 0, but the sigmoid is divided by it", f"write {name}: {default_of(name)}"
            findings.error("RST-T095", at(name), what, fix=fix)


def _check_correction(loss: LossSettings, at: At, findings: Findings) -> None:
    has_weights = loss.weight_level is not ImportanceSamplingLevel.NONE
    is_against_engine = loss.old_logprobs is OldLogprobs.ROLLOUT
    if loss.rollout_is_batch_normalize and not has_weights:
        why, fix = "there are no weights to normalise", "write rollout_is: token, or remove it"
        findings.warn("RST-T094", at("rollout_is_batch_normalize"), "has no effect", why, fix)
    cap, is_normalised = loss.importance_weight_cap or 1.0, loss.rollout_is_batch_normalize
    if has_weights and cap < 1 and not is_normalised:
        findings.warn(
            "RST-T033",
            at("importance_weight_cap"),
            f"is {cap:g}, which scales down the loss of every token",
            "also of tokens on which engine and learner agree, whose weight is 1",
            "write importance_weight_cap: 2, or another number above 1",
        )
    for rule in loss.rejections:
        name, equal = (DIFFERENCE, 0.0) if rule.of_difference else (RATIO, 1.0)
        if not rule.low <= equal <= rule.high:
            findings.error(
                "RST-T095",
                at("rollout_rejection"),
                f"rejects every {rule.level.value} with a {name} of {equal:g}",
                f"that is where engine and learner agree; its bounds are {rule.low:g} and {rule.high:g}",
                f"write bounds with {equal:g} between them",
            )
    has_ratio = loss.importance_sampling_level is not ImportanceSamplingLevel.NONE
    if has_weights and has_ratio and is_against_engine:
        findings.warn(
            "RST-T096",
            at("rollout_is"),
            "corrects for the engine's log-probs a second time",
            "old_logprobs is rollout: the importance ratio is already against the engine",
            "write old_logprobs: recompute, or remove rollout_is",
        )


def _check_truncated_rejection(settings: TrainSettings, at: At, findings: Findings) -> None:
    """Warn of bounds that leave no room for the ratios that top_p alone makes.

    The engine's log-probs are of the tokens that top_p leaves, which have a probability of top_p or a little more.
    """
    sampling = settings.sampling
    if sampling.sampling_mask_replay or not 0 < sampling.top_p < 1:
        return
    for rule in settings.learner.loss.rejections:
        least = 0.0 if rule.level in PRODUCTS else sampling.top_p  # a product over many tokens goes to 0
        if rule.of_difference or rule.low <= least:
            continue
        level, other = rule.level.value, "remove top_p"
        other = other if settings.engine in NO_MASKS else f"write sampling_mask_replay: true, or {other}"
        findings.warn(
            "RST-T095",
            at("rollout_rejection"),
            f"rejects every {level} with a ratio below {rule.low:g}, and top_p {sampling.top_p:g} makes such ratios",
            f"the learner gives the tokens that top_p leaves {sampling.top_p:g} or more, the engine 1: ratios "
            "of tokens are between the two",
            other,
        )


def _check_types(settings: TrainSettings, at: At, findings: Findings) -> None:
    weight, compute = settings.learner.weight_dtype, settings.learner.compute_dtype
    if compute == "float16":
        findings.error(
            "RST-T015",
            at("compute_dtype"),
            "is float16, whose losses Roost does not scale",
            fix="write compute_dtype: bfloat16",
        )
    elif compute == "float32" and weight != "float32":
        findings.error(
            "RST-T038",
            at("weight_dtype"),
            f"is {weight}, but compute_dtype is float32",
            "weights would be kept with less than they are used with",
            f"write {spelled(at('weight_dtype'), 'weight_dtype', 'float32')}",
        )
    elif weight != "float32" and _trains_a_whole_model(settings):
        findings.warn(
            "RST-T040",
            at("weight_dtype"),
            f"is {weight}, in which steps of usual learning rates are rounded away",
            "the optimizer changes these very weights; there is no copy of 32 bits",
            f"write {spelled(at('weight_dtype'), 'weight_dtype', 'float32')} (compute_dtype: bfloat16 keeps the speed)",
        )


def _trains_a_whole_model(settings: TrainSettings) -> bool:
    """Return True without an adapter, or with a critic, which is trained in full even beside an adapter."""
    return settings.learner.adapter is None or settings.advantage.advantage_estimator is AdvantageEstimator.GAE


def _check_learners(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    for part in parts.values():
        check_mesh(part, at(part.name), findings)
    check_adapter(settings, parts, at, findings)
    rates = {"learning_rate": settings.learner.optimizer.learning_rate}
    if settings.advantage.advantage_estimator is AdvantageEstimator.GAE:
        rates["critic_learning_rate"] = settings.critic_learning_rate or 0.0
    for name, rate in rates.items():
        if rate > HIGHEST_RATE:
            findings.warn(
                "RST-T039", at(name), unlike_usual(rate), "training is likely to diverge in its first steps", "lower it"
            )
    _check_schedules(settings, parts, at, findings)
    if settings.critic_learning_rate == 0:
        findings.error(
            "RST-T035",
            at("critic_learning_rate"),
            "is 0, with which the critic learns nothing",
            fix="write a number above 0, or leave it out",
        )


def _check_schedules(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    """Check the learning-rate schedule of the policy, and of the critic if one is trained."""
    optimizer = settings.learner.optimizer
    _check_constant(optimizer, at, findings)
    rate, warmup = "learning_rate", "warmup_steps" if optimizer.warmup_steps else "warmup_ratio"
    _check_schedule(optimizer, rate, warmup, at, findings)
    if settings.advantage.advantage_estimator is AdvantageEstimator.GAE and "critic" in parts:
        # Equal findings of both schedules are shown once.
        rate = rate if settings.critic_learning_rate is None else "critic_learning_rate"
        warmup = warmup if settings.critic_lr_warmup_steps is None else "critic_lr_warmup_steps"
        _check_schedule(settings.critic_optimizer, rate, warmup, at, findings)


def _check_constant(settings: OptimizerSettings, at: At, findings: Findings) -> None:
    """Report settings of a decay with a constant schedule: a note for a notation's key, as RLinf and ROLL ignore it."""
    if settings.lr_scheduler_type is not LrSchedulerType.CONSTANT:
        return
    is_ratio = settings.warmup_ratio > 0 and not settings.warmup_steps  # of decay_steps, if they are given
    for key, is_idle in {
        "min_learning_rate": settings.min_learning_rate > 0,
        "decay_steps": settings.decay_steps is not None and not is_ratio,
    }.items():
        if is_idle:
            report = findings.warn if at(key).path[:1] == ("train",) else findings.note
            why = f"lr_scheduler_type is constant: the learning rate stays at {settings.learning_rate:g}"
            report(
                "RST-T084",
                at(key),
                "has no effect",
                why,
                "write lr_scheduler_type: cosine, linear or wsd, or remove it",
            )


def _check_schedule(settings: OptimizerSettings, rate_key: str, warmup_key: str, at: At, findings: Findings) -> None:
    """Report a schedule that would rise, or that warms up beyond its end."""
    rate, least, warmup = settings.learning_rate, settings.min_learning_rate, settings.steps_of_warmup
    falls, end = settings.lr_scheduler_type is not LrSchedulerType.CONSTANT, settings.schedule_steps
    if falls and least > rate:
        what = f"is {least:g}, but {rate_key} is {rate:g}"
        findings.error("RST-T077", at("min_learning_rate"), what, "the schedule would rise to it", "lower it")
    if falls and settings.decay_steps is not None and warmup >= settings.decay_steps:
        findings.error(
            "RST-T077",
            at("decay_steps"),
            f"is {settings.decay_steps} optimizer steps, of which the first {warmup} are warm-up",
            f"{warmup_key} leaves the learning rate no step to fall in",
            f"write more than {warmup}, or a shorter warm-up",
        )
    elif settings.lr_scheduler_type is LrSchedulerType.WSD and settings.steps_of_wsd_decay > end - warmup > 0:
        findings.error(
            "RST-T077",
            at("wsd_decay_steps"),
            f"is {settings.steps_of_wsd_decay} optimizer steps, but {end - warmup} follow the warm-up",
            f"{end} steps of the schedule - {warmup} of warm-up = {end - warmup}",
            f"write at most {end - warmup}",
        )
    elif warmup >= settings.total_steps > 0 and warmup > 1:  # one step of warm-up has the full learning rate
        findings.warn(
            "RST-T085",
            at(warmup_key),
            f"makes {warmup} optimizer steps of warm-up, but the run has {settings.total_steps}",
            f"the learning rate grows until the end, to {rate * settings.total_steps / warmup:g} of {rate:g}",
            "write a shorter warm-up, or more steps",
        )


def _check_in_flight(settings: TrainSettings, at: At, findings: Findings) -> None:
    """Report `in_flight: hold` with engines that cannot hold requests; vLLM is checked at run time."""
    if settings.in_flight != "hold":
        return
    fix = "write in_flight: drop, or in_flight: drain"
    if settings.engine == "sglang":
        findings.error(
            "RST-T036",
            at("in_flight"),
            "is hold, which sglang cannot do",
            "it does not forget what it cached with the old weights while requests are held",
            fix,
        )
    elif settings.learner.adapter is not None:
        findings.error(
            "RST-T037",
            at("in_flight"),
            "is hold, but an adapter is trained",
            "requests on hold would go on with the adapter they had",
            fix,
        )
