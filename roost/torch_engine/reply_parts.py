"""The parts that answers of all routes have in common, as they are written in JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from roost.torch_engine.in_flight import Asked
from roost.torch_engine.sample import Piece, Sample
from roost.torch_engine.text_codec import TextCodec

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold.

    >>> finite(-0.5), finite(float("-inf")), finite(float("nan"))
    (-0.5, -9999.0, -9999.0)
    """
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def usage(asked: Asked, samples: Sequence[Sample]) -> Json:
    """How many tokens went in and came out; a prompt counts once, however many completions it has."""
    prompt_tokens = sum(len(prompt) for prompt in asked.prompts)
    completion_tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in samples[:: asked.samples])},
    }


def weight_versions(sample: Sample) -> list[Json]:
    """Which policy version made which tokens; versions are strings on the wire."""
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in sample.versions]


def prompt_logprobs(sample: Sample) -> list[Json | None] | None:
    """The log-probability of each token of the prompt, by its id; nothing precedes the first, so it has none."""
    if sample.prompt_logprobs is None:
        return None
    told: list[Json | None] = [None]
    for token_id, logprob in zip(sample.prompt[1:], sample.prompt_logprobs, strict=True):
        told.append({str(token_id): {"logprob": finite(logprob), "rank": None, "decoded_token": None}})
    return told


def token_text(codec: TextCodec, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else codec.token_text(token_id)


def chat_logprobs(piece: Piece, codec: TextCodec, as_ids: bool = False) -> Json:
    """The drawn tokens and their log-probabilities, with the tokens as text."""
    content = []
    for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
        text = token_text(codec, token_id, as_ids)
        content.append({"token": text, "logprob": finite(logprob), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}
