"""Runs the cases of golden_advantages.jsonl along the path of a job: keys, settings, batch, advantages.

A case has the keys of RLinf or ROLL, the inputs, and the numbers that their own functions gave.
"""

from dataclasses import replace

import numpy as np

from roost.config.job import Notation
from roost.config.notations.words import DIVERGENCES
from roost.config.train import Whitening
from roost.learner.advantages import adapted_kl_coef, kl_estimates, normalised_rewards, step_returns, whitened
from roost.learner.sample import Sample, predicted
from roost.rollout.episode import EpisodeReward
from roost.trainer.batch import (
    Batch,
    Source,
    from_token_rewards,
    mean_kl,
    reward_of_samples,
    token_rewards,
    unmasked,
    with_advantages,
    with_teachers,
)
from tests.config.test_training_read import config_of, merged, read

ARGUMENTS = ("normalize_inside", "unbiased", "shift_mean", "div_std", "div_std_global", "n_sample", "reference_configs")
GROUP_SIZE = "actor_infer.generating_args.num_return_sequences"
ENVIRONMENTS = {"num_env_groups": 8, "group_size": 4}


def settings_of(case):
    """The advantage settings that the keys of a case amount to, and the findings."""
    notation = Notation.RLINF if case["framework"] == "rlinf" else Notation.ROLL
    keys = {path: value for path, value in case["config"].items() if path not in ARGUMENTS}
    if GROUP_SIZE in keys:
        keys["num_return_sequences_in_group"] = keys.pop(GROUP_SIZE)
    if "agentic" in case["id"]:
        keys["train_env_manager"] = ENVIRONMENTS
    if case["id"].startswith("rlinf.adv.gae_critic"):
        keys["cluster.component_placement"] = {"actor,critic": "0", "rollout": "1"}
        keys["algorithm.normalize_advantages"] = False
    teachers = case["config"].get("reference_configs", {})
    if teachers:
        roles = {name: {"device_mapping": [0], **keys_of} for name, keys_of in teachers.items()}
        keys["teacher"] = roles if len(roles) > 1 else roles["default"]
    config = config_of(notation)
    for path, value in keys.items():
        config = merged(config, path.split("."), value)
    settings, findings = read(config)
    return (settings.advantage, findings, settings.teachers) if teachers else (settings.advantage, findings)


def numbers(values):
    return np.array(values, dtype=np.float64)


class Rows:
    """The rows of a case as a batch; `spread` puts values of predicted tokens back into the rows."""

    def __init__(self, case):
        given = case["inputs"]
        self.mask = np.array(given["response_mask"])
        if case["framework"] == "rlinf" or self.mask.shape == np.shape(given.get("token_level_rewards", ())):
            self.mask = np.concatenate([np.zeros((len(self.mask), 1), int), self.mask], axis=1)  # the prompt
        self.ends = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 1 for row in self.mask]
        arrays = {name: given.get(name) for name in ("old_logprobs", "ref_logprobs", "values")}
        self.samples = tuple(
            self._sample(index, {name: each[index] for name, each in arrays.items() if each is not None})
            for index in range(len(self.mask))
        )

    def _sample(self, index, arrays):
        end, row = self.ends[index], self.mask[index]
        turns = np.where(row, np.cumsum(np.diff(row, prepend=0) == 1) - 1, -1)[:end]
        whole = {name: np.concatenate([[0.0], each])[:end].astype(np.float32) for name, each in arrays.items()}
        zeros = np.zeros(end, np.float32)
        return Sample(
            np.arange(end) + 1000 * index,
            turns,
            zeros,
            zeros,
            old_logprobs=whole.get("old_logprobs"),
            reference_logprobs=whole.get("ref_logprobs"),
            values=whole.get("values"),
        )

    def picked(self, index, row):
        """Entries of a row of [B, S-1] at the predicted tokens."""
        return numbers(row)[np.flatnonzero(predicted(self.samples[index])) - 1]

    @property
    def lengths(self):
        return self.mask.sum(axis=1)


def batch_of_case(case, rows):
    given, count = case["inputs"], len(rows.samples)
    if "traj_id" in given:
        return batch_of_steps(given, rows)
    rewards = numbers(given.get("rewards", given.get("scores", [0.0] * count)))
    groups = given.get("group_ids") or (np.arange(count) // case["config"].get(GROUP_SIZE, 1)).tolist()
    window = given.get("response_window")
    trajectories = given.get("idx_to_traj", range(count))
    sources = []
    for index in range(count):
        mine = [other for other in range(count) if trajectories[other] == trajectories[index]]
        turns = tuple(float(rewards[other]) for other in mine) if "idx_to_traj" in given else ()
        score = EpisodeReward(float(rewards[mine].sum() if turns else rewards[index]), turn_rewards=turns)
        sources.append(Source(trajectories[index], groups[index], score, "", rows.lengths[index] == window))
    samples = rows.samples
    if "idx_to_traj" in given:
        places = [[o for o in range(count) if trajectories[o] == trajectories[i]].index(i) for i in range(count)]
        samples = [replace(s, turns=np.where(s.turns < 0, -1, place)) for s, place in zip(samples, places, strict=True)]
    return Batch(tuple(samples), tuple(sources))


def batch_of_steps(given, rows):
    """Samples that are steps of trajectories; steps that a case leaves out are turns without tokens."""
    ids = list(dict.fromkeys(given["traj_id"]))
    samples, sources = [], []
    for index, sample in enumerate(rows.samples):
        mine = [other for other in range(len(rows.samples)) if given["traj_id"][other] == given["traj_id"][index]]
        steps = max(given["step"][other] for other in mine) + 1
        stride = 100  # turns of one step
        turns, states = np.zeros(steps * stride), [""] * (steps * stride)
        for other in mine:
            turns[given["step"][other] * stride] = given["step_scores"][other]
            states[given["step"][other] * stride] = given["state_hash"][other]
        own = np.where(sample.turns < 0, -1, sample.turns + given["step"][index] * stride)
        samples.append(replace(sample, turns=own))
        score = EpisodeReward(given["episode_scores"][index], turn_rewards=tuple(turns), turn_states=tuple(states))
        group = given["traj_group_id"][index]
        sources.append(Source(ids.index(given["traj_id"][index]), group, score, given["tags"][index]))
    return Batch(tuple(samples), tuple(sources))


def error(case):
    """The largest difference from the numbers of the case."""
    family = case["id"].rsplit(":", 1)[0]
    pairs = next(check for prefix, check in CHECKS if family.startswith(prefix))(case)
    apart = [_apart(numbers(found), numbers(expected)) for found, expected in pairs]
    return float(np.max(apart, initial=0.0))  # unlike max, NaN if any is


def _apart(found, expected):
    """The largest difference; relative for large numbers, which other programs have in float32."""
    return float((np.abs(found - expected) / np.maximum(1.0, np.abs(expected) / 10)).max(initial=0.0))


def check_advantages(case):
    settings, _ = settings_of(case)
    if case["id"].startswith("rlinf.adv.gae_no_critic") and not case["config"]["normalize_inside"]:
        settings = replace(settings, whiten_advantages=Whitening.NONE)
    if case["id"].startswith("rlinf.adv.raw_normalized"):
        settings = replace(settings, whiten_advantages=Whitening.TOKENS_UNBIASED)
    rows, expected = Rows(case), case["expected"]
    batch = batch_of_case(case, rows)
    if "normalized_rewards" in expected:
        yield reward_of_samples(batch, settings), expected["normalized_rewards"]
    among = unmasked(batch, settings)
    if "final_response_mask" in expected:
        yield among, numbers(expected["final_response_mask"]).max(axis=1)
    chosen, selection, _ = with_advantages(batch, settings)
    for index, sample in zip(selection.kept, chosen.samples, strict=True):
        yield sample.advantages[predicted(sample)], rows.picked(index, expected["advantages"][index])
        if sample.returns is not None:
            yield sample.returns[predicted(sample)], rows.picked(index, expected["returns"][index])


def check_token_advantages(case):
    settings, _ = settings_of(case)
    rows = Rows(case)
    batch = Batch(rows.samples, tuple(Source(i, i, EpisodeReward(0.0)) for i in range(len(rows.samples))))
    given = [rows.picked(index, row) for index, row in enumerate(case["inputs"]["token_level_rewards"])]
    found, returns = from_token_rewards(batch, given, settings, np.ones(len(given), bool))
    for index, values in enumerate(found):
        yield values, rows.picked(index, case["expected"]["advantages"][index])
        if returns is not None:
            yield returns[index], rows.picked(index, case["expected"]["returns"][index])


def check_teachers(case):
    """Advantages of on-policy distillation, alone or beside rewards of tokens."""
    settings, _, teachers = settings_of(case)
    given = case["inputs"]
    is_recomputed = case["config"]["enable_old_logprobs_recompute"]
    rows = Rows(
        {**case, "inputs": {**given, "old_logprobs": given["old_logprobs" if is_recomputed else "rollout_logprobs"]}}
    )
    batch = Batch(rows.samples, tuple(Source(i, i, EpisodeReward(0.0)) for i in range(len(rows.samples))))
    names = {f"teacher.{name}" if len(teachers) > 1 else "teacher": name for name in given["teacher_logprobs"]}
    scores = {
        one: [row(rows, i, given["teacher_logprobs"][names[one.name]]) for i in range(len(batch))] for one in teachers
    }
    batch, is_pure = with_teachers(batch, scores), case["config"]["is_pure_opd"]
    rewards = [rows.picked(index, each) * (not is_pure) for index, each in enumerate(given["token_level_rewards"])]
    found, _ = from_token_rewards(batch, rewards, settings, np.ones(len(rewards), bool))
    for index, values in enumerate(found):
        yield values, rows.picked(index, case["expected"]["advantages"][index])


def row(rows, index, arrays):
    return np.concatenate([[0.0], arrays[index]])[: rows.ends[index]].astype(np.float32)


def check_rewards(case):
    settings, _ = settings_of(case)
    given = case["inputs"]
    zeros = np.zeros(2, np.float32)
    columns = zip(given["rewards"], given.get("tags", [""] * len(given["rewards"])), strict=True)
    groups = given.get("group_ids") or given["traj_group_id"]
    sources = [Source(i, groups[i], EpisodeReward(reward), tag) for i, (reward, tag) in enumerate(columns)]
    samples = tuple(Sample(np.arange(2), np.array([-1, 0]), zeros, zeros) for _ in sources)
    yield reward_of_samples(Batch(samples, tuple(sources)), settings), case["expected"]["rewards"]


def check_group_norm(case):
    rewards, keys = case["inputs"]["rewards"], case["config"]
    groups = [index // keys["n_sample"] for index in range(len(rewards))]
    is_global = keys["div_std"] and keys["div_std_global"]
    found = normalised_rewards(rewards, groups, groups if keys["div_std"] and not is_global else None)
    if is_global:  # of the centred rewards
        found = normalised_rewards(found, None, [0] * len(rewards))
    yield found, case["expected"]["rewards"]


def check_mask(case):
    settings, _ = settings_of(case)
    found = unmasked(batch_of_case(case, Rows(case)), settings)
    yield found, numbers(case["expected"]["final_response_mask"]).max(axis=1)


def check_token_rewards(case):
    settings, _ = settings_of(case)
    rows = Rows(case)
    batch = batch_of_case(case, rows)
    found = token_rewards(batch, numbers(batch.rewards), settings, settings.kl_penalty_coef)
    for index, values in enumerate(found):
        yield values, rows.picked(index, case["expected"]["token_level_rewards"][index])
    if case["config"]["add_token_level_kl"]:
        after = adapted_kl_coef(settings.kl_penalty_coef, mean_kl(batch, settings), len(batch), settings)
        yield [after], [case["expected"]["kl_coef_after"]]


def check_kl(case):
    given = case["inputs"]
    word = case["config"].get("kl_penalty") or case["config"]["algorithm.kl_penalty_type"]
    found = kl_estimates(given["logprobs"], given["ref_logprobs"], DIVERGENCES[word])
    yield found * numbers(given.get("response_mask", 1.0)), case["expected"]["kl"]


def check_whitening(case):
    name = "values" if "values" in case["inputs"] else "advantages"
    mask = np.array(case["inputs"]["response_mask"]) > 0
    values, expected = numbers(case["inputs"][name])[mask], case["expected"]
    if "unbiased" in case["config"]:
        kind = Whitening.TOKENS_UNBIASED if case["config"]["unbiased"] else Whitening.TOKENS_BIASED
    else:
        kind = Whitening.TOKENS
    found = whitened([values], kind)[0]
    if case["config"].get("shift_mean") is False:
        found = found + values.mean()
    yield found, numbers(expected.get("whitened", expected.get("advantages")))[mask]


def check_step_returns(case):
    given = case["inputs"]
    found = step_returns(given["step_scores"], given["traj_id"], given["step"], case["config"]["step_reward_gamma"])
    yield found, case["expected"]["step_rewards"]


CHECKS = (
    ("roll.advantage.opd", check_teachers),
    ("rlinf.adv", check_advantages),
    ("rlinf.masked_normalization", check_whitening),
    ("rlinf.kl_penalty", check_kl),
    ("roll.reward_norm", check_rewards),
    ("roll.agentic.reward_norm", check_rewards),
    ("roll.agentic.discounted_returns", check_step_returns),
    ("roll.group_reward_norm", check_group_norm),
    ("roll.sample_mask", check_mask),
    ("roll.kl.", check_kl),
    ("roll.token_reward", check_token_rewards),
    ("roll.masked_whiten", check_whitening),
    ("roll.advantage", check_token_advantages),
    ("roll.agentic_advantage", check_token_advantages),
    ("roll.rlvr_pipeline", check_advantages),
    ("roll.agentic_pipeline", check_advantages),
)
