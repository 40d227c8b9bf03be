"""Mixtures of experts: replayed routing, load of experts, load-balancing loss."""

import dataclasses
import queue

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roost.engines.protocol import Sampling
from roost.learner.parallel.context import ContextGroup
from roost.learner.routing import Routers, expert_weights
from roost.learner.sample import NOT_GENERATED, PAD, Sample, pack
from roost.net.routing import padded_routing
from roost.torch_engine.engine import EngineSettings, Request, TorchEngine
from roost.trainer.metrics import mismatch
from tests.learner.random_samples import assert_equal, random_samples, totals_of, trained
from tests.limits import HANG_S

ROUTED = Sampling(max_tokens=24, ignore_eos=True, return_routed_experts=True)


def generated(model, count, dtype="float32"):
    """Samples of the built-in engine, with the experts that it returned."""
    engine = TorchEngine(EngineSettings(model=model, device="cpu", dtype=dtype, seed=0))
    try:
        prompts = [tuple(np.random.default_rng(seed).integers(0, 256, 9).tolist()) for seed in range(count)]
        answers = [queue.SimpleQueue() for _ in prompts]
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            request = Request(str(number), prompt, dataclasses.replace(ROUTED, seed=number), streams=False)
            engine.submit(request, answer.put)
        found = [answer.get(timeout=HANG_S) for answer in answers]
    finally:
        engine.close()
    return [sampled(prompt, progress) for prompt, progress in zip(prompts, found, strict=True)]


def sampled(prompt, progress):
    tokens = np.array((*prompt, *progress.token_ids))
    turns = np.array([NOT_GENERATED] * len(prompt) + [0] * len(progress.token_ids))
    logprobs = np.array([0.0] * len(prompt) + list(progress.logprobs), np.float32)
    routing = padded_routing(progress.routing, len(tokens))
    return Sample(tokens, turns, logprobs, np.ones(len(tokens), np.float32), logprobs, routed_experts=routing)


def kl(own, samples):
    where = [sample.is_generated for sample in samples]
    engine = np.concatenate([sample.logprobs[each] for sample, each in zip(samples, where, strict=True)])
    learner = np.concatenate([scores[each] for scores, each in zip(own.score(samples), where, strict=True)])
    return mismatch(engine, learner)["kl_k3"]


def shifted(sample, experts=8):
    """The sample with other experts than any router would choose."""
    routing = sample.routed_experts.copy()
    routing[:-1] = (routing[:-1] + 3) % experts
    return dataclasses.replace(sample, routed_experts=routing)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_replaying_own_choices_changes_nothing(learner, models, family):
    samples = generated(models(family), 4)
    found = {}
    for replays in (False, True):
        own = learner(family, router_replay=replays)
        found[replays] = trained(own, samples)
        own_kl = kl(learner(family, router_replay=replays), samples)
        assert own_kl < 1e-9
    assert_equal(found[True][0], found[False][0], 1e-6)
    assert found[True][1]["experts/replaced"] == 0
    assert "experts/replaced" not in found[False][1]


def test_samples_are_routed_by_their_experts_and_not_by_others(learner, models):
    samples = generated(models("qwen3_moe"), 5)
    own = learner("qwen3_moe", router_replay=True, micro_batch_tokens=64)
    plain, moved = own.score(samples), own.score([shifted(samples[0]), *samples[1:]])
    assert np.abs(plain[0] - moved[0]).max() > 0.1
    for one, other in zip(plain[1:], moved[1:], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    metrics = own.learn([shifted(sample) for sample in samples], totals_of(samples))
    assert 0.4 < metrics["experts/replaced"] <= 1
    without = learner("qwen3_moe", micro_batch_tokens=64)
    np.testing.assert_allclose(without.score([shifted(samples[0])])[0], plain[0], atol=1e-5)


def test_gradients_reach_the_router_at_the_replayed_experts():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]], requires_grad=True)
    expert_weights(logits, torch.tensor([[0, 3]]), True)[0, 0].backward()
    pair = torch.tensor([1.0, 0.0]).softmax(0)
    assert logits.grad[0].tolist() == pytest.approx([float(pair.prod()), 0, 0, -float(pair.prod())], abs=1e-6)


def test_recomputed_layers_replay_as_well(learner, models):
    samples = [shifted(sample) for sample in generated(models("qwen3_moe"), 4)]
    one, other = (
        trained(learner("qwen3_moe", router_replay=True, activation_checkpointing=recomputes), samples)[0]
        for recomputes in (False, True)
    )
    assert_equal(one, other, 1e-6)


def test_routing_is_not_kept_by_recomputation_nor_after_a_call(learner, models):
    samples = generated(models("qwen3_moe"), 2)
    own = learner("qwen3_moe", router_replay=True, activation_checkpointing=True)
    routers = own._outputs.routers
    outputs = own._forward(pack(samples), samples)
    routed = dict(routers._routed)
    outputs[0].sum().backward()
    assert len(routed) == routers.layers
    assert all(routers._routed[layer] is kept for layer, kept in routed.items())
    for call in (lambda: own.score(samples), lambda: own.learn(samples, totals_of(samples))):
        call()
        assert not routers._routed and routers._replayed is None


def test_replay_lowers_the_mismatch_with_an_engine_in_bfloat16(learner, models):
    samples = generated(models("qwen3_moe"), 16, "bfloat16")
    replayed, plain = (kl(learner("qwen3_moe", router_replay=replays), samples) for replays in (True, False))
    assert replayed < plain / 2


def test_experts_are_packed_and_cut_with_their_tokens():
    one, other = random_samples(6, 5)
    experts = np.arange(6 * 2 * 2).reshape(6, 2, 2).astype(np.uint8)
    experts[-1] = 255  # not returned
    packed = pack([dataclasses.replace(one, routed_experts=experts), other])
    assert packed.experts is not None and packed.experts.shape == (11, 2, 2)
    np.testing.assert_array_equal(packed.experts[:5], experts[:5])
    assert (packed.experts[5:] == PAD).all()
    assert pack([other]).experts is None
    parts = [ContextGroup(4, rank, None).cut(packed)[0] for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate([part.experts for part in parts])[:11], packed.experts)
    assert all(len(part.experts) == len(part.token_ids) for part in parts)


def test_experts_of_another_model_are_refused(learner):
    (sample,) = random_samples(8)
    wrong = dataclasses.replace(sample, routed_experts=np.zeros((8, 5, 2), np.uint8))
    with pytest.raises(ValueError, match="2 routed experts in each of 5 layers, but the model chooses 2 in each of 2"):
        learner("qwen3_moe", router_replay=True).score([wrong])


def test_the_balance_loss_is_the_mean_of_transformers_losses_of_each_layer(models):
    model = AutoModelForCausalLM.from_pretrained(models("qwen3_moe")).eval()
    routers = Routers.of(model)
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens, output_router_logits=True).router_logits
    of_layers = [float(load_balancing_loss_func((each,), num_experts=8, top_k=2)) for each in logits]
    expected = sum(of_layers) / len(of_layers)
    assert [float(loss) for loss in routers.balance_loss()] == pytest.approx([expected] * 2, rel=1e-5)


def test_a_recomputation_routes_as_the_pass_that_it_repeats():
    router = torch.nn.Module()
    router.top_k, router.num_experts, router.forward = 1, 2, lambda *output: output
    own = Routers([router])
    nearly_tied = torch.tensor([[1.0, 1.0 + 1e-6]], requires_grad=True)
    own.replay(None)
    _, _, first = router(nearly_tied, torch.ones(1, 1), torch.tensor([[1]]))
    _, weights, again = router(nearly_tied, torch.ones(1, 1), torch.tensor([[0]]))  # rounded to the other side
    assert again.tolist() == first.tolist() == [[1]] and weights.requires_grad
    own.replay(None)
    assert router(nearly_tied, torch.ones(1, 1), torch.tensor([[0]]))[2].tolist() == [[0]]


def test_loads_of_different_layers_do_not_even_each_other_out():
    routers = [torch.nn.Module(), torch.nn.Module()]
    for router in routers:
        router.top_k, router.num_experts = 1, 2
    own = Routers(routers)
    for router, expert in zip(routers, (0, 1), strict=True):
        experts = torch.full((8, 1), expert)
        logits = torch.full((8, 2), -20.0).scatter(1, experts, 20.0)
        router.forward = lambda *output: output
        router(logits, torch.ones(8, 1), experts)
    assert float(own.balance_loss()[1]) == pytest.approx(2.0)


def test_the_balance_loss_evens_the_load(learner, models):
    samples = [dataclasses.replace(each, advantages=0 * each.advantages) for each in generated(models("qwen3_moe"), 8)]
    loads = {}
    for coefficient, steps in ((0.0, 2), (5.0, 10)):
        own = learner("qwen3_moe", router_aux_loss_coef=coefficient)
        found = [own.learn(samples, totals_of(samples)) for _ in range(steps)]
        loads[coefficient] = [each["experts/load_max"] for each in found]
        assert 0 < found[-1]["experts/load_entropy"] <= 1
    assert loads[0.0][-1] == loads[0.0][0] > loads[5.0][-1]
