"""Learners on a GPU: flash attention, memory that is really free, copies beside the computing."""

import dataclasses

import numpy as np
import pytest
import torch

from roost.config.train import OptimizerSettings, OptimizerType
from roost.learner.attention import Segments, _by_length, _can_flash, _flash
from roost.learner.learner import Learner
from tests.learner.random_samples import assert_equal, random_samples, settings_of, totals_of, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BATCHES = [random_samples(12, 9, seed=1), random_samples(20, 5, seed=2), random_samples(7, 30, seed=3)]


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.mark.parametrize("window", [None, 16], ids=["all", "window"])
def test_flash_attention_is_as_each_sequence_alone(device, window):
    lengths = (5, 64, 33)
    segments = Segments.of(np.array([0, 5, 69, 102]), device)
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, heads, sum(lengths), 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    if not _can_flash(tensors[0], tensors[2]):
        pytest.skip("this torch has no such flash attention")
    outputs, gradients = [], []
    for attend in (_flash, _by_length):
        output = attend(*tensors, segments, 0.1, window)
        outputs.append(output)
        gradients.append(torch.autograd.grad(output.float().square().sum(), tensors))
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("compute", "compiles"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_gpu_learns_as_the_host_does(models, device, compute, compiles):
    settings = settings_of(models(), compute_dtype=compute, compile=compiles)
    _, expected = trained(Learner(settings_of(models()), torch.device("cpu")), *BATCHES)
    _, described = trained(Learner(settings, device), *BATCHES)
    assert described == pytest.approx(expected, rel=1e-3 if compute == "float32" else 0.1, abs=1e-2)


def test_offloading_frees_the_device_and_changes_nothing(models, device, tmp_path):
    settings = settings_of(models(hidden_size=512, intermediate_size=2048), compute_dtype="bfloat16")
    one = Learner(settings, device)
    one.learn(BATCHES[0], totals_of(BATCHES[0]))
    one.save(tmp_path / "step")
    before = {name: weight.clone().cpu() for name, weight in one.weights()}
    held = torch.cuda.memory_allocated(device)
    weights = sum(weight.numel() * 4 for weight in one.module.parameters())
    one.offload(["grad", "optimizer"], in_background=True)
    one.offload()
    assert torch.cuda.memory_allocated(device) <= held - 3 * weights
    one.load()
    assert_equal({name: weight.cpu() for name, weight in one.weights()}, before)
    expected, _ = trained(one, *BATCHES[1:])
    one.wait_saved()
    two = Learner(settings, device)
    two.restore(tmp_path / "step")
    assert_equal(trained(two, *BATCHES[1:])[0], expected, 1e-4)


@pytest.mark.parametrize("kind", list(OptimizerType))
def test_state_on_the_host_frees_the_device_and_changes_nothing(models, device, kind, tmp_path):
    if kind is OptimizerType.ADAMW_8BIT:
        pytest.importorskip("torchao")
    optimizer = OptimizerSettings(learning_rate=1e-3, optimizer=kind)
    settings = settings_of(models(hidden_size=512, intermediate_size=2048), optimizer=optimizer)
    on_host = dataclasses.replace(settings, optimizer=dataclasses.replace(optimizer, optimizer_cpu_offload=True))
    found, held = [], []
    for each in (settings, on_host):
        before = torch.cuda.memory_allocated(device)
        one = Learner(each, device)
        held.append(torch.cuda.memory_allocated(device) - before)
        weights, _ = trained(one, *BATCHES)
        found.append({name: weight.cpu() for name, weight in weights.items()})
        one.save(tmp_path / str(len(found)))
        one.wait_saved()
        one.restore(tmp_path / str(len(found)))
        states = one._optimizer.state.values()
        assert all(state.device.type == ("cpu" if each is on_host else "cuda") for state in _moments(states))
        del one, weights
    assert held[1] < held[0]
    assert_equal(found[1], found[0], 1e-4)


def _moments(states):
    return [tensor for state in states for tensor in state.values() if tensor.dim()]
