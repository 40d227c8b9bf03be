"""The token route and the control routes of a running server, and what it refuses, with which status and message."""

import json
import socket
import threading

import httpx
import pytest

from roost.engines.tiny_model import write_tiny_model
from tests.torch_engine.running_server import NAME, eventually, forked_server

PROMPT = [72, 69, 76, 76, 79]
GREEDY = {"temperature": 0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with forked_server(write_tiny_model(tmp_path_factory.mktemp("tiny"))) as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    with server.client() as client:
        yield client


@pytest.fixture
def held(http):
    """The engine takes requests, and works on none of them."""
    http.post("/pause?mode=keep").raise_for_status()
    yield
    http.post("/abort_requests", json={})
    http.post("/resume").raise_for_status()


def generate(http, token_ids=PROMPT, **fields):
    sampling = {**GREEDY, **fields.pop("sampling", {})}
    return http.post("/inference/v1/generate", json={"token_ids": token_ids, "sampling_params": sampling, **fields})


def choices(http, *args, **fields):
    answer = generate(http, *args, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def events(answer):
    data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def test_sampling_masks_come_with_truncated_sampling(http):
    sampling = {"temperature": 1.0, "top_p": 0.8, "seed": 4}
    (choice,) = choices(http, sampling=sampling, return_sampling_mask=True)
    assert len(choice["sampling_mask"]) == len(choice["token_ids"]) == 6
    assert all(token in mask for token, mask in zip(choice["token_ids"], choice["sampling_mask"], strict=True))
    assert "sampling_mask" not in choices(http, sampling=sampling)[0]
    assert "sampling_mask" not in choices(http, return_sampling_mask=True)[0]  # greedy


def waiting(http):
    return http.get("/load").json()["waiting"]


class Background:
    """A request that is sent while the test goes on."""

    def __init__(self, server, **fields):
        self.client = server.client()
        self.answer = None
        self._thread = threading.Thread(target=self._send, kwargs=fields, daemon=True)
        self._thread.start()

    def _send(self, **fields):
        self.answer = generate(self.client, **fields)

    def result(self):
        self._thread.join()
        self.client.close()
        return self.answer


def test_the_ready_line_tells_model_device_blocks_and_address(server, http):
    blocks = http.get("/load").json()["num_blocks"]
    assert f"on cpu, {blocks} KV blocks, {server.url}" in server.ready_line


def test_an_answer_has_all_that_a_learner_needs(http):
    answer = generate(http, request_id="mine", return_token_ids=True).json()
    [choice] = answer["choices"]
    assert answer["request_id"] == "generate-tokens-mine"
    assert (answer["model"], answer["output_mode"], answer["prompt_token_ids"]) == (NAME, "tokens", PROMPT)
    assert len(choice["token_ids"]) == 6
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)


def test_scoring_gives_the_log_probabilities_that_generating_gave(http):
    [choice] = choices(http)
    sampled = choice["token_ids"]
    scored = generate(http, PROMPT + sampled, sampling={"max_tokens": 1, "prompt_logprobs": 0}).json()[
        "prompt_logprobs"
    ]
    assert scored[0] is None
    assert len(scored) == len(PROMPT + sampled)
    described = [scored[len(PROMPT) + place][str(token_id)]["logprob"] for place, token_id in enumerate(sampled)]
    assert described == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-4)


def test_a_prompt_of_one_token_has_nothing_to_score(http):
    answer = generate(http, [5], sampling={"prompt_logprobs": 0}).json()
    assert answer["prompt_logprobs"] == [None]


def test_the_id_of_a_request_may_come_in_its_header(http):
    body = {"token_ids": PROMPT, "sampling_params": GREEDY}
    answer = http.post("/inference/v1/generate", json=body, headers={"X-Request-Id": "traced"})
    assert answer.json()["request_id"] == "generate-tokens-traced"


def test_without_max_tokens_the_context_is_filled(http):
    max_context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = [7] * (max_context - 3)
    [choice] = choices(http, prompt, sampling={"max_tokens": None})
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")


def test_a_stream_says_the_same_in_pieces(http):
    [whole] = choices(http)
    with http.stream(
        "POST",
        "/inference/v1/generate",
        json={
            "token_ids": PROMPT,
            "sampling_params": GREEDY,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *pieces, last = events(answer)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    parts = [piece["choices"][0] for piece in pieces]
    assert [token_id for part in parts for token_id in part["token_ids"]] == whole["token_ids"]
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert {part["finish_reason"] for part in parts[:-1]} <= {None}
    assert parts[-1]["finish_reason"] == "length"
    assert parts[-1]["weight_versions"] == whole["weight_versions"]


def test_a_stop_token_ends_a_completion_and_is_its_last(http):
    [free] = choices(http)
    stop = free["token_ids"][2]
    [choice] = choices(http, sampling={"stop_token_ids": [stop]})
    end = free["token_ids"].index(stop) + 1
    assert choice["token_ids"] == free["token_ids"][:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_text_mode_adds_text(http):
    [tokens], [text] = choices(http), choices(http, output_mode="text")
    assert text["token_ids"] == tokens["token_ids"]
    assert [entry["logprob"] for entry in text["logprobs"]["content"]] == [
        entry["logprob"] for entry in tokens["logprobs"]["content"]
    ]
    assert isinstance(text["text"], str) and "text" not in tokens


def test_seeds_repeat_and_samples_of_one_seed_differ(http):
    sampled = {"temperature": 1.0, "max_tokens": 12, "seed": 5}
    four = [choice["token_ids"] for choice in choices(http, sampling={**sampled, "n": 4})]
    assert len({tuple(tokens) for tokens in four}) == 4
    assert [choice["token_ids"] for choice in choices(http, sampling={**sampled, "n": 4})] == four
    assert choices(http, sampling=sampled)[0]["token_ids"] == four[0]


def test_versions_are_told_as_they_are_set(http):
    assert http.post("/update_weight_version", json={"new_version": "7"}).json() == {
        "success": True,
        "new_version": "7",
    }
    assert http.get("/weight_info").json() == {"weight_version": "7", "has_weights": True}
    assert choices(http)[0]["weight_versions"] == [{"version": "7", "start": 0, "end": 6}]
    http.post("/update_weight_version", json={"new_version": "0"}).raise_for_status()


@pytest.mark.parametrize("named", ["mine", "generate-tokens-mine"])
@pytest.mark.parametrize("samples", [1, 3])
def test_an_aborted_request_comes_back_as_far_as_it_got(server, http, held, named, samples):
    request = Background(server, request_id="mine", sampling={"n": samples})
    eventually(lambda: waiting(http) == samples)
    assert http.post("/abort_requests", json={"request_ids": [named]}).json() == {
        "status": "aborted",
        "aborted": samples,
    }
    ended = request.result().json()["choices"]
    assert [(choice["finish_reason"], choice["token_ids"]) for choice in ended] == [("abort", [])] * samples


def test_only_those_named_are_aborted(server, http, held):
    requests = [Background(server, request_id=name) for name in ("first", "second")]
    eventually(lambda: waiting(http) == 2)
    assert http.post("/inference/v1/abort_requests", json={"request_ids": ["first", "nobody"]}).status_code == 200
    assert requests[0].result().json()["choices"][0]["finish_reason"] == "abort"
    http.post("/resume").raise_for_status()
    assert requests[1].result().json()["choices"][0]["finish_reason"] == "length"


def test_an_id_is_used_once_at_a_time(server, http, held):
    request = Background(server, request_id="twin")
    eventually(lambda: waiting(http) == 1)
    refused = generate(http, request_id="twin")
    assert refused.status_code == 400
    assert "generate-tokens-twin is being served already" in refused.json()["error"]["message"]
    http.post("/resume").raise_for_status()
    assert request.result().status_code == 200
    assert generate(http, request_id="twin").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_its_request_ended(server, http, held, stream):
    body = {"token_ids": PROMPT, "sampling_params": {**GREEDY, "n": 2}, "stream": stream, "request_id": "left"}
    data = json.dumps(body).encode()
    head = "POST /inference/v1/generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        eventually(lambda: waiting(http) == 2)
    eventually(lambda: waiting(http) == 0)
    http.post("/resume").raise_for_status()
    eventually(lambda: generate(http, request_id="left").status_code == 200)


def test_pausing_and_resuming(server, http):
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.post("/pause?mode=wait").json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    request = Background(server)
    eventually(lambda: waiting(http) == 1)
    assert http.post("/resume").json() == {"status": "resumed"}
    assert request.result().json()["choices"] == choices(http)


@pytest.mark.parametrize("level", [0, 1])
def test_sleeping_and_waking(http, level):
    before = choices(http)
    assert http.post(f"/sleep?level={level}").json() == {"status": "sleeping", "level": level}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert choices(http) == before


def test_waking_in_parts(server, http):
    before = choices(http)
    http.post("/sleep?level=1&mode=wait").raise_for_status()
    request = Background(server)
    eventually(lambda: waiting(http) == 1)
    assert http.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert waiting(http) == 1
    assert http.post("/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
    assert request.result().json()["choices"] == before


def test_the_prefix_cache_is_found_and_forgotten(http):
    long = [(3 * place) % 250 for place in range(64)]
    generate(http, long).raise_for_status()
    cached = generate(http, long).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < len(long)
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert generate(http, long).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


SMALL = {
    "health": ("/health", None),
    "world size": ("/get_world_size", {"world_size": 1}),
}


@pytest.mark.parametrize(("route", "answer"), SMALL.values(), ids=SMALL.keys())
def test_small_questions(http, route, answer):
    response = http.get(route)
    assert response.status_code == 200
    assert (response.json() if response.content else None) == answer


def test_the_routes_and_abilities_that_clients_look_for(http):
    routes = http.get("/openapi.json").json()["paths"]
    assert {"/sleep", "/inference/v1/generate", "/start_weight_update", "/abandon_weight_update"} <= routes.keys()
    assert "/v1/load_lora_adapter" not in routes  # it was not started with --enable-lora
    abilities = http.get("/version").json()["roost"]
    assert abilities["spans"] and abilities["sleeps"] and not abilities["adapters"]


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
    "length_penalty": (tokens({"length_penalty": 1.1}), 400, "sampling_params: length_penalty"),
    "repetition_penalty": (tokens({"repetition_penalty": 0}), 400, "repetition_penalty is 0.0; it must be above 0"),
    "logit_bias": (completion(logit_bias={"5": 1}), 400, "logit_bias"),
    "best_of": (completion(best_of=3), 400, "best_of"),
    "echo": (completion(echo=True), 400, "echo"),
    "suffix": (completion(suffix="end"), 400, "suffix"),
    "min_tokens": (completion(min_tokens=-1), 400, "min_tokens is -1"),
    "beam search": (completion(use_beam_search=True), 400, "use_beam_search"),
    "guided decoding": (completion(guided_regex="a+"), 400, "guided_regex"),
    "structured outputs": (tokens({"structured_outputs": {"regex": "a+"}}), 400, "structured_outputs"),
    "json": (chat(response_format={"type": "json_object"}), 400, "response_format"),
    "tools": (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    "alternatives": (chat(logprobs=True, top_logprobs=5), 400, "top_logprobs"),
    "alternatives of completions": (completion(logprobs=5), 400, "logprobs: Input should be less than or equal to 1"),
    "priority": (tokens(priority=1), 400, "priority"),
    "two at once": (completion(best_of=3, bad_words=["a"]), 400, "bad_words"),
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
