"""Muon, 8-bit AdamW, and state on the host: what they learn, what they keep, and what they resume."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from roost.config.job import ParallelSizes
from roost.config.train import AdapterSettings, OptimizerSettings, OptimizerType
from roost.learner.checkpoint import state_bytes
from roost.learner.learner import Learner
from roost.learner.optimizer import Optimizers, _quantize, new_optimizer
from roost.learner.residence import plain_tensors
from tests.learner.random_samples import CPU, assert_equal, random_samples, settings_of, totals_of, trained
from tests.learner.ranks import moments, on_ranks, weights

BATCHES = [random_samples(12, 9, seed=1), random_samples(20, 5, seed=2), random_samples(7, 30, seed=3)]
KINDS = [OptimizerType.ADAMW, OptimizerType.MUON, OptimizerType.ADAMW_8BIT]


def optimizer_of(kind, **changes):
    if kind is OptimizerType.ADAMW_8BIT:
        pytest.importorskip("torchao")
    return OptimizerSettings(learning_rate=1e-3, optimizer=kind, **changes)


def test_muon_is_torchs_for_the_matrices_of_layers_and_adamw_for_the_rest():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 4))

    settings = optimizer_of(OptimizerType.MUON, weight_decay=0.1)
    ours, theirs = network(), network()
    optimizers = (
        [new_optimizer(ours, settings, [ours[1]])],
        [
            torch.optim.Muon([theirs[1].weight], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([theirs[0].weight], lr=1e-3, weight_decay=0.1),
            torch.optim.AdamW([theirs[1].bias], lr=1e-3, weight_decay=0.0),
        ],
    )
    for _ in range(3):
        for model, some in zip((ours, theirs), optimizers, strict=True):
            model(torch.arange(7)).square().sum().backward()
            for each in some:
                each.step()
                each.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # torch's iterations are in bfloat16
    assert (ours[1].weight - network()[1].weight).abs().max() > 1e-3


def test_8bit_moments_take_a_quarter_and_learn_almost_the_same():
    def network():
        torch.manual_seed(0)
        return nn.Linear(128, 64)

    found = []
    for kind in (OptimizerType.ADAMW, OptimizerType.ADAMW_8BIT):
        model = network()
        before = model.weight.detach().clone()
        optimizer = new_optimizer(model, optimizer_of(kind))
        torch.manual_seed(1)
        for _ in range(5):
            model(torch.randn(32, 128)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        held = sum(each.nbytes for each in plain_tensors(optimizer.state[model.weight]["exp_avg"]))
        found.append((model.weight.detach() - before, held))
    (exact, _), (rounded, held) = found
    assert held <= 128 * 64 * 1.3
    assert (exact - rounded).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("signed", [True, False])
def test_rounded_moments_come_back_from_their_numbers(signed):
    subclass_8bit = pytest.importorskip("torchao.optim.subclass_8bit")
    torch.manual_seed(0)
    moments = torch.randn(64, 256) * torch.logspace(-14, 2, 64)[:, None]  # a block in each row
    moments[3] = 0.0
    moments[4] = -moments[4].abs()
    moments[5] = torch.where(torch.arange(256) < 128, -1.0, 0.993)  # the lowest number is -0.993 of the scale
    moments = moments if signed else moments.abs()

    def rounded(numbers):
        found = subclass_8bit.OptimState8bit.zeros((64, 256), signed)
        _quantize(found, numbers)
        return found

    once = rounded(moments)
    assert (once.dequantize() - moments).abs().amax(1).div(moments.abs().amax(1).clamp(min=1e-12)).max() < 0.04
    twice = rounded(once.dequantize())
    assert torch.equal(twice.dequantize(), once.dequantize())


def test_8bit_moments_do_not_take_rare_tokens_far(learner):
    """Beside a frequent token, the second moment of a rare one would be rounded to 0, and its step would be huge."""
    one = learner(optimizer=optimizer_of(OptimizerType.ADAMW_8BIT, adam_epsilon=1e-8), family="llama")
    before = {name: weight.clone() for name, weight in one.weights()}
    weights_of, _ = trained(one, *BATCHES)
    name = next(name for name in before if "embed_tokens" in name)
    assert 0 < (weights_of[name] - before[name]).abs().max() < 2 * len(BATCHES) * 1e-3


def test_8bit_without_its_package_names_it(monkeypatch):
    monkeypatch.setattr("roost.learner.optimizer.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="torchao; install it"):
        new_optimizer(nn.Linear(2, 2), OptimizerSettings(optimizer=OptimizerType.ADAMW_8BIT))


@pytest.mark.parametrize("adapter", [None, AdapterSettings(lora_rank=1)])
def test_muon_leaves_routers_gates_and_experts_to_adamw(learner, adapter):
    one = learner("qwen2_moe", optimizer=optimizer_of(OptimizerType.MUON), adapter=adapter)
    names = {weight: name for name, weight in one.module.named_parameters()}
    of_muon = {names[weight] for weight, state in one._optimizer.state.items() if "momentum_buffer" in state}
    assert any("q_proj" in name for name in of_muon)
    assert any("shared_expert.gate_proj" in name for name in of_muon)
    for other in (".gate.", "shared_expert_gate", ".experts.", "embed_tokens", "lm_head", "norm"):
        assert not any(other in name for name in of_muon)
    if adapter is None:
        assert any("mlp.gate.weight" in name for name in names.values())
        assert any("shared_expert_gate" in name for name in names.values())


class Blocks:
    """Stands in for 8-bit moments of a GPU: its numbers are on a device until they are moved to the host."""

    def __init__(self, log):
        self.shape, self.device, self._log = torch.Size((4, 5)), torch.device("cpu"), log
        self.signed = False

    def __tensor_flatten__(self):
        return [], None

    def dequantize(self):
        self._log.append("device")
        return self

    def cpu(self):
        self._log.append("host")
        return torch.ones(self.shape)

    def copy_(self, numbers):
        self._log.append(numbers)


def test_8bit_moments_are_saved_one_by_one_in_host_memory_and_counted_without_their_numbers():
    log, weights_of = [], [nn.Parameter(torch.zeros(4, 5)) for _ in range(3)]
    part = torch.optim.SGD(weights_of, lr=1.0)
    for weight in weights_of:
        part.state[weight] = {"exp_avg": Blocks(log)}
    optimizers = Optimizers([part])
    assert sum(state_bytes(each) for each in optimizers.saved_shapes().values()) == 3 * 4 * 5 * 4
    assert not log
    saved = optimizers.saved()
    assert log == ["device", "host"] * 3
    optimizers.take(saved)
    assert all(one is saved[weight]["exp_avg"] for one, weight in zip(log[6:], weights_of, strict=True))


def test_a_checkpoint_of_8bit_moments_has_the_bytes_that_were_counted(learner):
    one = learner(optimizer=optimizer_of(OptimizerType.ADAMW_8BIT), family="llama")
    counted = one.checkpoint_bytes()
    assert counted == state_bytes(one._state(one._optimizer.saved()))
    one.offload()
    assert one.checkpoint_bytes() == counted


def test_a_checkpoint_looks_at_the_state_of_all_weights_once(learner, monkeypatch, tmp_path):
    one, looked = learner(), []
    state = Optimizers.state.fget
    monkeypatch.setattr(Optimizers, "state", property(lambda self: looked.append(1) or state(self)))
    one.save(tmp_path / "step")
    one.wait_saved()
    assert len(looked) == 1
    one.restore(tmp_path / "step")
    assert len(looked) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_state_on_the_host_changes_nothing(learner, kind, monkeypatch):
    monkeypatch.setattr("roost.learner.optimizer._in_parts", lambda some: [[each] for each in some])
    settings = optimizer_of(kind)
    expected, described = trained(learner(optimizer=settings), *BATCHES)
    one = learner(optimizer=dataclasses.replace(settings, optimizer_cpu_offload=True))
    one.offload()
    assert "optimizer" not in one._residence.away
    one.load()
    weights_of, told = trained(one, *BATCHES)
    assert_equal(weights_of, expected)
    assert told == described


def test_a_part_of_the_state_is_on_the_device_for_its_step_alone(monkeypatch):
    """Stands in for a GPU: what is moved to the device is a copy, and lives for the step."""
    moved = []

    def with_copy(weight, state):
        moved.append(state)
        return state.clone()

    monkeypatch.setattr("roost.learner.optimizer._with", with_copy)
    settings = OptimizerSettings(learning_rate=1e-3, optimizer_cpu_offload=True)
    models = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [new_optimizer(models[0], settings), new_optimizer(models[1], OptimizerSettings(learning_rate=1e-3))]
    kept = list(optimizers[0].state[models[0].weight].values())
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(models[0].weight, models[1].weight)
    assert all(one is other for one, other in zip(optimizers[0].state[models[0].weight].values(), kept, strict=True))
    assert len(moved) == 3 * len(kept)
    assert not list(optimizers[0].device_tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_with_its_optimizer_and_with_no_other(learner, kind, tmp_path):
    settings = optimizer_of(kind)
    one = learner(optimizer=settings)
    trained(one, *BATCHES[:2])
    one.offload()
    one.load()
    one.save(tmp_path / "step")
    one.wait_saved()
    again = learner(optimizer=dataclasses.replace(settings, optimizer_cpu_offload=True))
    again.restore(tmp_path / "step")
    assert_equal(trained(again, BATCHES[2])[0], trained(one, BATCHES[2])[0])
    other = OptimizerType.MUON if kind is OptimizerType.ADAMW else OptimizerType.ADAMW
    stranger = learner(optimizer=optimizer_of(other))
    with pytest.raises(ValueError, match=f"state of optimizer {kind}, but the run's is {other}"):
        stranger.restore(tmp_path / "step")


def test_a_model_that_only_scores_takes_a_checkpoint_of_any_optimizer(learner, models, tmp_path):
    policy = learner(optimizer=optimizer_of(OptimizerType.MUON))
    expected, _ = trained(policy, BATCHES[0])
    policy.save(tmp_path / "policy")
    policy.wait_saved()
    first, second = (
        Learner(settings_of(models(), optimizer=optimizer_of(kind)), CPU, learns=False)
        for kind in (OptimizerType.MUON, OptimizerType.ADAMW)
    )
    first.restore(tmp_path / "policy")
    first.save(tmp_path / "reference")
    first.wait_saved()
    second.restore(tmp_path / "policy")
    second.restore(tmp_path / "reference")
    assert_equal(dict(second.weights()), expected)


def test_offloading_frees_8bit_moments(learner):
    one = learner(optimizer=optimizer_of(OptimizerType.ADAMW_8BIT), family="llama")
    expected, _ = trained(learner(optimizer=optimizer_of(OptimizerType.ADAMW_8BIT), family="llama"), *BATCHES)
    one.offload()
    state = next(each for each in one._optimizer.state.values() if hasattr(each["exp_avg"], "codes"))
    assert state["exp_avg"].codes.untyped_storage().nbytes() == 0
    one.load()
    assert_equal(trained(one, *BATCHES)[0], expected)


def learn_on_mesh(rank, settings, meshes, folder):
    """Weights after each mesh's steps, its moments, and the weights after a resume from one process."""
    found = []
    for number, sizes in enumerate(meshes):
        one = Learner(dataclasses.replace(settings, parallel=sizes), CPU)
        shares = [batch[rank::2] for batch in BATCHES]
        for share, batch in zip(shares, BATCHES, strict=True):
            one.learn(share, totals_of(batch))
        kept = {"weights": weights(one), "moments": moments(one)}
        one.save(Path(folder) / str(number))
        one.wait_saved()
        one.restore(Path(folder) / "of one")
        found.append(kept | {"restored": moments(one)})
    return found


def learn_and_resume(rank, ranks, settings, folder):
    """Weights and moments after a step that follows a checkpoint, and after the same step of a resumed learner."""
    shares = [batch[rank::ranks] for batch in BATCHES]
    one = Learner(settings, CPU)
    for share, batch in zip(shares[:2], BATCHES, strict=False):
        one.learn(share, totals_of(batch))
    one.save(Path(folder) / "step")
    one.wait_saved()
    again = Learner(settings, CPU)
    again.restore(Path(folder) / "step")
    found = []
    for each in (one, again):
        each.learn(shares[2], totals_of(BATCHES[2]))
        states = each._optimizer.saved().values()
        found.append(
            (
                weights(each),
                [tensor.full_tensor().numpy() for state in states for tensor in state.values() if tensor.dim()],
            )
        )
    quantized = [plain_tensors(state["exp_avg"]) for state in one._optimizer.state.values()]
    return *found, [any(part.dtype == torch.uint8 for part in parts) for parts in quantized]


@pytest.mark.parametrize("ranks", [2, 3])
def test_8bit_moments_resume_exactly_on_ranks(models, ranks, tmp_path):
    """Three ranks have shards that are no whole blocks."""
    settings = settings_of(models("llama", intermediate_size=384), optimizer=optimizer_of(OptimizerType.ADAMW_8BIT))
    is_quantized = []
    for one, again, quantized in on_ranks(ranks, learn_and_resume, ranks, settings, str(tmp_path)):
        for name, value in one[0].items():
            np.testing.assert_array_equal(again[0][name], value, err_msg=name)
        for before, after in zip(one[1], again[1], strict=True):
            np.testing.assert_array_equal(after, before)
        is_quantized += quantized
    assert any(is_quantized) and not all(is_quantized)


@pytest.mark.long
def test_muon_learns_on_a_mesh_as_in_one_process(models, tmp_path):
    settings = settings_of(
        models(num_attention_heads=4, num_key_value_heads=2),
        optimizer=optimizer_of(OptimizerType.MUON, optimizer_cpu_offload=True),
    )
    one = Learner(settings, CPU)
    expected = trained(one, *BATCHES)[0]
    one.save(tmp_path / "of one")
    one.wait_saved()
    meshes = [ParallelSizes(), ParallelSizes(tensor=2)]
    for ranks in zip(*on_ranks(2, learn_on_mesh, settings, meshes, str(tmp_path)), strict=True):
        for found in ranks:
            assert found["weights"].keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found["weights"][name], value, atol=1e-5)
            for name, value in moments(one).items():
                np.testing.assert_allclose(found["moments"][name], value, atol=1e-5)
                np.testing.assert_allclose(found["restored"][name], value, atol=1e-7)
