"""Runs the cases of golden_losses.jsonl along the path of a job: keys, settings, batch, loss and its gradient.

A case has the keys of RLinf or ROLL, the inputs, and the numbers that their own functions gave. `error` returns the
largest difference, or the reason why Roost differs on purpose (docs/losses.md has them all).
"""

from dataclasses import replace

import numpy as np
import torch

from roost.config.job import Notation
from roost.config.learning import LossSettings
from roost.config.train import ImportanceSamplingLevel, KlEstimator, LossAggregation, OldLogprobs
from roost.learner.losses import (
    PolicyBatch,
    Totals,
    ValueBatch,
    correction,
    exceeded_limits,
    policy_loss,
    token_weights,
    units_of,
    value_loss,
)
from roost.learner.sample import segment_means
from tests.config.test_training_read import config_of, merged, read

PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
ENVIRONMENTS = {"num_env_groups": 8, "group_size": 4}


class Decided(Exception):
    """Roost gives another number on purpose."""


def settings_of(case):
    """The loss settings that the keys of a case amount to, and the findings."""
    notation = Notation.RLINF if case["framework"] == "rlinf" else Notation.ROLL
    keys = dict(case["config"])
    if "agentic" in case["id"]:
        keys["train_env_manager"] = ENVIRONMENTS
    if "_pg." in case["id"]:
        keys["actor_train.worker_cls"] = PG_WORKER
    if case["id"].startswith("rlinf.fsdp"):
        keys["actor.training_backend"] = "fsdp"
    if case["id"].startswith("rlinf.megatron"):
        keys["actor.training_backend"] = "megatron"
    if "algorithm.value_clip" in keys:
        keys["cluster.component_placement"] = {"actor,critic": "0", "rollout": "1"}
    keys.pop("actor.micro_batch_size", None)
    for size in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        keys.pop(f"actor_train.training_args.{size}", None)
    config = config_of(notation)
    for path, value in keys.items():
        config = merged(config, path.split("."), value)
    settings, findings = read(config)
    return settings.learner.loss, findings


def numbers(values):
    return np.array(values, dtype=np.float64)


def mask_of(case):
    """Mask [B, T] of the tokens that are learnt from."""
    given = case["inputs"]
    if "final_response_mask" in given:
        return numbers(given["final_response_mask"]) > 0
    mask = numbers(given["response_mask"]) > 0
    width = np.shape(given.get("logprobs", given.get("values", given.get("old_logprobs"))))[1]
    return mask[:, 1:] if mask.shape[1] == width + 1 else mask


class Flat:
    """The tokens of some rows of a case, and their gradients put back into the rows."""

    def __init__(self, case, rows, settings):
        self.given, self.rows = case["inputs"], rows
        self.mask = mask_of(case)[rows]
        sequence, self.columns = np.nonzero(self.mask)
        self.sequence = torch.from_numpy(np.unique(sequence, return_inverse=True)[1])
        before = np.pad(self.mask, ((0, 0), (1, 0)))[:, :-1]
        runs = np.cumsum(self.mask & ~before, axis=1)
        ids = sequence * (self.mask.shape[1] + 1) + runs[sequence, self.columns]
        self.turn = torch.from_numpy(np.unique(ids, return_inverse=True)[1])
        self.settings = settings

    def take(self, name):
        if self.given.get(name) is None:
            return None
        rows = numbers(self.given[name])[self.rows]
        return torch.from_numpy(rows[self.mask])

    def batch(self, logprobs):
        sequence = np.nonzero(self.mask)[0]
        scores = self.given.get("scores", self.given.get("episode_scores"))
        rewards = None if scores is None else torch.from_numpy(numbers(scores)[self.rows][sequence])
        old = self.take("old_logprobs")
        engine = self.take("rollout_logprobs")
        return PolicyBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            engine_logprobs=logprobs.detach() if engine is None else engine,
            advantages=self.take("advantages"),
            sequence=self.sequence,
            turn=self.turn,
            entropy=self.take("entropy"),
            reference_logprobs=self.take("ref_logprobs"),
            rewards=rewards,
        )

    def totals(self, batch, longest):
        sequences = len(self.sequence.unique())
        whole = Totals(sequences, len(self.sequence), longest)
        places = batch.sequence, batch.turn
        found = correction(batch.old_logprobs, batch.engine_logprobs, *places, self.settings)
        counts_kept = self.settings.old_logprobs is not OldLogprobs.ROLLOUT  # as totals_of does in a job
        if found.kept is None or not counts_kept:
            return whole
        return replace(whole, kept_sequences=len(self.sequence[found.kept].unique()), kept_tokens=int(found.kept.sum()))


def expected_gradient(case, rows, name="grad_logprobs"):
    found = case["expected"][name]
    return None if found is None else numbers(found)[rows]


def error(case):
    """The largest difference of loss and gradient from the numbers of the case."""
    family = case["id"].rsplit(":", 1)[0]
    check = next(check for prefix, check in CHECKS if family.startswith(prefix))
    apart = [_apart(np.asarray(found), np.asarray(wanted, float)) for found, wanted in check(case)]
    return float(np.max(apart, initial=0.0))  # unlike max, NaN if any is


def _apart(found, expected):
    """The largest difference; relative for large numbers, which other programs have in float32."""
    if np.isnan(expected).any():
        raise Decided("the other program's result is not a number")
    return float((np.abs(found - expected) / np.maximum(1.0, np.abs(expected) / 10)).max(initial=0.0))


def loss_and_gradient(case, rows, settings, longest=1):
    """Roost's loss of some rows as one minibatch, and its gradient in the form of the rows."""
    flat = Flat(case, rows, settings)
    logprobs = flat.take("logprobs").requires_grad_()
    if not len(logprobs):
        return 0.0, np.zeros(flat.mask.shape)
    batch = flat.batch(logprobs)
    totals = flat.totals(batch, longest)
    gradient = np.zeros(flat.mask.shape)
    if not totals.kept.tokens:
        return 0.0, gradient
    loss, stats = policy_loss(batch, settings, totals)
    if any(exceeded_limits({name: float(value) for name, value in stats.items()}, settings).values()):
        return 0.0, gradient
    loss.backward()
    gradient[flat.mask] = logprobs.grad.numpy()
    return loss.item(), gradient


def check_roll_loss(case):
    settings, _ = settings_of(case)
    mask = mask_of(case)
    given, keys = case["inputs"], case["config"]
    rows = np.arange(len(mask))
    if keys.get("length_loss_weight"):
        raise Decided("length_loss_weight is relative to a micro-batch, and is not followed")
    longest = mask.shape[1]
    is_norm = settings.loss_aggregation is LossAggregation.SEQ_SUM_NORM
    if "final_response_mask" in given and settings.entropy_coef:
        whole = np.array(given["response_mask"])[:, 1:] > 0
        if (whole != mask).any():
            raise Decided("samples that are not learnt from have no entropy bonus")
    is_recomputed = keys["enable_old_logprobs_recompute"]
    if settings.rollout_rejection:
        kept = Flat(case, rows, settings)
        batch = kept.batch(kept.take("logprobs"))
        found = correction(batch.old_logprobs, batch.engine_logprobs, batch.sequence, batch.turn, settings).kept
        if settings.loss_aggregation is LossAggregation.TOKEN_MEAN and not found.all():
            raise Decided("token-mean of ROLL does not leave out rejected tokens")
        is_by_turn = settings.importance_sampling_level is ImportanceSamplingLevel.TURN_MEAN
        if is_by_turn and not found.all() and is_recomputed:
            raise Decided("ROLL's turn ends at a rejected token")
        if settings.entropy_coef and not found.all() and not is_recomputed:
            raise Decided("rejected tokens have no entropy bonus")
        counts_kept = settings.old_logprobs is not OldLogprobs.ROLLOUT
        if counts_kept != is_recomputed and not found.all():
            raise Decided("ROLL counts tokens before its filters where it does not recompute log-probs")
    loss, gradient = loss_and_gradient(case, rows, settings, longest)
    if is_norm:  # ROLL divides by the width alone
        count = int(mask.any(axis=1).sum())
        if settings.rollout_rejection and is_recomputed:
            count = len(kept.sequence[found].unique())
        loss, gradient = loss * count, gradient * count
    yield loss, case["expected"]["loss"]
    wanted = expected_gradient(case, rows)
    flat, level = Flat(case, rows, settings), settings.importance_sampling_level
    if level in (ImportanceSamplingLevel.TURN_MEAN, ImportanceSamplingLevel.SEQUENCE):
        # ROLL gives each token the mean gradient of its turn or sample; Roost gives it its own.
        units = units_of(flat.sequence, flat.turn, level).numpy()
        gradient, wanted = (np.bincount(units, each[flat.mask]) for each in (gradient, wanted))
    yield gradient, wanted


def micro_batches(case):
    count, size = len(case["inputs"]["response_mask"]), case["config"]["actor.micro_batch_size"]
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def check_rlinf_loss(case):
    settings, _ = settings_of(case)
    mask = mask_of(case)
    refuse_empty(mask, settings)
    rows = np.arange(len(mask))
    loss, gradient = loss_and_gradient(case, rows, settings)
    yield loss, case["expected"]["loss"]
    yield gradient, expected_gradient(case, rows)


def refuse_empty(mask, settings):
    if not mask.any(axis=1).all():
        raise Decided("a sample without tokens is left out; RLinf's loss is 0, NaN, or a mean that counts it")


def check_rlinf_step(case):
    """Each micro-batch as a minibatch of its own, and their mean, as RLinf takes it."""
    settings, _ = settings_of(case)
    keys, mask = case["config"], mask_of(case)
    is_scaled = keys.get("algorithm.use_valid_token_scale") is True
    uses_kl = settings.kl_coef and settings.kl_estimator in (KlEstimator.K1, KlEstimator.K3)
    if case["id"].startswith("rlinf.fsdp") and uses_kl:
        raise Decided("RLinf's FSDP actor swaps policy and reference in the KL")
    settings = replace(settings, loss_aggregation=LossAggregation(keys["algorithm.loss_agg_func"]))
    refuse_empty(mask, settings)
    parts, whole, gradient = micro_batches(case), 0.0, np.zeros(mask.shape)
    for rows in parts:
        loss, part = loss_and_gradient(case, rows, settings)
        scale = mask[rows].sum() / mask.sum() * len(parts) if is_scaled else 1.0
        whole += scale * loss / len(parts)
        gradient[rows] = scale * part / len(parts)
    yield whole, case["expected"]["loss"]
    yield gradient, expected_gradient(case, np.arange(len(mask)))


def check_critic(case):
    settings, _ = settings_of(case)
    is_rlinf = case["framework"] == "rlinf"
    if case["id"].startswith("rlinf.loss.critic") or not is_rlinf:
        own = replace(settings, loss_aggregation=LossAggregation.TOKEN_MEAN if is_rlinf else LossAggregation.SEQ_MEAN)
        yield from critic(case, own)


def critic(case, settings):
    rows = np.arange(len(mask_of(case)))
    flat = Flat(case, rows, settings)
    values = flat.take("values").requires_grad_()
    batch = ValueBatch(values, flat.take("old_values"), flat.take("returns"), flat.sequence)
    totals = Totals(len(flat.sequence.unique()), len(values), 1)
    if len(rows) != totals.sequences and settings.loss_aggregation is LossAggregation.SEQ_MEAN:
        raise Decided("a sample without tokens is left out")
    loss, _ = value_loss(batch, settings, totals)
    loss.backward()
    gradient = np.zeros(flat.mask.shape)
    gradient[flat.mask] = values.grad.numpy()
    yield loss.item(), case["expected"]["loss"]
    yield gradient, expected_gradient(case, rows, "grad_values")


def check_both(case):
    """The actor's loss plus the critic's, which is always a mean over tokens."""
    settings, _ = settings_of(case)
    refuse_empty(mask_of(case), settings)
    rows = np.arange(len(mask_of(case)))
    loss, gradient = loss_and_gradient(case, rows, settings)
    of_values, slopes = critic(case, replace(settings, loss_aggregation=LossAggregation.TOKEN_MEAN))
    yield loss + of_values[0], case["expected"]["loss"]
    yield gradient, expected_gradient(case, rows)
    yield slopes


def check_decoupled(case):
    """RLinf's decoupled loss: tokens above the threshold are rejected, and weights have no cap."""
    given, keys = case["inputs"], case["config"]
    settings, _ = settings_of(case)
    refuse_empty(mask_of(case), settings)
    limit = keys.get("algorithm.behave_weight_threshold")
    proximal = given.get("proximal_logprobs")
    if proximal is None:
        raise Decided(
            "the learner's log-probs are recomputed; RLinf interpolates them by versions, or takes the old ones"
        )
    moved = {**given, "old_logprobs": proximal, "rollout_logprobs": given["old_logprobs"]}
    renamed = {**case, "inputs": moved}
    rows = np.arange(len(mask_of(case)))
    if settings.loss_aggregation is not LossAggregation.TOKEN_MEAN and limit is not None:
        flat = Flat(renamed, rows, settings)
        batch = flat.batch(flat.take("logprobs"))
        kept = correction(batch.old_logprobs, batch.engine_logprobs, batch.sequence, batch.turn, settings).kept
        if len(flat.sequence[kept].unique()) < len(rows):
            raise Decided("a sequence without kept tokens does not count in the mean over sequences")
    loss, gradient = loss_and_gradient(renamed, rows, settings)
    of_values, slopes = critic(case, replace(settings, loss_aggregation=LossAggregation.TOKEN_MEAN))
    yield loss + of_values[0], case["expected"]["loss"]
    yield gradient, expected_gradient(case, rows)
    yield slopes


def check_correction(case):
    """Weights and kept tokens of ROLL's correction."""
    settings, _ = settings_of(case)
    mask, expected = mask_of(case), case["expected"]
    flat = Flat(case, np.arange(len(mask)), settings)
    old, engine = flat.take("old_logprobs"), flat.take("rollout_logprobs")
    found = correction(old, engine, flat.sequence, flat.turn, settings)
    weights = torch.ones(len(old)) if found.weights is None else found.weights
    yield weights, numbers(expected["is_weight"])[mask] if "is_weight" in expected else weights
    kept = torch.ones(len(old), dtype=torch.bool) if found.kept is None else found.kept
    wanted = expected.get("filter_mask")
    if wanted is None:
        wanted = expected["final_response_mask"] if "final_response_mask" in expected else expected["response_mask"]
    yield kept.float(), numbers(wanted)[mask]


def check_aggregation(case):
    given, mode = case["inputs"], LossAggregation(case["config"]["loss_agg_mode"])
    mask = numbers(given["response_mask"]) > 0
    losses = numbers(given["loss_mat"])
    if given.get("sample_weights") is not None:
        losses = losses * numbers(given["sample_weights"])[:, None]
    sequence = np.nonzero(mask)[0]
    places = torch.from_numpy(np.unique(sequence, return_inverse=True)[1])
    tokens = given.get("batch_num_tokens") or int(mask.sum())
    sequences = given.get("global_valid_samples") or int(mask.any(axis=1).sum())
    if "global_valid_samples" not in given and mode is not LossAggregation.TOKEN_MEAN and not mask.any(axis=1).all():
        raise Decided("a sample without tokens is left out")
    if mode is LossAggregation.TOKEN_MEAN and np.abs(losses[~mask]).max(initial=0.0) > 0:
        raise Decided("token-mean of ROLL does not leave out masked tokens")
    totals = Totals(sequences, tokens, mask.shape[1])
    weights = token_weights(places, places, ImportanceSamplingLevel.TOKEN, mode, totals).numpy()
    factor = sequences if mode is LossAggregation.SEQ_SUM_NORM else 1  # ROLL divides by the width alone
    yield factor * (weights * losses[mask]).sum(), case["expected"]["loss"]


def check_segments(case):
    mask = numbers(case["inputs"]["response_mask"]) > 0
    name = next(name for name in case["inputs"] if name != "response_mask")
    fake = {**case, "inputs": {**case["inputs"], "old_logprobs": case["inputs"][name]}}
    flat = Flat(fake, np.arange(len(mask)), LossSettings())
    expected = next(iter(case["expected"].values()))
    yield segment_means(flat.take("old_logprobs"), flat.turn), numbers(expected)[mask]


CHECKS = (
    ("rlinf.loss.actor_critic", check_both),
    ("rlinf.loss.actor.", check_rlinf_loss),
    ("rlinf.loss.critic", check_critic),
    ("rlinf.loss.decoupled", check_decoupled),
    ("rlinf.fsdp", check_rlinf_step),
    ("rlinf.megatron", check_rlinf_step),
    ("roll.loss.critic", check_critic),
    ("roll.loss", check_roll_loss),
    ("roll.tic", check_correction),
    ("roll.agg_loss", check_aggregation),
    ("roll.segment_masked_mean", check_segments),
)
