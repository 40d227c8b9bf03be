"""What a server says no to, with which status, and what it says."""

import json

import pytest

from roost.engines.tiny_model import write_tiny_model
from tests.torch_engine.running_server import NAME, running_server


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    with running_server(write_tiny_model(tmp_path_factory.mktemp("tiny"))) as server, server.client() as client:
        yield client


def completion(**fields):
    return "/v1/completions", {"model": NAME, "prompt": "Hi", **fields}


def chat(**fields):
    return "/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], **fields}


def tokens(sampling=None, **fields):
    return "/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": sampling or {}, **fields}


# Each with the status and what the message must name.
REFUSED = {
    # what other engines do and this one does not
    "presence_penalty": (
        completion(presence_penalty=0.5),
        400,
        "presence_penalty is not supported by this engine, got 0.5",
    ),
    "frequency_penalty": (chat(frequency_penalty=1), 400, "frequency_penalty"),
    "repetition_penalty": (tokens({"repetition_penalty": 1.1}), 400, "sampling_params: repetition_penalty"),
    "logit_bias": (completion(logit_bias={"5": 1}), 400, "logit_bias"),
    "best_of": (completion(best_of=3), 400, "best_of"),
    "echo": (completion(echo=True), 400, "echo"),
    "suffix": (completion(suffix="end"), 400, "suffix"),
    "min_tokens": (completion(min_tokens=3), 400, "min_tokens"),
    "beam search": (completion(use_beam_search=True), 400, "use_beam_search"),
    "guided decoding": (completion(guided_regex="a+"), 400, "guided_regex"),
    "structured outputs": (tokens({"structured_outputs": {"regex": "a+"}}), 400, "structured_outputs"),
    "json": (chat(response_format={"type": "json_object"}), 400, "response_format"),
    "tools": (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    "alternatives": (chat(logprobs=True, top_logprobs=5), 400, "top_logprobs"),
    "alternatives of completions": (completion(logprobs=5), 400, "logprobs: Input should be less than or equal to 1"),
    "priority": (tokens(priority=1), 400, "priority"),
    "two at once": (completion(best_of=3, min_tokens=1), 400, "min_tokens"),
    "a misspelt name": (completion(temprature=0), 400, "temprature is unknown; did you mean temperature?"),
    "an unknown name": (tokens(colour="red"), 400, "colour is unknown"),
    "an image": (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "type image_url"),
    # values that make no sense
    "temperature": (completion(temperature=-1), 400, "temperature is -1"),
    "a temperature that is no number": (completion(temperature=float("nan")), 400, "temperature is nan"),
    "top_p": (chat(top_p=0), 400, "top_p is 0"),
    "top_k": (completion(top_k=-2), 400, "top_k is -2"),
    "min_p": (completion(min_p=2), 400, "min_p is 2"),
    "max_tokens": (completion(max_tokens=0), 400, "max_tokens is 0"),
    "no samples": (completion(n=0), 400, "n: "),
    "too many samples": (completion(n=3000, prompt=["a", "b"]), 400, "6000 completions"),
    "a word for a number": (completion(max_tokens="many"), 400, "max_tokens: "),
    "an empty stop string": (completion(stop=[""]), 400, "stop"),
    "stream options without a stream": (completion(stream_options={"include_usage": True}), 400, "stream_options"),
    "scores in a stream": (tokens({"prompt_logprobs": 0}, stream=True), 400, "prompt_logprobs"),
    "an id with a space": (completion(request_id="a b"), 400, "request_id"),
    "half a character": (completion(prompt="\ud800"), 400, "half a character at position 0"),
    # prompts
    "no prompt": (("/v1/completions", {"model": NAME}), 400, "prompt: Field required"),
    "an empty text": (completion(prompt=""), 400, "empty"),
    "an empty list": (completion(prompt=[]), 400, "prompt"),
    "no tokens": (tokens(token_ids=[]), 400, "token_ids"),
    "a token out of the vocabulary": (tokens(token_ids=[1, 999]), 400, "token id 999 is not in the vocabulary of 272"),
    "a token below zero": (completion(prompt=[-1]), 400, "token id -1"),
    "a token beyond all bounds": (tokens({"stop": "x"}, token_ids=[10**30]), 400, "token id"),
    "a prompt that fills the context": (tokens(token_ids=[1] * 512), 400, "shorten the prompt by 1"),
    "more than the context holds": (completion(prompt=[1] * 500, max_tokens=13), 400, "write at most 12"),
    "no messages": (chat(messages=[]), 400, "messages"),
    "a message without a role": (chat(messages=[{"content": "Hi"}]), 400, "messages.0.role: Field required"),
    "the template's own arguments": (chat(chat_template_kwargs={"tokenize": True}), 400, "tokenize"),
    "both ends of a message": (chat(continue_final_message=True), 400, "continue_final_message"),
    # models and routes
    "another model": (completion(model="gpt-9"), 404, "The model `gpt-9` does not exist; served here: tiny"),
    "another model of the token route": (tokens(model="gpt-9"), 404, "gpt-9"),
    "half a character as a model": (completion(model="\ud800"), 404, "does not exist"),
    "another route": (("/v1/embeddings", {}), 404, "Not Found"),
    "adapters, where none are taken": (
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        404,
        "Not Found",
    ),
    "no such mode": (("/pause?mode=later", None), 400, "mode: Input should be 'abort', 'wait' or 'keep'"),
    "no such level": (("/sleep?level=3", None), 400, "level"),
    "no such part": (("/wake_up?tags=soul", None), 400, "tags"),
    "a version that is no number": (("/update_weight_version", {"new_version": "best"}), 400, "'best'"),
    "nobody named": (("/inference/v1/abort_requests", {}), 400, "request_ids is missing"),
}


@pytest.mark.parametrize(("request_", "status", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(http, request_, status, message):
    route, body = request_
    # Written by hand, because it can hold what a client of good manners would not send.
    answer = http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["code"] == status
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]
    assert http.get("/load").json()["running"] == 0


def test_a_body_that_is_no_json(http):
    answer = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")


def test_a_refused_stream_has_a_status_of_its_own(http):
    route, body = tokens(token_ids=[999], stream=True)
    answer = http.post(route, json=body)
    assert answer.status_code == 400
    assert "token id 999" in answer.json()["error"]["message"]


def test_one_bad_prompt_of_many_leaves_nothing_running(http):
    route, body = completion(prompt=[[1], [2], [999]], max_tokens=400)
    answer = http.post(route, json=body)
    assert answer.status_code == 400
    load = http.get("/load").json()
    assert (load["running"], load["waiting"]) == (0, 0)


# The values that change nothing; clients send them without thinking.
ACCEPTED = {
    "completions": completion(
        presence_penalty=0, logit_bias=None, best_of=1, echo=False, user="me", top_k=-1, stop=None
    ),
    "chat": chat(tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=True, store=False),
    "tokens": tokens({"repetition_penalty": 1.0, "bad_words": [], "min_tokens": 0, "detokenize": False}, priority=0),
}


@pytest.mark.parametrize(("route", "body"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_values_without_effect_are_taken(http, route, body):
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
