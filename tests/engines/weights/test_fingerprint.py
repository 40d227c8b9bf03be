"""Fingerprints tell any two tensors apart, and do not depend on how a tensor lies in memory."""

import pytest
import torch

import roost.engines.weights.probe as module
from roost.engines.weights.probe import Fingerprints, fingerprint
from tests.grid import grid

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool)
CHUNK = 64  # words, instead of millions
SIZES = (1, 7, 8, 9, 1000, CHUNK * 8 * 2 + 3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", CHUNK)


def tensor_of(dtype, size):
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator).to(dtype)


@grid("dtype", DTYPES, ids=str)
@grid("size", SIZES)
def test_one_changed_element_changes_it(dtype, size):
    tensor = tensor_of(dtype, size)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] = (1 - tensor[place].to(torch.int64)).to(dtype)
        assert fingerprint(changed) != before, place


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(torch.zeros(4), torch.zeros(5), id="longer"),
        pytest.param(torch.zeros(2, 3), torch.zeros(3, 2), id="another shape"),
        pytest.param(torch.zeros(4), torch.zeros(4, dtype=torch.int32), id="another type"),
        pytest.param(torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]), id="signs of zero swapped"),
        pytest.param(torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0]), id="signs swapped"),
        pytest.param(torch.full((2,), float("nan")), torch.full((2,), float("inf")), id="not a number"),
        pytest.param(torch.tensor([-1.0] * 4), torch.tensor([1.0] * 4), id="all signs"),
    ],
)
def test_different_tensors_differ(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_every_pair_of_places_that_swap_is_seen():
    tensor = torch.arange(64, dtype=torch.float32)
    found = {fingerprint(tensor)}
    for one in range(64):
        for other in range(one):
            swapped = tensor.clone()
            swapped[one], swapped[other] = tensor[other], tensor[one]
            found.add(fingerprint(swapped))
    assert len(found) == 1 + 64 * 63 // 2


def test_strides_and_offsets_do_not_matter():
    whole = torch.arange(60, dtype=torch.bfloat16)
    part = whole[3:51].view(6, 8)
    assert fingerprint(part) == fingerprint(part.clone())
    assert fingerprint(part.t()) == fingerprint(part.t().contiguous())


def test_an_empty_tensor_has_one():
    assert fingerprint(torch.empty(0)).startswith("float32:")


def test_many_are_read_together():
    tensors = {str(dtype): tensor_of(dtype, 1000) for dtype in DTYPES}
    found = Fingerprints()
    for name, tensor in tensors.items():
        found.add(name, tensor)
    assert found.read() == {name: fingerprint(tensor) for name, tensor in tensors.items()}
    assert Fingerprints().read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", (*SIZES, 1 << 20), ids=str)
def test_the_device_computes_the_same(dtype, size):
    tensor = tensor_of(dtype, size)
    assert fingerprint(tensor.cuda()) == fingerprint(tensor)
    assert fingerprint(tensor.cuda()[1:]) == fingerprint(tensor[1:])
