"""Routed experts: those that transformers' routers choose, also for tokens that come from the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roost.engines.protocol import Finish, Sampling
from tests.torch_engine.test_against_transformers import prompts

ROUTED = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True, return_routed_experts=True)


def chosen(model: Any, token_ids: list[int]) -> np.ndarray:
    """Experts that transformers' model chooses, [tokens, layers, top_k]."""
    found: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: found.append(output[2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"max_batch_tokens": 24, "max_sequences": 6}, id="prompts in chunks"),
        pytest.param({"block_size": 4, "kv_bytes": 45 * 4 * 512}, id="few blocks"),
    ],
)
def test_experts_of_prompt_and_completion(start: Any, reference: Any, family: str, limits: dict[str, int]) -> None:
    driver, model = start(family, **limits), reference(family)
    plain = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    driver.ask_all(prompts(0), plain)  # in the cache, but without experts
    for _ in range(2):  # the second time from the cache
        for prompt, answer in zip(prompts(0), driver.ask_all(prompts(0), ROUTED), strict=True):
            routing = answer.taken[-1].routing
            assert routing is not None and routing.dtype == np.uint8
            np.testing.assert_array_equal(routing, chosen(model, prompt + answer.token_ids)[:-1])
            assert all(step.routing is None for step in answer.taken[:-1])


def test_an_aborted_request_has_the_experts_of_its_tokens(start: Any, reference: Any) -> None:
    driver = start("qwen3_moe")
    prompt = prompts(0, (20,))[0]
    answer = driver.ask(prompt, Sampling(max_tokens=400, temperature=0.0, ignore_eos=True, return_routed_experts=True))
    for _ in range(3):
        answer.next()
    driver.engine.abort()
    assert answer.all().finish is Finish.ABORT
    routing, tokens = answer.taken[-1].routing, prompt + answer.token_ids
    assert routing is not None and len(routing) == len(tokens) - 1
    np.testing.assert_array_equal(routing, chosen(reference("qwen3_moe"), tokens)[:-1])


def test_a_dense_model_has_none(start: Any) -> None:
    driver = start("qwen2")
    with pytest.raises(ValueError, match="no routers"):
        driver.ask([1, 2], ROUTED)
