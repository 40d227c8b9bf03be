"""Requests with images to vLLM, and the image of probes. Real servers are in tests/engines/live."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from roost.engines.protocol import EngineError, EngineRefused, Sampling
from roost.engines.vllm import VllmEngine
from roost.engines.weights.probe import CLEARLY, Probe, probe_tokens, probe_with_image
from roost.learner.learner import Learner
from roost.learner.sample import Sample
from roost.vision.image import Image
from tests.engines.vllm_standin import BUILT_IN, NEW, OLD, running_standin
from tests.learner.random_samples import CPU, settings_of

PROMPT = [5, 9, 9, 9, 6, 9, 9, 9, 7, 9]  # two images, and a placeholder that the policy wrote
IMAGES = (Image(b"one", 1), Image(b"two", 5))
ROUTE = "/inference/v1/generate"


def asked(prompt, images, routes=NEW, version=0, **state_of_server):
    """Body of the request that a prompt with images becomes."""

    async def ask(url, state):
        engine = VllmEngine(url)
        try:
            for name, value in state_of_server.items():
                setattr(state, name, value)
            await engine.set_version(version)
            await engine.generate(prompt, Sampling(images=images))
            return state.bodies_of(ROUTE)[-1]
        finally:
            await engine.close()

    with running_standin(routes) as (url, state):
        return asyncio.run(ask(url, state))


def test_vllm_gets_one_placeholder_for_each_image():
    body = asked(PROMPT, IMAGES, version=3)
    assert body["token_ids"] == [5, 9, 6, 9, 7, 9]
    parts = [{"type": "image_url", "url": each.data_url, "uuid": f"{each.digest.hex()}-3-1"} for each in IMAGES]
    assert body["content_parts"] == parts
    assert "images" not in body


def test_images_have_other_names_after_the_same_version_is_loaded_again():
    """Features of images that wrong weights of a version computed are not reused after a reload of that version."""

    async def ask(url, state):
        engine = VllmEngine(url)
        try:
            for _ in range(2):
                await engine.load_checkpoint("/models/policy", 3)
                await engine.generate(PROMPT, Sampling(images=IMAGES))
            asked = [body["content_parts"] for body in state.bodies_of(ROUTE) if "content_parts" in body]
            return [[part["uuid"] for part in parts] for parts in asked]
        finally:
            await engine.close()

    with running_standin(NEW) as (url, state):
        first, again = asyncio.run(ask(url, state))
    assert not set(first) & set(again)


def test_the_built_in_engine_gets_all_tokens():
    body = asked(PROMPT, IMAGES, BUILT_IN)
    assert body["token_ids"] == PROMPT
    assert [each["start"] for each in body["images"]] == [1, 5]


def test_a_server_that_computes_another_prompt_is_an_error():
    with pytest.raises(EngineError, match="a prompt of 12 tokens where 10 tokens with images were sent"):
        asked(PROMPT, IMAGES, image_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "starts", "routes", "reason"),
    [
        pytest.param([9, 6, 9, 9, 9], [2], NEW, r"token 0 is an image placeholder \(9\)", id="before the first"),
        pytest.param([5, 9, 9, 9, 6, 9, 6, 9], [1, 7], NEW, "token 5 is an image placeholder", id="between two"),
        pytest.param([5, 9, 9, 9], [1], OLD, "takes no images with token ids", id="older release"),
    ],
)
def test_images_that_vllm_would_not_show_in_place_are_refused(prompt, starts, routes, reason):
    with pytest.raises(EngineRefused, match=reason):
        asked(prompt, tuple(Image(b"one", start) for start in starts), routes)


def test_a_probe_with_an_image_depends_on_the_vision_tower(folders):
    learner = Learner(settings_of(str(folders["qwen2_5_vl"])), CPU)
    vocabulary = learner.module.config.get_text_config().vocab_size
    tokens, images = probe_with_image(probe_tokens(vocabulary), learner.vision)

    def answers(ids, shown):
        [found] = learner.score([replace(Sample.of_policy(np.array(ids)), images=shown)], temperature=1.0)
        return tuple(found[1:].tolist())

    plain = Probe(probe_tokens(vocabulary), answers(probe_tokens(vocabulary), ()), 0.0)
    probe = Probe(tokens, answers(tokens, images), 0.0, images)
    with torch.no_grad():
        for name, weight in learner.module.named_parameters():
            if "visual" in name:
                weight.mul_(1.5)
    assert plain.difference(answers(plain.token_ids, ())) == 0.0
    assert probe.difference(answers(tokens, images)) > CLEARLY
