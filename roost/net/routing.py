"""Routed experts: the experts that a mixture's routers chose, [tokens, layers, top_k], as engines return them."""

from __future__ import annotations

import base64
import io
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Routing: TypeAlias = npt.NDArray[np.uint8 | np.int16]

UNKNOWN_BYTE = 255  # in an array of bytes; -1 in others


def signed_routing(routing: Routing) -> npt.NDArray[np.int16]:
    """The same with -1 for unknown experts.

    >>> signed_routing(np.array([3, 255], np.uint8)).tolist(), signed_routing(np.array([255, -1], np.int16)).tolist()
    ([3, -1], [255, -1])
    """
    signed = routing.astype(np.int16)
    return np.where(routing == UNKNOWN_BYTE, np.int16(-1), signed) if routing.dtype == np.uint8 else signed


def routing_type(experts: int) -> type[np.uint8 | np.int16]:
    """Smallest type for the numbers of experts and one more for unknown ones."""
    return np.uint8 if experts <= UNKNOWN_BYTE else np.int16


def encode_routing(routing: Routing) -> str:
    """Base64 of an .npy file, as vLLM writes it.

    >>> decode_routing(encode_routing(np.array([[[3, 1]]], np.uint8))).tolist()
    [[[3, 1]]]
    """
    buffer = io.BytesIO()
    np.save(buffer, routing, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode()


def decode_routing(text: str) -> Routing:
    found: npt.NDArray[np.integer] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if found.ndim != 3:
        raise ValueError(f"routed experts have the shape {found.shape}; they must be [tokens, layers, top_k]")
    return found.astype(routing_type(int(found.max(initial=0)) + 1))


def joined_routing(before: Routing | None, after: Routing | None) -> Routing | None:
    """Routing of a sequence from what was known of it and that of its last request, which begins at its first token.

    What was known stays: a token is learnt from as it was computed when it was generated.

    >>> joined_routing(np.array([[[1]]], np.uint8), np.array([[[7]], [[2]]], np.uint8)).tolist()
    [[[1]], [[2]]]
    """
    if before is None or after is None:
        return after if before is None else before
    dtype = np.result_type(before, after)
    return np.concatenate([_as(before, dtype), _as(after, dtype)[len(before) :]])


def padded_routing(routing: Routing, tokens: int) -> Routing:
    """Routing of the first `tokens` tokens, with unknown experts where it ends earlier."""
    missing = max(0, tokens - len(routing))
    unknown = np.full((missing, *routing.shape[1:]), -1).astype(routing.dtype)
    return np.concatenate([routing[:tokens], unknown])


def _as(routing: Routing, dtype: np.dtype[np.generic]) -> Routing:
    """The same in another type, whose number for unknown experts may be another."""
    return routing if routing.dtype == dtype else signed_routing(routing).astype(dtype)
