"""Rewards of RLinf (`reward`) and ROLL (`rewards`) as `train.rewards`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from roost.config.findings import did_you_mean, shown
from roost.config.notations.words import ENGINES
from roost.config.source import Section

Keys = dict[str, Any]
MATH, RULES = "roost.rollout.rewards.math_answer", "roost.rollout.rewards.rules"
JUDGES, MODELS = "roost.rollout.rewards.judge", "roost.rollout.rewards.reward_model"
FALLBACK_DOMAIN = "math_rule"  # ROLL's domain of rows that no reward claims
NAMED_PROMPT = "Qwen2.5-7B-Instruct-RLVR-prompt"
API_KEY = "JUDGE_API_KEY"

RLINF_KEYS = """reward.reward_type reward.reward_scale reward.reward_min_val reward.reward_max_val reward.reward_weights
reward.use_prompt reward.use_reward_model reward.compute_score_timeout reward.default_score_on_timeout"""
ROLL_KEYS = """rewards rewards.*.worker_cls rewards.*.tag_included rewards.*.reward_type
rewards.*.response_length_penalty_coef rewards.*.use_local rewards.*.code_url rewards.*.judge_prompt
rewards.*.judge_model_type rewards.*.judge_model_name rewards.*.judge_api_url rewards.*.judge_api_key
rewards.*.generating_args.temperature rewards.*.generating_args.top_p rewards.*.generating_args.top_k
rewards.*.generating_args.max_new_tokens reward reward_model"""
ROLL_FILTERS = ("rewards.*.query_filter_config",)


def is_replaced(root: Section, section: Section) -> bool:
    """Return True if `train` has rewards or a task; note that the notation's own rewards are then unused."""
    train = root.below("train")
    by = next((key for key in ("rewards", "task") if train.values.get(key) is not None), None)
    if by is None or not section.values:
        return by is not None
    why = "train.rewards replaces it" if by == "rewards" else "the class of train.task scores its episodes"
    fix = "name its rewards in train.rewards" if by == "task" else "remove it"
    root.findings.note("RST-A027", section.where(), "is not used", why, fix)
    return True


def number(section: Section, key: str, default: float) -> float:
    """A number of any sign."""
    value = section.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        section.error("RST-C026", key, f"is {shown(value)}; it must be a number", fix=f"write {key}: {default:g}")
        return default
    return float(value)


def _known_names(name: str, known: Mapping[str, Any]) -> str:
    hint = did_you_mean(name, known)
    return f"Roost has {', '.join(known)}" + (f"; {hint}" if hint else "")


# RLinf --------------------------------------------------------------------------------------------------------------


def rlinf_rewards(root: Section) -> Keys | None:
    """`reward.*` of a text task."""
    reward = root.below("reward")
    is_given = "reward_type" in reward or reward.values.get("use_reward_model") is True
    if root.below("runner").values.get("task_type") == "embodied" or not is_given or is_replaced(root, reward):
        return None
    if reward.flag("use_reward_model"):
        model = reward.below("model").text("model_path")
        if model is None:
            what, why = "needs a model", "RLinf has none for text, so Roost's own reads reward.model.model_path"
            reward.error("RST-A026", "use_reward_model", what, why, "write reward.model.model_path")
            return None
        return {"model": {"_target_": f"{MODELS}.RewardModel", "model": model}}
    kind = reward.text("reward_type")
    make = RLINF_TYPES.get(kind or "")
    if make is None:
        why = _known_names(kind or "", RLINF_TYPES)
        fix = "write one of these, or name a class of your own in train.rewards"
        reward.error("RST-A026", "reward_type", f"is {shown(kind)}, which names no reward", why, fix)
        return None
    return {str(kind): make(reward)}


def _rlinf_math(reward: Section) -> Keys:
    scale, least, most = (
        number(reward, key, default)
        for key, default in (("reward_scale", 1.0), ("reward_min_val", -1.0), ("reward_max_val", 1.0))
    )
    return {"_target_": f"{MATH}.RlinfMath", "scale": scale, "min_val": least, "max_val": most}


def _rlinf_vqa(reward: Section) -> Keys:
    weights = reward.mapping("reward_weights")
    names = ("qa_accuracy", "think_format", "answer_format")
    missing = [name for name in names if weights is None or weights.values.get(name) is None]
    if missing:
        fix = "write a number for each"
        reward.error("RST-A026", "reward_weights", f"has no {', '.join(missing)}", "vqa has three parts", fix)
    return {
        "_target_": f"{RULES}.VqaAnswer",
        "weights": {name: 0.0 if weights is None else weights.number(name) or 0.0 for name in names},
    }


def _rlinf_code(reward: Section) -> Keys:
    if reward.values.get("use_prompt") is not True:
        why, fix = "the judge has to see the code around the gap", "write use_prompt: true"
        reward.error("RST-A026", "use_prompt", "is not true, but code_offline needs the prompt", why, fix)
    scale = number(reward, "reward_scale", 1.0)
    return {"_target_": f"{JUDGES}.CompletionJudge", "scale": scale, "cache": True}


def _rlinf_rstar2(reward: Section) -> Keys:
    limit = reward.number("compute_score_timeout")
    return {
        "_target_": f"{MATH}.Rstar2Math",
        "scale": number(reward, "reward_scale", 1.0),
        "limit_s": limit or 6.0,
        "on_timeout": number(reward, "default_score_on_timeout", 0.0),
    }


RLINF_TYPES: Mapping[str, Callable[[Section], Keys]] = {
    "math": _rlinf_math,
    "vqa": _rlinf_vqa,
    "code_offline": _rlinf_code,
    "searchr1": lambda reward: {"_target_": f"{RULES}.SearchAnswer"},
    "rstar2": _rlinf_rstar2,
}


# ROLL ---------------------------------------------------------------------------------------------------------------


def roll_rewards(root: Section) -> Keys | None:
    """Rewards of `rewards.NAME`, by worker class, or the reward model of `reward` or `reward_model`."""
    rewards = root.below("rewards")
    roles = [root.below(role) for role in ("reward", "reward_model") if root.below(role).values]
    if not (rewards.values or roles) or is_replaced(root, rewards if rewards.values else roles[0]):
        return None
    if "train_env_manager" in root:
        return None  # ROLL's environments give the rewards
    found: Keys = {}
    for name in rewards.values:
        reward = _roll_reward(root, rewards.below(str(name)), str(name))
        if reward is not None:
            found[str(name)] = reward
    if not rewards.values:
        model = roles[0].below("model_args").text("model_name_or_path") or root.text("reward_pretrain")
        if model is None:
            why, fix = "it is a model that gives a number", "write model_args.model_name_or_path"
            root.error("RST-A026", str(roles[0].path[0]), "names no model", why, fix)
            return None
        found["model"] = {"_target_": f"{MODELS}.RewardModel", "model": model}
    return found


def roll_filters(root: Section) -> bool | None:
    """Return True if a `query_filter_config` replaces groups, as `dynamic_sampling` does."""
    found: bool | None = None
    for name in root.below("rewards").values:
        block = root.below("rewards", str(name), "query_filter_config")
        arguments = block.below("filter_args") if "filter_args" in block else block
        kind = block.text("type")
        if kind in (None, "no_filter"):
            continue
        found = True
        down, up, std = (arguments.values.get(key) for key in ("threshold_down", "threshold_up", "std_threshold"))
        is_same = (down in (0, 0.0) and up in (1, 1.0)) if kind == "mean_filter" else std in (0, 0.0)
        if not is_same:
            root.findings.warn(
                "RST-A028",
                block.where(),
                "replaces only groups whose rewards are all equal",
                f"ROLL's {kind} has other thresholds",
                "write threshold_down: 0 and threshold_up: 1, or std_threshold: 0",
            )
    return found


def _roll_reward(root: Section, section: Section, name: str) -> Keys | None:
    written = section.text("worker_cls")
    class_name = (written or "").rpartition(".")[2]
    make = ROLL_CLASSES.get(class_name)
    if make is None:
        why = _known_names(class_name, ROLL_CLASSES)
        fix = "write one of these, or name a class of your own in train.rewards"
        what = f"is {shown(class_name)}, which Roost does not have" if written else "is missing"
        section.error("RST-A026", "worker_cls", what, why, fix)
        return None
    keys = make(root, section)
    if keys is None:
        return None
    tags = section.get("tag_included")
    given = {"tags": [str(tag) for tag in tags] if isinstance(tags, list | tuple) else [], "domain": name}
    return {**keys, **given, **({"fallback": True} if name == FALLBACK_DOMAIN else {})}


def _roll_code(root: Section, section: Section) -> Keys:
    is_remote = section.values.get("use_local") is False
    if is_remote:
        why = "as in ROLL, a case that raises gives -1 then"
        what = "names an external sandbox, but code runs in Roost's own"
        key = "code_url" if section.values.get("code_url") is not None else "use_local"
        root.findings.warn("RST-A028", section.where(key), what, why, "write use_local: true")
    errors = {"on_error": -1.0} if is_remote else {}
    return {"_target_": "roost.rollout.rewards.code_tests.RollCode", **errors}


def _roll_instructions(root: Section, section: Section) -> Keys:
    return {"_target_": "roost.rollout.rewards.instructions.InstructionFollowing"}


def _roll_choices(root: Section, section: Section) -> Keys | None:
    kinds = ("loose", "soft", "strict")
    kind = section.text("reward_type")
    if kind not in kinds:
        what = "is missing" if kind is None else f"is {shown(kind)}"
        section.error("RST-A026", "reward_type", what, "CrossThinkQA needs it", f"write one of {', '.join(kinds)}")
        return None
    coef = number(section, "response_length_penalty_coef", 0.0)
    if coef:
        what = f"is {coef:g}, and counts the tokens of an answer"
        why = "ROLL counts its padding, too, so that the term is 0 there"
        where = section.where("response_length_penalty_coef")
        root.findings.warn("RST-A028", where, what, why, "write 0 to have ROLL's rewards")
    return {"_target_": f"{RULES}.CrossThink", "reward_type": kind, "length_penalty_coef": coef}


def _roll_judge(root: Section, section: Section) -> Keys | None:
    from_args = section.below("generating_args")
    sampling: Keys = {key: value for key in ("temperature", "top_p") if (value := number(from_args, key, -1.0)) >= 0}
    top_k = from_args.get("top_k")
    if isinstance(top_k, int) and top_k > 0:
        sampling["top_k"] = top_k
    keys: Keys = {
        "_target_": f"{JUDGES}.Judge",
        "reference": "ground_truth",
        "sampling": sampling,
        "max_tokens": from_args.whole_number("max_new_tokens", 1, 1024, maximum=10**6),
    }
    if section.values.get("judge_prompt") == NAMED_PROMPT:
        # ROLL asks again only where the reply is empty; any reply without a yes counts as a no.
        keys |= {"template": "yes_or_no", "word": "yes", "lowest": 0.0, "highest": 1.0}
    else:
        what, why = (
            "is not a prompt that Roost has",
            "ROLL looks for yes in the reply to its 0-10 prompt, so it gives 0",
        )
        fix = f"write judge_prompt: {NAMED_PROMPT} for yes or no; Roost reads the number, and divides it by 10"
        root.findings.warn("RST-A028", section.where("judge_prompt"), what, why, fix)
    served = _roll_served(root, section)
    return None if served is None else keys | served


def _roll_served(root: Section, section: Section) -> Keys | None:
    kind = section.text("judge_model_type") or "inference"
    if kind == "api":
        if section.values.get("judge_api_key") is not None:
            what, why = "is not read", "configs are stored with the run"
            fix = f"set the environment variable {API_KEY} instead"
            root.findings.warn("RST-A028", section.where("judge_api_key"), what, why, fix)
        found: Keys = {"base_url": section.text("judge_api_url"), "model": section.text("judge_model_name")}
        missing = [key for key, value in found.items() if value is None]
        if missing:
            key = "judge_api_url" if "base_url" in missing else "judge_model_name"
            section.error("RST-A026", key, "is missing", "judge_model_type is api", f"write {key}")
            return None
        return found | ({"api_key_env": API_KEY} if "judge_api_key" in section else {})
    if kind != "inference":
        why, fix = "ROLL refuses other words, too", "write judge_model_type: inference or judge_model_type: api"
        section.error("RST-A026", "judge_model_type", f"is {shown(kind)}", why, fix)
        return None
    model = section.below("model_args").text("model_name_or_path") or root.text("reward_pretrain")
    if model is None:
        fix = "write model_args.model_name_or_path"
        section.error("RST-A026", "model_args", "names no model", "the judge is a model", fix)
        return None
    strategy = section.below("strategy_args")
    options = strategy.below("strategy_config")
    engine: Keys = {"kind": ENGINES.get(str(strategy.values.get("strategy_name")), "torch")}
    if engine["kind"] != "torch":
        engine |= {
            name: value
            for name, value in (
                ("max_context", options.values.get("max_model_len")),
                ("memory_fraction", options.values.get("gpu_memory_utilization")),
            )
            if value is not None
        }
    return {"model": model, "engine": engine}


Make = Callable[[Section, Section], Keys | None]
ROLL_CLASSES: Mapping[str, Make] = {
    "MathRuleRewardWorker": lambda root, section: {"_target_": f"{MATH}.RollMath"},
    "CodeSandboxRewardWorker": _roll_code,
    "LLMJudgeRewardWorker": _roll_judge,
    "GeneralRuleRewardWorker": _roll_instructions,
    "IfEvalRuleRewardWorker": _roll_instructions,
    "CrossThinkQARuleRewardWorker": _roll_choices,
    "MultipleChoiceBoxedRuleRewardWorker": lambda root, section: {"_target_": f"{RULES}.BoxedAnswer", "choices": True},
    "GeneralValRuleRewardWorker": lambda root, section: {"_target_": f"{RULES}.BoxedAnswer"},
}
