"""What flash attention over blocks is called with, read by a stand-in for the kernel that insists on what it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from roost.torch_engine import attention as flash
from roost.torch_engine.cache import LayerShape

BLOCK = 256
LAYER = LayerShape(heads=2, key_size=8, value_size=8)


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    assert block_table is not None and seqused_k is not None and enable_gqa
    assert (window_size, num_splits) == ((-1, 0), 1)
    assert cu_seq_k.dtype is cu_seq_q.dtype is torch.int32
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    assert max_q == cu_seq_q.diff().max() and max_k >= seqused_k.max()
    outputs = []
    for row, length in enumerate(seqused_k.tolist()):
        queries = query[cu_seq_q[row] : cu_seq_q[row + 1]].transpose(0, 1)
        blocks = block_table[row, : -(-length // BLOCK)]
        keys, values = (each[blocks].flatten(0, 1)[:length].transpose(0, 1) for each in (key, value))
        seen = torch.ones(queries.shape[1], length, dtype=torch.bool).tril(length - queries.shape[1])
        outputs.append(
            F.scaled_dot_product_attention(queries, keys, values, seen, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    flash._parameters.cache_clear()
    yield
    flash._parameters.cache_clear()


def test_the_kernel_is_told_where_keys_begin_and_not_to_split_them(with_kernel: None) -> None:
    assert flash._agrees(LAYER, BLOCK, torch.float32, torch.device("cpu"))


def test_torch_takes_what_it_is_called_with() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    assert {"seqused_k", "block_table", "num_splits", "enable_gqa", "window_size", "scale"} <= flash._parameters()
