"""The built-in engine sees images as transformers does, whatever else is in its batch or its prefix cache."""

import asyncio
import threading

import httpx
import pytest
import torch

from roost.engines.protocol import InFlight, Sampling
from roost.rollout.colours import QUESTION, VOCABULARY, square
from roost.torch_engine.engine import EngineSettings, TorchEngine
from roost.torch_engine.requests import GenerateRequest, InFlightRequests
from roost.vision.image import Image
from roost.vision.processor import FAMILIES, Processor
from tests.learner.random_samples import CPU, settings_of
from tests.limits import HANG_S
from tests.torch_engine.conftest import Driver
from tests.torch_engine.running_server import forked_server
from tests.vision.shown import IMAGE, completed, plain_logprobs, sample, samples

LIMITS = [
    pytest.param({}, id="roomy"),
    pytest.param({"max_batch_tokens": 3}, id="images in chunks"),
    pytest.param({"block_size": 4, "kv_bytes": 9 * 4 * 512}, id="few blocks: requests are preempted"),
]


def started(folder, **limits):
    given = {"kv_bytes": 1 << 20, **limits}
    return Driver(TorchEngine(EngineSettings(str(folder), device="cpu", dtype="float32", **given)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", LIMITS)
def test_log_probs_are_those_of_transformers(folders, family, limits):
    folder = folders[family]
    driver, processor = started(folder, **limits), Processor.of_model(str(folder))
    prompts = samples(processor)
    answers = [
        driver.ask(one.token_ids.tolist(), Sampling(max_tokens=6, seed=1, ignore_eos=True, images=one.images))
        for one in prompts
    ]
    for one, answer in zip(prompts, answers, strict=True):
        whole = completed(one, answer.all().token_ids)
        with torch.no_grad():
            wanted = plain_logprobs(folder, whole)[len(one) - 1 :]
        assert answer.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
    driver.engine.close()


def test_engine_and_learner_agree(folders):
    from roost.learner.learner import Learner

    folder = folders["qwen2_5_vl"]
    driver, processor = started(folder), Processor.of_model(str(folder))
    learner = Learner(settings_of(str(folder)), CPU)
    for one in samples(processor):
        answer = driver.ask(one.token_ids.tolist(), Sampling(max_tokens=5, seed=2, images=one.images)).all()
        found = learner.score([completed(one, answer.token_ids)])[0][len(one) :]
        assert answer.logprobs == pytest.approx(found.tolist(), abs=1e-4)
    driver.engine.close()


def test_the_prefix_cache_tells_images_apart(folders):
    """Two prompts of the same tokens with other images: the second must not get the first one's blocks."""
    folder = folders["qwen2_5_vl"]
    processor = Processor.of_model(str(folder))
    red, blue = (sample(processor, [[0, 6, *IMAGE, 10, 11, 12]], [square(name, 1)]) for name in ("red", "blue"))
    assert red.token_ids.tolist() == blue.token_ids.tolist()
    greedy = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    alone = []
    for one in (red, blue):
        driver = started(folder, block_size=2)
        alone.append(driver.ask(one.token_ids.tolist(), with_images(greedy, one)).all().logprobs)
        driver.engine.close()
    driver = started(folder, block_size=2)
    after = [driver.ask(one.token_ids.tolist(), with_images(greedy, one)).all() for one in (red, blue, red)]
    assert [each.logprobs for each in after] == [pytest.approx(each, abs=1e-5) for each in (*alone, alone[0])]
    assert alone[0] != pytest.approx(alone[1], abs=1e-3)
    cached = [each.taken[0].cached_tokens for each in after]
    assert cached[1] == 2, "the text before the image is shared"
    assert cached[2] > 2 + 4, "the image's own tokens are, by a request with the same image"
    driver.engine.close()


def with_images(sampling, one):
    from dataclasses import replace

    return replace(sampling, images=one.images)


def test_new_weights_see_an_image_anew(folders):
    folder = folders["qwen2_5_vl"]
    driver, processor = started(folder), Processor.of_model(str(folder))
    one = samples(processor)[0]
    greedy = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, images=one.images)
    before = driver.ask(one.token_ids.tolist(), greedy).all().logprobs

    def change():
        for name, weight in driver.engine.named_weights().items():
            if "visual" in name:
                weight.mul_(3.0)
        driver.engine.weights_replaced(1)

    driver.engine.between_steps(change)
    assert driver.ask(one.token_ids.tolist(), greedy).all().logprobs != pytest.approx(before, abs=1e-4)
    driver.engine.close()


@pytest.mark.parametrize(
    ("start", "edge", "message"),
    [
        pytest.param(2, 16, "are not all", id="no placeholders there"),
        pytest.param(3, 24, "has tokens 3 to 12 of 10", id="an image with more tokens"),
        pytest.param(9, 16, "has tokens 9 to 13 of 10", id="after the end"),
    ],
)
def test_images_without_their_tokens_are_refused(folders, start, edge, message):
    folder = folders["qwen2_5_vl"]
    driver, processor = started(folder), Processor.of_model(str(folder))
    ids, _ = processor.expand([0, 6, *IMAGE, 10, 11], [square("red", 1)])
    with pytest.raises(ValueError, match=message):
        driver.ask(ids, Sampling(images=(Image(square("red", 1, edge), start),)))
    driver.engine.close()


def request_of(engine, max_tokens):
    """A request of two samples with an image."""
    ids, images = engine.model.processor.expand([0, 6, *IMAGE, 10, 11], [square("red", 1)])
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, images=images)
    return GenerateRequest("a", (tuple(ids),), (sampling,), samples=2)


async def served(engine, max_tokens):
    async with InFlightRequests(engine).served(request_of(engine, max_tokens), each_piece=False) as in_flight:
        return await in_flight.finished()


def test_images_are_not_processed_on_the_event_loop(folders, monkeypatch):
    engine, threads = started(folders["qwen2_5_vl"]).engine, []
    layout = engine.model.processor.layout

    def on_thread(*given):
        threads.append(threading.get_ident())
        return layout(*given)

    monkeypatch.setattr(engine.model.processor, "layout", on_thread)
    assert len(asyncio.run(served(engine, 2))) == 2
    assert len(threads) == 2 and threading.get_ident() not in threads
    engine.close()


def test_a_request_that_is_cancelled_while_its_images_are_processed_is_aborted(folders, monkeypatch):
    engine, entered, released = started(folders["qwen2_5_vl"]).engine, threading.Event(), threading.Event()
    layout = engine.model.processor.layout

    def held(*given):
        entered.set()
        assert released.wait(HANG_S)
        return layout(*given)

    monkeypatch.setattr(engine.model.processor, "layout", held)

    async def cancelled():
        asked = asyncio.create_task(served(engine, 100_000))
        assert await asyncio.to_thread(entered.wait, HANG_S)
        asked.cancel()
        asyncio.get_running_loop().call_later(0.05, released.set)
        await asked

    engine.pause(InFlight.HOLD)  # no completion may end by itself
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert engine.abort() == 0
    engine.close()


def test_chat_requests_with_images(folders):
    """The tokens of a chat with an image are those of the processor, and the token route answers the same."""
    folder = folders["qwen2_5_vl"]
    red = square("red", 1)
    text = {"type": "text", "text": QUESTION}
    content = [{"type": "image_url", "image_url": {"url": Image(red).data_url}}, text]
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    with forked_server(folder) as server, server.client() as client:
        answer = posted(client, "/v1/chat/completions", {**chat, "return_token_ids": True})
        ids = answer["prompt_token_ids"]
        start = ids.index(VOCABULARY["<|image_pad|>"])
        assert ids.count(VOCABULARY["<|image_pad|>"]) == 4
        body = {
            "token_ids": ids,
            "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 0},
            "images": [{"url": Image(red).data_url, "start": start}],
        }
        [by_tokens] = posted(client, "/inference/v1/generate", body)["choices"]
        assert by_tokens["token_ids"] == answer["choices"][0]["token_ids"]
        for wrong, message in (
            ("https://example.com/a.png", "data:image"),
            ("data:image/png;base64,AAAA", "not an image"),
        ):
            content[0]["image_url"]["url"] = wrong
            reply = client.post("/v1/chat/completions", json=chat)
            assert reply.status_code == 400
            assert message in reply.text


def posted(client: httpx.Client, path, body):
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()
