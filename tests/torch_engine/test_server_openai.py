"""The plain OpenAI client against a running server."""

import asyncio

import httpx
import openai
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from roost.engines.tiny_model import write_tiny_model
from tests.limits import HANG_S
from tests.torch_engine.running_server import NAME, forked_server

DRAWN = {"max_tokens": 24, "seed": 3, "extra_body": {"return_token_ids": True, "ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder):
    with forked_server(folder, "--enable-lora") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def complete(client, prompt="Once upon a time", **given):
    return client.completions.create(model=NAME, prompt=prompt, **{**DRAWN, **given})


def with_extra(**fields):
    return {"extra_body": {**DRAWN["extra_body"], **fields}}


def test_the_model_is_listed(client, folder):
    [model] = client.models.list().data
    assert (model.id, model.root, model.max_model_len) == (NAME, str(folder), 512)
    assert client.models.retrieve(NAME).id == NAME


def test_text_is_what_the_tokens_say(client, tokenizer):
    answer = complete(client)
    [choice] = answer.choices
    assert choice.prompt_token_ids == tokenizer.encode("Once upon a time")
    assert len(choice.token_ids) == 24
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert (choice.finish_reason, answer.usage.completion_tokens, answer.object) == ("length", 24, "text_completion")
    assert choice.weight_versions == [{"version": "0", "start": 0, "end": 24}]


PROMPTS = {
    "text": ("ab", 1),
    "tokens": ([65, 66], 1),
    "texts": (["ab", "cde"], 2),
    "lists of tokens": ([[65, 66], [67]], 2),
}


@pytest.mark.parametrize(("prompt", "count"), PROMPTS.values(), ids=PROMPTS.keys())
def test_prompts_of_every_kind(client, tokenizer, prompt, count):
    answer = complete(client, prompt, n=2)
    one_by_one = [prompt] if count == 1 else prompt
    tokens = [tokenizer.encode(each) if isinstance(each, str) else each for each in one_by_one]
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert [choice.prompt_token_ids for choice in answer.choices] == [each for each in tokens for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(map(len, tokens))


def test_a_prompt_gives_the_same_alone_and_among_others(client):
    alone = [complete(client, prompt, temperature=0).choices[0].token_ids for prompt in ("ab", "cde")]
    together = complete(client, ["ab", "cde"], temperature=0)
    assert [choice.token_ids for choice in together.choices] == alone


def test_samples_of_one_seed_differ_and_repeat(client):
    first, again = (complete(client, n=3) for _ in range(2))
    texts = [choice.token_ids for choice in first.choices]
    assert [choice.token_ids for choice in again.choices] == texts
    assert len({tuple(text) for text in texts}) == 3


def test_logprobs_of_completions(client):
    [choice] = complete(client, logprobs=1, **with_extra(return_tokens_as_token_ids=True)).choices
    described = choice.logprobs
    assert described.tokens == [f"token_id:{token_id}" for token_id in choice.token_ids]
    assert described.top_logprobs == [
        {token: value} for token, value in zip(described.tokens, described.token_logprobs, strict=True)
    ]
    assert all(value <= 0 for value in described.token_logprobs)
    assert described.text_offset[:2] == [0, len(described.tokens[0])]


def test_the_prompt_is_scored_for_each_of_its_samples(client):
    answer = complete(client, [[65, 66, 67], [68, 69]], n=2, max_tokens=1, **with_extra(prompt_logprobs=0))
    first, second, third, fourth = (choice.prompt_logprobs for choice in answer.choices)
    assert first == second and third == fourth
    assert [entry and list(entry) for entry in first] == [None, ["66"], ["67"]]
    assert [entry and list(entry) for entry in third] == [None, ["69"]]


def printable_stop(text):
    """Two characters from the middle of a text."""
    places = [place for place in range(3, len(text) - 1) if "�" not in text[place : place + 2]]
    return text[places[0] : places[0] + 2]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kept", [False, True], ids=["cut", "kept"])
def test_a_stop_string_ends_the_text(client, tokenizer, stream, kept):
    free = complete(client).choices[0]
    stop = printable_stop(free.text)
    given = {"stop": [stop, "never there"], **with_extra(include_stop_str_in_output=kept)}
    if stream:
        chunks = [chunk.choices[0] for chunk in complete(client, stream=True, **given)]
        text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
        tokens = [token_id for chunk in chunks for token_id in chunk.token_ids]
    else:
        last = complete(client, **given).choices[0]
        text, tokens = last.text, last.token_ids
    assert text == free.text[: free.text.index(stop)] + (stop if kept else "")
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert tokens == free.token_ids[: len(tokens)]
    assert tokenizer.decode(tokens, skip_special_tokens=True).endswith(stop)


def test_a_completion_that_was_stopped_leaves_nothing_behind(client, server):
    stop = printable_stop(complete(client).choices[0].text)
    for _ in range(2):  # the same id, at once
        answer = complete(client, stop=stop, max_tokens=400, **with_extra(request_id="again"))
        assert answer.choices[0].finish_reason == "stop"
        load = httpx.get(f"{server.url}/load", timeout=HANG_S, trust_env=False).json()
        assert (load["running"], load["waiting"]) == (0, 0)


def test_a_stream_of_several_samples(client):
    whole = complete(client, n=2)
    texts, reasons = ["", ""], [None, None]
    *chunks, last = complete(client, n=2, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert last.choices == [] and last.usage.completion_tokens == 48


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def chat(client, **given):
    return client.chat.completions.create(model=NAME, messages=MESSAGES, **{**DRAWN, **given})


def test_chat_uses_the_models_template(client, tokenizer):
    answer = chat(client, logprobs=True)
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert answer.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert len(choice.logprobs.content) == len(choice.token_ids) == 24
    assert complete(client, answer.prompt_token_ids).choices[0].token_ids == choice.token_ids


def test_a_streamed_chat(client):
    whole = chat(client, n=2)
    chunks = list(chat(client, n=2, stream=True, max_tokens=None, max_completion_tokens=24))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_message_is_continued(client, tokenizer):
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}],
        max_tokens=1,
        extra_body={"add_generation_prompt": False, "continue_final_message": True, "return_token_ids": True},
    )
    assert tokenizer.decode(answer.prompt_token_ids).endswith("<|assistant|>Well")


def test_many_requests_of_the_asynchronous_client(server):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(seed):
                stream = await client.completions.create(
                    model=NAME, prompt="Once", stream=True, **{**DRAWN, "seed": seed}
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            whole = [
                client.completions.create(model=NAME, prompt="Once", **{**DRAWN, "seed": seed}) for seed in range(16)
            ]
            streamed, answers = await asyncio.gather(
                asyncio.gather(*(one(seed) for seed in range(16))), asyncio.gather(*whole)
            )
            return streamed, [answer.choices[0].text for answer in answers]

    streamed, whole = asyncio.run(all_of_them())
    assert streamed == whole
    assert len(set(whole)) == 16


def test_adapters_are_models(client, server, folder, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    body = {"lora_name": "tuned", "lora_path": str(tmp_path / "adapter")}
    before = complete(client, temperature=0).choices[0].token_ids
    with server.client() as http:
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 400
        assert http.post("/v1/load_lora_adapter", json={**body, "load_inplace": True}).status_code == 200
        missing = {"lora_name": "other", "lora_path": str(tmp_path / "nowhere")}
        assert http.post("/v1/load_lora_adapter", json=missing).status_code == 404
        assert [(card.id, card.parent) for card in client.models.list().data] == [(NAME, None), ("tuned", NAME)]
        tuned = client.completions.create(model="tuned", prompt="Once upon a time", **{**DRAWN, "temperature": 0})
        assert tuned.model == "tuned"
        assert tuned.choices[0].token_ids != before
        assert complete(client, temperature=0).choices[0].token_ids == before
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"}).status_code == 404
    with pytest.raises(openai.NotFoundError, match="tuned"):
        client.completions.create(model="tuned", prompt="Once")
