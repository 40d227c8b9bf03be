"""The fields that requests have in common, and the refusal of those that this engine does not have."""

from __future__ import annotations

import difflib
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from roost.engines.protocol import Sampling
from roost.net.errors import Refused, refusing
from roost.torch_engine.text import TextCodec, TextWanted

MOST_SAMPLES = 4096  # of one request, over all its prompts

# Metadata, or requests for the default: the tokens are the same with and without them.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id"}
)

# Not offered, but clients send them with the value that changes nothing; null never does.
WITHOUT_EFFECT_AT: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "suffix": (),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": (),
    "top_logprobs": (0,),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "chat_template": (),
    "documents": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "features": (),
    "content_parts": (),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": (),
    "extra_args": (),
    "repetition_detection": (),
    "stream_interval": (1,),
}


class StrictBody(BaseModel):
    """A request body that refuses unknown fields, unless they change nothing."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _nothing_ignored(self) -> StrictBody:
        if refused := refused_fields(self.model_extra or {}, type(self).model_fields):
            raise ValueError("; ".join(refused))
        return self


def refused_fields(extra: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Reasons that unknown fields of a body cannot be ignored.

    >>> refused_fields({"user": "me", "presence_penalty": 0.0, "best_of": 4, "temprature": 1}, ["temperature"])
    ['best_of is not supported by this engine, got 4', 'temprature is unknown; did you mean temperature?']
    """
    return [
        _why_refused(name, value, known)
        for name, value in extra.items()
        if name not in WITHOUT_EFFECT
        and not (name in WITHOUT_EFFECT_AT and (value is None or value in WITHOUT_EFFECT_AT[name]))
    ]


def _why_refused(name: str, value: Any, known: Collection[str]) -> str:
    if name in WITHOUT_EFFECT_AT:
        shown = repr(value)
        return f"{name} is not supported by this engine, got {shown if len(shown) <= 60 else shown[:60] + '...'}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


ID_PATTERN = r"^[!-~]{1,256}$"  # it is written in answers and logs
RequestId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


def request_id_of(request: Request, given: str | None) -> str:
    """The client's id of a request, from its header or body, or a new one."""
    header = request.headers.get("x-request-id")
    if header is not None and not re.match(ID_PATTERN, header):
        raise Refused("X-Request-Id must be 1 to 256 visible ASCII characters", field="request_id")
    return header or given or uuid.uuid4().hex


class StreamOptions(StrictBody):
    """Options for the end of a stream."""

    include_usage: bool | None = False


class SamplingFields(StrictBody):
    """Sampling parameters in OpenAI's and vLLM's format; defaults sample from the model's own distribution."""

    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # of the prompt's own tokens alone

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def text_wanted(self, codec: TextCodec) -> TextWanted:
        codec.check()
        return TextWanted(codec, self.stop_strings, self.include_stop_str_in_output, self.skip_special_tokens)

    def sampling(self, max_tokens: int) -> Sampling:
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # both mean all tokens
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        with refusing():
            return Sampling(max_tokens, **{name: value for name, value in given.items() if value is not None})


def room_for_completion(prompt_tokens: int, max_context: int) -> int:
    """Number of tokens that fit after a prompt; raise Refused if there is no room."""
    room = max_context - prompt_tokens
    if room < 1:
        raise Refused(
            f"the prompt has {prompt_tokens} tokens and the context holds {max_context}, which leaves no room for a "
            f"completion; shorten the prompt by {1 - room}",
            field="prompt",
        )
    return room
