"""Attention within the sequences of a packed batch, registered with transformers as an attention function."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from roost.learner.parallel.context import ContextGroup
from roost.learner.sample import Ints
from roost.vision.tower import UNSUPPORTED_ATTENTION_TERMS

NAME = "roost_packed"
ARGUMENT = "roost_segments"  # models pass unknown arguments on to their attention
FLASH_HEAD = 256  # largest head size of flash attention


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Sequence boundaries of a packed batch."""

    lengths: tuple[int, ...]
    starts: Tensor  # int32, on the device, with the end of the last
    alike: tuple[tuple[int, Tensor], ...]  # distinct lengths, each with the indices of the tokens of its sequences
    back: Tensor  # index of each token after grouping by length
    context: ContextGroup | None = None  # ranks that share the tokens

    @classmethod
    def of(cls, borders: Ints, device: torch.device, context: ContextGroup | None = None) -> Segments:
        lengths = np.diff(borders)
        alike = [
            (int(length), (borders[:-1][lengths == length][:, None] + np.arange(length)).ravel())
            for length in np.unique(lengths)
        ]
        back = np.argsort(np.concatenate([places for _, places in alike]))
        starts = torch.from_numpy(borders.astype(np.int32)).to(device)
        tokens = tuple((length, torch.from_numpy(places).to(device)) for length, places in alike)
        return cls(tuple(lengths.tolist()), starts, tokens, torch.from_numpy(back).to(device), context)


def register() -> None:
    """Register with transformers, without a mask function, so that no mask is built."""
    # Not compiled with the layer around it: lengths of sequences differ in every call.
    AttentionInterface.register(NAME, torch.compiler.disable(_attend))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    segments: Segments | None = options.get(ARGUMENT)
    if segments is None:
        raise ValueError(f"{type(module).__name__} is not passed the keyword arguments of the model's call")
    unknown = [name for name in UNSUPPORTED_ATTENTION_TERMS if options.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} asks its attention for {unknown}, which is not supported")
    # Under autocast, rotary embeddings leave queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    context = segments.context
    if context is not None:
        query, key, value = (context.by_heads(each) for each in (query, key, value))
    attend = _flash if _can_flash(query, value) and not _is_uniform(segments, sliding_window) else _by_length
    attended = attend(query, key, value, segments, scaling, sliding_window)
    if context is not None:
        attended = context.by_tokens(attended)
    # Not a view: a compiled layer would be compiled again for each shape of the view's base.
    return attended.clone(), None


def _is_uniform(segments: Segments, window: int | None) -> bool:
    """Return True for several sequences of one length, which can be batched without copies or a mask.

    A single sequence goes to flash attention: on Hopper torch would choose cuDNN, which builds a graph for every new
    length.
    """
    length, count = segments.lengths[0], len(segments.lengths)
    return len(segments.alike) == 1 and count > 1 and (window is None or length <= window)


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """Attention batched by sequence length; tensors are [1, heads, tokens, head size], the result [1, tokens, ...].

    Thousands of short sequences, as in control tasks, would otherwise need as many calls.
    """
    key, value = (_repeat_heads(each, query) for each in (key, value))
    parts = []
    for length, tokens in segments.alike:
        rows = None if len(segments.alike) == 1 else tokens
        q, k, v = (_rows(each, rows, length) for each in (query, key, value))
        mask = _window_mask(length, window, q.device)
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, segments.back)
    return whole.unsqueeze(0)


def _repeat_heads(packed: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries."""
    shared = query.shape[1] // packed.shape[1]
    return packed if shared == 1 else packed.repeat_interleave(shared, dim=1)


def _rows(packed: Tensor, tokens: Tensor | None, length: int) -> Tensor:
    """Sequences of one length as a batch: [sequences, heads, tokens, head size]; None: of all tokens."""
    chosen = packed.squeeze(0) if tokens is None else packed.squeeze(0).index_select(1, tokens)
    return chosen.view(len(chosen), -1, length, chosen.shape[-1]).transpose(0, 1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal sliding-window mask; None if the sequence fits into the window."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < window)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """Attention of all sequences in one flash attention call."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(segments.lengths)
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _varlen_parameters() else {}
    if not options:
        key, value = (_repeat_heads(each, query) for each in (key, value))
    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        segments.starts,
        segments.starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return cast(Tensor, output).unsqueeze(0)  # returns a pair only if auxiliary output is requested


def _can_flash(query: Tensor, value: Tensor) -> bool:
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > FLASH_HEAD:
        return False
    return {"window_size", "scale"} <= _varlen_parameters()


@cache
def _varlen_parameters() -> frozenset[str]:
    """Parameters of flash attention in this release of torch; empty if it has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
