"""Attention within the sequences of a packed batch, called by transformers' own modules in place of theirs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from roost.learner.sample import Ints

NAME = "roost_packed"
ARGUMENT = "roost_segments"  # the models hand on what they do not know to their attention
FLASH_HEAD = 256  # the largest that flash attention takes
# What some models ask of their attention beyond softmax(q k) v; ours would leave it out without a word.
UNKNOWN_TO_US = ("softcap", "s_aux", "position_bias", "alibi_slopes")


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Where the sequences of a batch begin and end."""

    lengths: tuple[int, ...]
    starts: Tensor  # 32-bit, on the device, with the end of the last
    alike: tuple[tuple[int, Tensor], ...]  # the lengths that there are, each with the tokens of its sequences
    back: Tensor  # where each token is when they are put together by length

    @classmethod
    def of(cls, borders: Ints, device: torch.device) -> Segments:
        lengths = np.diff(borders)
        alike = [
            (int(length), (borders[:-1][lengths == length][:, None] + np.arange(length)).ravel())
            for length in np.unique(lengths)
        ]
        back = np.argsort(np.concatenate([places for _, places in alike]))
        starts = torch.from_numpy(borders.astype(np.int32)).to(device)
        tokens = tuple((length, torch.from_numpy(places).to(device)) for length, places in alike)
        return cls(tuple(lengths.tolist()), starts, tokens, torch.from_numpy(back).to(device))


def register() -> None:
    """Make it known to transformers. No mask is registered with it, so that none is made."""
    AttentionInterface.register(NAME, _attend)


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
        raise ValueError(f"{type(module).__name__} does not get what the model was called with")
    unknown = [name for name in UNKNOWN_TO_US if options.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} asks its attention for {unknown}, which is not supported")
    # Under autocast, rotations leave queries and keys in 32 bits.
    query, key = query.to(value.dtype), key.to(value.dtype)
    attend = _flash if _can_flash(query, value) else _by_length
    return attend(query, key, value, segments, scaling, sliding_window), None


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """All sequences of one length at a time; tensors are [1, heads, tokens, head size], the result [1, tokens, ...].

    Thousands of short sequences, as in control, would otherwise be as many calls.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    parts = []
    for length, tokens in segments.alike:
        q, k, v = (_rows(each, tokens, length) for each in (query, key, value))
        mask = _window_mask(length, window, q.device)
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, segments.back).unsqueeze(0)


def _rows(packed: Tensor, tokens: Tensor, length: int) -> Tensor:
    """Some sequences of a length as rows: [sequences, heads, tokens, head size]."""
    chosen = packed.squeeze(0).index_select(1, tokens)
    return chosen.view(len(chosen), -1, length, chosen.shape[-1]).transpose(0, 1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which tokens see which, where a sequence is longer than the window."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < window)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """All sequences in one call of torch's flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(segments.lengths)
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
        enable_gqa=True,
    )
    return cast(Tensor, output).unsqueeze(0)  # a pair only where more is asked for


def _can_flash(query: Tensor, value: Tensor) -> bool:
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > FLASH_HEAD:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= inspect.signature(varlen_attn).parameters.keys()
