"""Routed experts: the experts that a mixture's routers chose, [tokens, layers, top_k], as engines return them."""

from __future__ import annotations

import base64
import io
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Routing: TypeAlias = npt.NDArray[np.uint8 | np.int16]

UNKNOWN_BYTE = 255  # an unknown expert in uint8 arrays; -1 in others


def signed_routing(routing: Routing) -> npt.NDArray[np.int16]:
    """The routing as int16, with -1 for unknown experts.

    >>> signed_routing(np.array([3, 255], np.uint8)).tolist(), signed_routing(np.array([255, -1], np.int16)).tolist()
    ([3, -1], [255, -1])
    """
    signed = routing.astype(np.int16)
    return np.where(routing == UNKNOWN_BYTE, np.int16(-1), signed) if routing.dtype == np.uint8 else signed


def routing_type(experts: int) -> type[np.uint8 | np.int16]:
    """Smallest dtype for expert numbers and the value of unknown ones."""
    return np.uint8 if experts <= UNKNOWN_BYTE else np.int16


def encode_routing(routing: Routing) -> str:
    """Base64 of an .npy file, vLLM's format.

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
    """Routing of a sequence from that of earlier requests and of its last one, both from the first token on.

    The earlier routing wins, so that the learner uses the experts with which a token was generated.

    >>> joined_routing(np.array([[[1]]], np.uint8), np.array([[[7]], [[2]]], np.uint8)).tolist()
    [[[1]], [[2]]]
    """
    if before is None or after is None:
        return after if before is None else before
    dtype = np.result_type(before, after)
    return np.concatenate([_as(before, dtype), _as(after, dtype)[len(before) :]])


def padded_routing(routing: Routing, tokens: int) -> Routing:
    """Routing of the first `tokens` tokens, padded with unknown experts."""
    missing = max(0, tokens - len(routing))
    unknown = np.full((missing, *routing.shape[1:]), -1).astype(routing.dtype)
    return np.concatenate([routing[:tokens], unknown])


def _as(routing: Routing, dtype: np.dtype[np.generic]) -> Routing:
    """The routing in another dtype, which may have another value for unknown experts."""
    return routing if routing.dtype == dtype else signed_routing(routing).astype(dtype)
