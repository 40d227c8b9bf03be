"""Sources of weights: names as in a checkpoint, tied ones once, the engine's dtype."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from roost.engines.tiny_model import write_tiny_model
from roost.engines.weights.source import ModuleSource, WeightStream, named_weights
from tests.limits import HANG_S


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_names_are_those_of_the_checkpoint(tmp_path, family, is_tied):
    folder = write_tiny_model(tmp_path, family, tie_word_embeddings=is_tied)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    source = ModuleSource(AutoModelForCausalLM.from_pretrained(folder))
    streamed = dict(zip(source.tensors, source.stream(), strict=True))
    assert {info.name for info in streamed} == saved.keys()
    assert source.is_live
    for info, tensor in streamed.items():
        assert info.shape == tensor.shape
        assert torch.equal(tensor, saved[info.name])


def test_live_weights_are_not_copied():
    module = nn.Linear(3, 2)
    source = ModuleSource(module)
    assert source.is_live
    assert [tensor.data_ptr() for tensor in source.stream()] == [module.weight.data_ptr(), module.bias.data_ptr()]


def test_a_cast_changes_floats_only():
    module = nn.Linear(3, 2)
    module.register_buffer("steps", torch.tensor([5]))
    source = ModuleSource(module, torch.bfloat16)
    assert not source.is_live
    assert {info.name: info.dtype for info in source.tensors} == {
        "weight": "bfloat16",
        "bias": "bfloat16",
        "steps": "int64",
    }
    assert [tensor.dtype for tensor in source.stream()] == [torch.bfloat16, torch.bfloat16, torch.int64]


def test_experts_are_cast_one_by_one(tmp_path):
    """Else the fused experts of a layer would exist once more, as long as any of them is in use."""
    module = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, "qwen3_moe"), dtype=torch.float32)
    for tensor in ModuleSource(module, torch.bfloat16).stream():
        assert tensor.dtype == torch.bfloat16
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_tied_weights_have_the_first_name():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert list(named_weights(module)) == ["0.weight"]


class Paused(WeightStream):
    """Waits within the first tensor until it may go on, as a gather waits for other ranks."""

    def __init__(self, module):
        super().__init__(module)
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def _type_of(self, weight):
        self.began.set()
        assert self.may_go_on.wait(HANG_S)
        return super()._type_of(weight)


def test_a_stream_is_finished_while_a_part_of_it_is_packed():
    paused = Paused(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with ThreadPoolExecutor(2) as threads:
        packed = threads.submit(next, paused.stream())
        assert paused.began.wait(HANG_S)
        finished = threads.submit(paused.finish)
        paused.may_go_on.set()
        assert packed.result(HANG_S).shape == (2, 2)
        assert finished.result(HANG_S) is None
    assert next(paused._streaming, None) is None, "nothing is left"
