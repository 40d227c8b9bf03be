"""From rewards to advantages in ROLL: the estimator, the normalisation of rewards, and the whitening."""

from __future__ import annotations

from typing import Any

from roost.config.errors import shown
from roost.config.section import Section
from roost.config.training import Estimator, Whitening
from roost.config.training_words import ESTIMATORS, named

# ROLL's own reinforce normalises nothing; what is done to rewards before it decides.
ADV_ESTIMATORS = {**ESTIMATORS, "reinforce": Estimator.REWARD}
NORMALISED = {  # by the types of the mean and the standard deviation
    (None, None): Estimator.REWARD,
    ("group", None): Estimator.GROUP_MEAN,
    ("group", "group"): Estimator.GRPO,
    ("batch", "batch"): Estimator.REINFORCE,
}
METHODS = {"mean": (True, False), "mean_std": (True, True), "asym_clip": (True, True)}
GROUPINGS = {"batch": "batch", "traj_group_id": "group"}


def advantage_settings(root: Section) -> dict[str, Any]:
    """`advantage_estimator` and `whiten_advantages`, as far as the config says."""
    estimator = named(root, "adv_estimator", ADV_ESTIMATORS)
    if "train_env_manager" in root:
        # In the agentic pipeline grpo is another word for reinforce: the normalisation of rewards is a block's own.
        if root.values.get("adv_estimator") in ("reinforce", "grpo"):
            estimator = _normalised(root, *_types_of_block(root.below("reward_normalization")))
    elif estimator is Estimator.REWARD:
        estimator = _normalised(root, root.values.get("norm_mean_type"), root.values.get("norm_std_type"))
    if estimator not in (None, Estimator.GAE):
        _warn_discount(root)
    whitens = root.flag("whiten_advantages") if root.get("whiten_advantages") is not None else None
    if whitens:
        _warn_domains(root)
    whitening = None if whitens is None else Whitening.TOKENS if whitens else Whitening.NONE
    return {"advantage_estimator": estimator, "whiten_advantages": whitening}


def _types_of_block(block: Section) -> tuple[Any, Any]:
    """What `method` asks for, over the samples of `grouping`; `norm_*_type` may name other samples."""
    needs_mean, needs_std = METHODS.get(str(block.values.get("method")), (False, False))
    grouping = block.values.get("grouping") or "batch"
    over = GROUPINGS.get(str(grouping), grouping)
    mean = (block.values.get("norm_mean_type") or over) if needs_mean else None
    std = (block.values.get("norm_std_type") or over) if needs_std else None
    return mean, std


def _normalised(root: Section, mean: Any, std: Any) -> Estimator:
    are_words = all(isinstance(each, str | None) for each in (mean, std))
    estimator = NORMALISED.get((mean, std)) if are_words else None
    if estimator is None:
        key = "reward_normalization" if "train_env_manager" in root else "norm_mean_type"
        root.error(
            key,
            f"takes the mean over {shown(mean)} and the standard deviation over {shown(std)}, "
            "which Roost does not support",
            "it has group and group, batch and batch, the group's mean alone, and none",
            "write one of these",
        )
        return Estimator.REWARD
    return estimator


def _warn_discount(root: Section) -> None:
    """ROLL discounts the reward token by token with every estimator; Roost with a critic only."""
    gamma = root.get("gamma")
    if gamma not in (None, 1):
        root.findings.warn(
            root.where("gamma"),
            f"is {shown(gamma)}, but without a critic all tokens of a sample have one advantage",
            "ROLL discounts the reward at every token before the last",
            "write gamma: 1, or adv_estimator: gae",
        )


def _warn_domains(root: Section) -> None:
    """ROLL whitens each domain of its rewards alone; Roost all samples of a step together."""
    domains = len(root.below("rewards").values)
    if domains > 1 and "train_env_manager" not in root:
        root.findings.warn(
            root.where("whiten_advantages"),
            "is done over all samples of a step together",
            f"ROLL does it for each of the {domains} domains of rewards alone",
            "write whiten_advantages: false, or train on one domain",
        )
