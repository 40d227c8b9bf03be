"""Refusals of prompts, as each server words them."""

import pytest

from roost.engines.http_calls import refusal
from roost.engines.protocol import Capabilities, ContextFull, EngineRefused

WORDS = [
    pytest.param(
        "the prompt has 64 tokens and the context holds 64, which leaves no room for a completion; shorten the prompt",
        ContextFull,
        id="built-in",
    ),
    pytest.param(
        "the prompt has 64 tokens; a context of 64 has room for 63 and a generated one",
        ContextFull,
        id="built-in-late",
    ),
    pytest.param(
        "the prompt has 60 tokens and max_tokens is 9, together more than the context of 64; write at most 4",
        EngineRefused,
        id="built-in-asked-for-too-much",
    ),
    pytest.param(
        "This model's maximum context length is 64 tokens. However, your request has 80 input tokens.",
        ContextFull,
        id="openai-and-vllm",
    ),
    pytest.param(
        "The decoder prompt (length 80) is longer than the maximum model length of 64.", ContextFull, id="vllm-prompt"
    ),
    pytest.param(
        "The prompt (total length 80) is too long to fit into the model (context length 64).",
        ContextFull,
        id="vllm-older",
    ),
    pytest.param(
        "The input (80 tokens) is longer than the model's context length (64 tokens).", ContextFull, id="sglang"
    ),
    pytest.param(
        "Input length (80 tokens) exceeds the maximum allowed length (59 tokens).", ContextFull, id="sglang-scheduler"
    ),
    pytest.param("token id 900 is not in the vocabulary of 512", EngineRefused, id="a-wrong-token"),
    pytest.param("there is no adapter 'policy-3'", EngineRefused, id="no-adapter"),
]


@pytest.mark.parametrize(("message", "kind"), WORDS)
def test_a_full_context_is_told_apart(message, kind):
    asked = "POST http://127.0.0.1:1/generate (a prompt of 80 tokens, at most 16 more): 400"
    assert type(refusal(f"{asked}, {message}")) is kind


@pytest.mark.parametrize(
    ("prompt", "max_context", "kind"),
    [(63, 64, EngineRefused), (64, 64, ContextFull), (80, 64, ContextFull), (80, None, EngineRefused)],
)
def test_a_prompt_that_fills_the_context_is_too_long_in_any_words(prompt, max_context, kind):
    with pytest.raises(EngineRefused) as raised, Capabilities(frozenset(), max_context=max_context).refusing(prompt):
        raise EngineRefused("no")
    assert type(raised.value) is kind
    assert type(refusal(str(raised.value))) is kind  # also to whoever hears of it through somebody else
