"""A learner on one rank: packed is as alone, micro batches make no difference, and nothing poisons the weights."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from roost.config.train import (
    AdapterSettings,
    ImportanceSamplingLevel,
    LossAggregation,
    LossSettings,
    OldLogprobs,
    OptimizerSettings,
    PolicyLoss,
)
from roost.learner.forward import Head
from roost.learner.learner import NOISE_LEAST, NOISE_WINDOW, GradientNoise, Learner
from roost.learner.sample import APART
from tests.learner.random_samples import (
    CPU,
    assert_equal,
    random_sample,
    random_samples,
    settings_of,
    totals_of,
    trained,
)

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.mark.parametrize(("weights", "is_compared"), [("token", True), ("none", False)])
def test_weights_without_a_ratio_are_compared_with_the_engine(learner, weights, is_compared):
    none = ImportanceSamplingLevel.NONE
    loss = LossSettings(
        old_logprobs=OldLogprobs.ROLLOUT,
        importance_sampling_level=none,
        rollout_is=ImportanceSamplingLevel(weights),
    )
    _, described = trained(learner(loss=loss), random_samples(5, 7))
    assert any(name.startswith(APART) for name in described) == is_compared


def alone(model, sample, temperature):
    """The log-probabilities of one sample, by transformers' own attention and all logits at once."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    logits = reference(torch.from_numpy(sample.token_ids)[None]).logits[0, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids[1:])[:, None])[:, 0]
    return np.where(sample.is_generated[1:], logprobs.detach().numpy(), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_score_as_they_do_alone(learner, models, family):
    samples = random_samples(12, 5, 9, 40, 6)
    scored = learner(family, temperature=0.7).score(samples)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(logprobs[1:], alone(models(family), sample, 0.7), atol=1e-5)
        assert logprobs[0] == 0


def test_a_window_is_as_in_transformers(models):
    sizes = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    model = models("qwen2", **sizes)
    samples = random_samples(12, 3, 9)
    scored = Learner(settings_of(model), CPU).score(samples)
    without = Learner(settings_of(models("qwen2")), CPU).score(samples)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(logprobs[1:], alone(model, sample, 1.0), atol=1e-5)
    assert abs(scored[0] - without[0]).max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"micro_batch_tokens": 1}, id="each sample alone"),
        pytest.param({"logit_tokens": 1000}, id="all logits at once"),
        pytest.param({"activation_checkpointing": True}, id="activations recomputed"),
        pytest.param({"activation_checkpointing": True, "recomputed_layers": 1}, id="of the first layer"),
    ],
)
def test_how_the_work_is_cut_changes_nothing(learner, family, changes):
    samples = random_samples(12, 5, 9, 40, 6)
    expected, described = trained(learner(family), samples, samples)
    weights, told_too = trained(learner(family, **changes), samples, samples)
    assert_equal(weights, expected, 1e-5)
    assert told_too == pytest.approx(described, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("aggregation", [LossAggregation.SEQ_MEAN, LossAggregation.TOKEN_MEAN])
def test_the_noise_scale_is_that_of_half_the_micro_batches_and_all(learner, aggregation):
    still = {"optimizer": OptimizerSettings(learning_rate=0.0), "loss": LossSettings(loss_aggregation=aggregation)}
    samples = [dataclasses.replace(each, advantages=np.ones(len(each), np.float32)) for each in random_samples(20, 12)]
    one, again = (learner(micro_batch_tokens=20, **still) for _ in range(2))
    noise = GradientNoise()
    halves = [one.learn([each], totals_of([each]))["grad/norm"] for each in samples]
    positions = [*range(NOISE_LEAST)]
    whole = [one.learn(samples, totals_of(samples), position) for position in positions]
    for half in halves:
        noise.add(half, 1, whole[0]["grad/norm"], 2)
    of_long, of_short = (pytest.approx(each, rel=1e-4) for each in noise._newest)
    found = list(one._noise._newest)
    assert all(each in (of_long, of_short) for each in found)
    assert of_long in found and of_short in found, "not always the longest, which come first"
    assert [step.get("grad/noise_scale") for step in whole] == [None] * (NOISE_LEAST - 1) + [one._noise.scale]
    for position in positions[5:]:
        again.learn(samples, totals_of(samples), position)
    assert list(again._noise._newest) == found[5:], "by the position of the step, as in a resumed run"


@pytest.mark.parametrize("of_half", [8, 16, 20])
def test_a_known_noise_scale_is_found(of_half):
    """Gradients of samples are normal around a mean: 400 numbers of variance 0.25, and a norm of 1.25."""
    random, noise = np.random.default_rng(0), GradientNoise()
    for _ in range(NOISE_WINDOW):
        gradients = random.normal(1.25 / 20, 0.5, (32, 400))
        half, whole = gradients[:of_half].mean(0), gradients.mean(0)
        noise.add(np.linalg.norm(half), of_half, np.linalg.norm(whole), 32)
    assert noise.scale == pytest.approx(400 * 0.25 / 1.25**2, rel=0.2)


def test_without_a_mean_gradient_there_is_no_noise_scale():
    noise = GradientNoise()
    for _ in range(NOISE_LEAST):
        noise.add(2.0, 8, 1.0, 16)
    assert noise.scale is None


def layer_calls(learner, samples):
    """Calls of each layer in a step."""
    calls = [0] * len(learner.module.model.layers)

    def count(index):
        def called(*_):
            calls[index] += 1

        return called

    for index, layer in enumerate(learner.module.model.layers):
        layer.mlp.register_forward_pre_hook(count(index))
    learner.learn(samples, totals_of(samples))
    return calls


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("recomputed", [0, 1, 2, 3, None])
def test_so_many_layers_are_recomputed(models, family, recomputed):
    model, samples = models(family, num_hidden_layers=3), random_samples(12, 9)
    kept = Learner(settings_of(model), CPU)
    one = Learner(settings_of(model, activation_checkpointing=True, recomputed_layers=recomputed), CPU)
    assert layer_calls(kept, samples) == [1, 1, 1]
    assert layer_calls(one, samples) == [2 if recomputed is None or index < recomputed else 1 for index in range(3)]
    assert_equal(dict(one.weights()), dict(kept.weights()))


def test_no_more_logits_at_a_time_than_allowed(learner):
    one = learner(logit_tokens=7, micro_batch_tokens=64)
    sizes = []
    one.module.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape[0]))
    samples = random_samples(40, 20)
    one.learn(samples, totals_of(samples))
    made = sum(sample.num_generated for sample in samples)
    assert max(sizes) == 7
    assert sum(sizes) == 2 * made, "once, and once more for the gradients; nothing of what was not made"


def test_learning_makes_good_samples_likelier(learner):
    one = learner()
    good = dataclasses.replace(random_sample(0, 20), advantages=np.full(20, 1, np.float32))
    bad = dataclasses.replace(random_sample(1, 20), advantages=np.full(20, -1, np.float32))
    before = one.score([good, bad])
    samples = [dataclasses.replace(sample, old_logprobs=old) for sample, old in zip([good, bad], before, strict=True)]
    described = one.learn(samples, totals_of(samples))
    after = one.score([good, bad])
    assert described["ratio"] == pytest.approx(1, abs=1e-5), "what is scored is what is learnt from"
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


@pytest.mark.parametrize("kind", list(PolicyLoss))
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
def test_every_loss_makes_good_samples_likelier(learner, kind, corrected):
    more = {"rollout_is": ImportanceSamplingLevel.SEQUENCE, "rollout_rejection": {"token": [0.0, 1e6]}}
    one = learner(loss=LossSettings(loss_type=kind, **(more if corrected else {})))
    good, bad = (
        dataclasses.replace(random_sample(seed, 20), advantages=np.full(20, sign, np.float32), reward=float(sign > 0))
        for seed, sign in ((0, 1), (1, -1))
    )
    before = one.score([good, bad])
    samples = [dataclasses.replace(sample, old_logprobs=old) for sample, old in zip([good, bad], before, strict=True)]
    described = one.learn(samples, totals_of(samples))
    after = one.score([good, bad])
    assert ("rejected" in described) == corrected
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        pytest.param(0.01, 0.01, id="clipped"),
        pytest.param(1e9, None, id="below the limit"),
        pytest.param(0.0, None, id="no limit"),
    ],
)
def test_the_norm_is_told_as_it_was_and_clipped_in_the_step(learner, limit, kept):
    samples = random_samples(20, 20)
    settings = OptimizerSettings(max_grad_norm=limit, warmup_steps=2, learning_rate=1e-3)
    one = learner(optimizer=settings)
    described = one.learn(samples, totals_of(samples))
    assert described["grad/norm"] > 0.02
    assert described["lr"] == 0.5e-3, "the first of two steps of warm-up"
    # The first moment is a tenth of the first gradient.
    learnt = torch.cat([state["exp_avg"].flatten() for state in one._optimizer.state.values()]).norm() * 10
    assert float(learnt) == pytest.approx(kept or described["grad/norm"], rel=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_what_is_no_number_is_not_learnt(learner, bad):
    one = learner()
    samples = random_samples(12, 9)
    spoilt = [dataclasses.replace(samples[0], advantages=samples[0].advantages * bad), samples[1]]
    expected, _ = trained(learner(), samples)
    described = one.learn(spoilt, totals_of(spoilt))
    assert (described["skipped"], one.skipped, one.step) == (1, 1, 0)
    weights, described = trained(one, samples)
    assert (described["skipped"], one.skipped, one.step) == (0, 1, 1)
    assert_equal(weights, expected)


def test_a_step_that_failed_half_way_leaves_no_gradients(learner):
    one, samples = learner(), random_samples(31, 30)  # the longer one goes first
    broken = [samples[0], dataclasses.replace(samples[1], old_logprobs=None)]
    with pytest.raises(ValueError, match="log-probabilities"):
        one.learn(broken, totals_of(broken))
    assert_equal(trained(one, samples)[0], trained(learner(), samples)[0])


def test_samples_that_nothing_was_made_of(learner):
    empty = random_sample(0, 3)
    one, expected = learner(), learner().score(random_samples(9))[0]
    scored = one.score([empty, *random_samples(9)])
    assert scored[0].tolist() == [0, 0, 0]
    assert scored[1].tolist() == expected.tolist()
    assert one.score([]) == []
    assert one.learn([empty], totals_of(random_samples(9)))["tokens"] == 0


def test_bfloat16_is_near_float32(learner):
    samples = random_samples(12, 5, 9)
    exact, near = learner().score(samples), learner(compute_dtype="bfloat16").score(samples)
    difference = max(abs(one - other).max() for one, other in zip(exact, near, strict=True))
    assert 0 < difference < 0.1
    one = learner(compute_dtype="bfloat16")
    assert one.learn(samples, totals_of(samples))["skipped"] == 0
    assert {weight.dtype for weight in one.module.parameters()} == {torch.float32}


def test_entropy_is_learnt_only_where_asked(learner):
    samples = random_samples(12, 9)
    plain = learner()
    described = plain.learn(samples, totals_of(samples))
    spread = learner(loss=LossSettings(entropy_coef=1.0))
    told_too = spread.learn(samples, totals_of(samples))
    assert described["entropy"] == told_too["entropy"] > 0
    assert told_too["loss"] == pytest.approx(described["policy_loss"] - described["entropy"], rel=1e-5)
    assert spread.learn(samples, totals_of(samples))["entropy"] > plain.learn(samples, totals_of(samples))["entropy"]


def test_the_entropy_bonus_follows_its_schedule(learner):
    samples = random_samples(12, 9)
    optimizer = OptimizerSettings(learning_rate=0.0, total_steps=5)
    falling = learner(loss=LossSettings(entropy_coef=1.0, entropy_coef_end=0.0), optimizer=optimizer)
    told = [falling.learn(samples, totals_of(samples), position) for position in (0, 1, 4, 9)]
    assert [one["entropy_coef"] for one in told] == [1.0, 0.75, 0.0, 0.0]
    expected = [one["policy_loss"] - coef * one["entropy"] for one, coef in zip(told, (1.0, 0.75, 0, 0), strict=True)]
    assert [one["loss"] for one in told] == pytest.approx(expected, rel=1e-5)
    rising = learner(loss=LossSettings(entropy_coef_end=1.0), optimizer=optimizer)
    assert rising.learn(samples, totals_of(samples), 2)["entropy_coef"] == 0.5
    assert "entropy_coef" not in learner().learn(samples, totals_of(samples))


def test_a_critic_learns_what_to_expect(learner):
    critic = learner(head=Head.VALUE)
    samples = [
        dataclasses.replace(sample, values=reported, returns=np.full(len(sample), 2, np.float32))
        for sample in random_samples(12, 5, 9)
        for reported in critic.values([sample])
    ]
    errors = [critic.learn(samples, totals_of(samples))["squared_error"] for _ in range(5)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]
    with pytest.raises(ValueError, match="head policy"):
        critic.score(samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"weight_dtype": "float33"}, "float33", id="no type"),
        pytest.param({"compute_dtype": "float16"}, "write bfloat16", id="type that needs scaling"),
        pytest.param({"weight_dtype": "bfloat16"}, "write float32 for both", id="type below that of computing"),
        pytest.param({"temperature": 0.0}, "above 0", id="temperature"),
        pytest.param(
            {"adapter": AdapterSettings(lora_target_modules=("nothing",))}, "nothing", id="adapter of nothing"
        ),
    ],
)
def test_settings_that_cannot_be(learner, changes, message):
    with pytest.raises(ValueError, match=message):
        learner(**changes)


def test_a_critic_has_no_adapter(learner):
    with pytest.raises(ValueError, match="cannot be trained with an adapter"):
        learner(head=Head.VALUE, adapter=AdapterSettings())


def test_a_model_that_changes_its_logits_is_refused(models):
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        Learner(settings_of(models("gemma2", query_pre_attn_scalar=16)), CPU)


def test_a_model_that_mixes_packed_sequences_is_refused(tmp_path):
    """Its convolutions run on from one sequence into the next; no log-probability would be right."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = ["conv", "full_attention"]
    config = Lfm2Config(vocab_size=64, num_hidden_layers=2, layer_types=layers, initializer_range=0.5, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mixes sequences that are packed into one row"):
        Learner(settings_of(str(tmp_path)), CPU)


def test_one_that_only_scores_has_no_moments_and_does_not_learn(learner, models):
    scorer = Learner(settings_of(models()), CPU, learns=False)
    samples = random_samples(9, 12)
    for reported, expected in zip(scorer.score(samples), learner().score(samples), strict=True):
        assert reported.tolist() == expected.tolist()
    assert not scorer._optimizer.state
    with pytest.raises(ValueError, match="only scores"):
        scorer.learn(samples, totals_of(samples))


def test_weights_are_loaded_wherever_they_were(learner):
    one = learner()
    before = {name: weight.clone() for name, weight in one.weights()}
    one.offload()
    with one.loaded_weights():
        assert_equal(before, dict(one.weights()))
    with pytest.raises(RuntimeError, match="offloaded"):
        one.score(random_samples(9))
    one.load()
    assert_equal(before, dict(one.weights()))


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{}, {"adapter": AdapterSettings(lora_rank=4), "activation_checkpointing": True}], ids=["all", "adapter"]
)
def test_compiled_layers_learn_as_others_do(models, monkeypatch, changes):
    """Traced and differentiated ahead of time, but run by eager kernels: generating code takes minutes here."""
    compiled = []

    def compile_eagerly(function, **options):
        compiled.append(function)
        return real(function, backend="aot_eager", **options)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    batches = [random_samples(12, 9, seed=1), random_samples(20, 5, seed=2), random_samples(7, 7, seed=3)]
    learners = [Learner(settings_of(models(), compile=compiles, **changes), CPU) for compiles in (False, True)]
    (expected, _), (weights, _) = (trained(each, *batches) for each in learners)
    assert len(compiled) == 1 + learners[0].module.config.num_hidden_layers
    assert_equal(weights, expected, 1e-6)
    scores = [each.score(batches[0]) for each in learners]
    for one, other in zip(*scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
