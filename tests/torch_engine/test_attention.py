"""All ways of attending give the same, whatever the parts in which a sequence is computed."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from roost.engines.protocol import Sampling
from roost.torch_engine import attention
from roost.torch_engine.attention import (
    PAGED_BLOCK,
    Attention,
    BySequence,
    DecodeTogether,
    LayerCall,
    Paged,
    Tables,
)
from roost.torch_engine.model import DecodeInputs, LoadedModel, bucket, load_model
from roost.torch_engine.runner import Runner
from roost.torch_engine.scheduler import Batch, Chunk, LayerCache, LayerShape, Request, Tracked, flatten, new_cache
from roost.torch_engine.settings import EngineSettings
from roost.torch_engine.update import Adapters

BLOCK, BLOCKS = 4, 64
CAN_RUN_KERNEL = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def model(models: Any) -> LoadedModel:
    return load_model(EngineSettings(str(models("qwen3")), device="cpu"))


def cache(model: LoadedModel) -> list[LayerCache]:
    return new_cache(model.layers, BLOCKS, BLOCK, model.dtype, model.device)


def sequences(lengths: list[int]) -> list[Tracked]:
    """Scored, so that every row has its logits; the blocks lie in disorder."""
    chance = random.Random(0)
    blocks = list(range(BLOCKS))
    chance.shuffle(blocks)
    made = []
    for place, length in enumerate(lengths):
        ids = tuple(chance.randrange(256) for _ in range(length))
        request = Request(str(place), ids, Sampling(), wants_prompt_logprobs=True)
        made.append(Tracked(request, print, seed=0, stop_ids=frozenset(), limit=length + 1))
        made[-1].blocks = [blocks.pop() for _ in range(-(-length // BLOCK))]
    return made


def logits(model: LoadedModel, tracked: Tracked) -> torch.Tensor:
    """Those of all positions, computed by transformers' own attention."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model.module.name_or_path).eval()
    with torch.no_grad():
        result: torch.Tensor = plain(torch.tensor([tracked.token_ids])).logits[0]
    return result


CUTS = {
    "whole": ([0, 23], [0, 9]),
    "chunks": ([0, 5, 16, 23], [0, 3, 4, 9]),
    "token by token at the end": ([0, 20, 21, 22, 23], [0, 6, 7, 8, 9]),
    "a chunk beside a token": ([0, 22, 23], [0, 1, 9]),
}


class TogetherRunner(Runner):
    """A runner that attends as on a GPU on which the kernel does not compile."""

    def _attention(self, chunks: Sequence[Chunk], batch: Batch, cache: Sequence[LayerCache]) -> Attention:
        return DecodeTogether(cache, batch)


@pytest.mark.parametrize(
    ("runs", "short"),
    [
        pytest.param(Runner, 64, id="short ones together"),
        pytest.param(Runner, 10, id="one of two alone"),
        pytest.param(Runner, 0, id="one by one"),
        pytest.param(TogetherRunner, 0, id="decode together"),
    ],
)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_parts_give_the_logits_of_the_whole(
    model: LoadedModel,
    cuts: tuple[list[int], list[int]],
    runs: type[Runner],
    short: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SHORT", short)
    runner, room = runs(model, Adapters(model.module), BLOCK), cache(model)
    both = sequences([23, 9])
    parts: list[list[torch.Tensor]] = [[], []]
    for step in range(1, max(len(each) for each in cuts)):
        chunks = [
            Chunk(tracked, own[step - 1], own[step]) for tracked, own in zip(both, cuts, strict=True) if step < len(own)
        ]
        rows = runner.run(chunks, room).split([chunk.size for chunk in chunks])
        for chunk, part in zip(chunks, rows, strict=True):
            parts[both.index(chunk.tracked)].append(part)
    for tracked, made in zip(both, parts, strict=True):
        torch.testing.assert_close(torch.cat(made), logits(model, tracked), atol=1e-4, rtol=1e-4)


CASES = {
    "prompts": ([70, 3, 64], [70, 3, 64]),
    "later chunks": ([200, 90, 64], [7, 80, 1]),
    "single tokens": ([1, 64, 65, 190], [1, 1, 1, 1]),
    "long": ([2100, 1024, 5], [1, 1, 1]),
    "long beside a prompt": ([1500, 40], [1, 40]),
}


@pytest.mark.gpu
@pytest.mark.skipif(not CAN_RUN_KERNEL, reason="needs a CUDA device, or Triton with TRITON_INTERPRET=1")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("heads", "group", "size"), [(2, 4, 32), (1, 7, 80), (2, 1, 16)])
@pytest.mark.parametrize(("lengths", "sizes"), CASES.values(), ids=CASES)
def test_paged_kernel(
    lengths: list[int],
    sizes: list[int],
    heads: int,
    group: int,
    size: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Compare with attention one sequence at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    chance, blocks = torch.Generator().manual_seed(0), sum(-(-length // PAGED_BLOCK) for length in lengths)
    order = iter(torch.randperm(blocks, generator=chance).tolist())
    chunks = []
    for place, (length, count) in enumerate(zip(lengths, sizes, strict=True)):
        request = Request(str(place), (1,) * length, Sampling())
        tracked = Tracked(request, print, seed=0, stop_ids=frozenset(), limit=length + 1)
        tracked.blocks = [next(order) for _ in range(-(-length // PAGED_BLOCK))]
        chunks.append(Chunk(tracked, length - count, length))
    batch = flatten(chunks, PAGED_BLOCK)
    room = new_cache([LayerShape(heads, size, size)], blocks, PAGED_BLOCK, dtype, device)
    for each in room[0]:
        each.copy_(torch.randn(each.shape, generator=chance))
    shapes = ((heads * group, size), (heads, size), (heads, size))
    query, key, value = (torch.randn(sum(sizes), *shape, generator=chance).to(device, dtype) for shape in shapes)
    call = LayerCall(0, query, key, value, None, {})
    expected = BySequence(room, batch, [None] * len(lengths))(call)
    paged = Paged(room, Tables.of(batch, device), batch)(call)
    torch.testing.assert_close(paged, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_inputs_of_a_captured_step_are_padded(count: int) -> None:
    """Padding rows have one token, in the scrap block."""
    several = sequences([23, 9, 1, 4, 5][:count])
    last = [Chunk(each, len(each.token_ids) - 1, len(each.token_ids)) for each in several]
    size = bucket(count, 8)
    inputs = DecodeInputs.empty(8, 16, torch.device("cpu")).part(size, 8)
    inputs.fill(flatten(last, BLOCK), scrap=BLOCKS, block_size=BLOCK)
    tables = inputs.tables
    assert inputs.token_ids.tolist() == [each.token_ids[-1] for each in several] + [0] * (size - count)
    assert tables.lengths.tolist() == [len(each.token_ids) for each in several] + [1] * (size - count)
    assert tables.slots.tolist()[count:] == [BLOCKS * BLOCK] * (size - count)
    for each, row in zip(several, tables.tables.tolist(), strict=False):
        assert row[: len(each.blocks)] == each.blocks


@pytest.mark.parametrize("lengths", [[3, 3, 5], [1, 4]], ids=["prompts", "tokens"])
def test_values_may_have_another_size_than_keys(lengths: list[int]) -> None:
    tracked = sequences(lengths)
    batch = flatten([Chunk(each, 0, length) for each, length in zip(tracked, lengths, strict=True)], BLOCK)
    room = new_cache([LayerShape(2, 8, 6)], BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    chance, tokens = torch.Generator().manual_seed(0), sum(lengths)
    query, key, value = (torch.randn(tokens, heads, size, generator=chance) for heads, size in ((4, 8), (2, 8), (2, 6)))
    call = LayerCall(0, query, key, value, None, {})
    one, other = BySequence(room, batch, [None] * len(lengths))(call), DecodeTogether(room, batch)(call)
    assert one.shape == other.shape == (tokens, 4, 6)
    assert torch.allclose(one, other, atol=1e-6)
