"""The engine makes what transformers makes, whatever else is in the batch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roost.engines.protocol import Finish, Sampling

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
LENGTHS = (1, 2, 15, 16, 17, 40, 70, 97)


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(length)] for length in lengths]


def generated(model: Any, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **options
    )
    return made[0, len(prompt) :].tolist()


def scored(model: Any, token_ids: list[int]) -> list[float]:
    """The log-probability of every token but the first."""
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def expected(reference: Any) -> Callable[[str], list[tuple[list[int], list[float]]]]:
    """Greedy tokens of a family after each prompt, and their log-probs."""

    @functools.cache
    def of(family: str) -> list[tuple[list[int], list[float]]]:
        model, found = reference(family), []
        for prompt in prompts(0):
            token_ids = generated(model, prompt, 24, eos_token_id=None)
            found.append((token_ids, scored(model, prompt + token_ids)[len(prompt) - 1 :]))
        return found

    return of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"max_batch_tokens": 24, "max_sequences": 6}, id="prompts in chunks"),
        pytest.param({"block_size": 4, "kv_bytes": 45 * 4 * 512}, id="few blocks"),
    ],
)
def test_greedy_tokens_and_logprobs(start: Any, expected: Any, family: str, limits: dict[str, int]) -> None:
    answers = start(family, **limits).ask_all(prompts(0), Sampling(max_tokens=24, temperature=0.0, ignore_eos=True))
    for (token_ids, logprobs), answer in zip(expected(family), answers, strict=True):
        assert answer.token_ids == token_ids
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert answer.finish is Finish.LENGTH


def test_the_end_token_ends_and_is_part_of_the_answer(start: Any, reference: Any) -> None:
    driver, model = start("qwen2"), reference("qwen2")
    prompt = prompts(1, (20,))[0]
    plain = generated(model, prompt, 12, eos_token_id=None)
    stop = plain[5]
    cut = plain[: plain.index(stop) + 1]
    answer = driver.ask(prompt, Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)).all()
    assert (answer.token_ids, answer.finish) == (cut, Finish.STOP)
    driver.engine.model = _with_eos(driver.engine.model, stop)
    for ignores, expected in ((False, cut), (True, plain)):
        sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=ignores)
        assert driver.ask(prompt, sampling).all().token_ids == expected


def _with_eos(model: Any, token_id: int) -> Any:
    from dataclasses import replace

    return replace(model, eos_ids=frozenset({token_id}))


@pytest.mark.parametrize("rows", [512, 7], ids=["at once", "a few rows a step"])
def test_prompt_logprobs(start: Any, reference: Any, rows: int) -> None:
    driver, model = start("llama", max_logit_rows=rows), reference("llama")
    sampling = Sampling(max_tokens=2, temperature=0.0)
    driver.ask_all(prompts(2), sampling)  # their blocks are there to be found, and must not be
    for prompt, answer in zip(
        prompts(2), driver.ask_all(prompts(2), sampling, wants_prompt_logprobs=True), strict=True
    ):
        assert answer.taken[0].prompt_logprobs == pytest.approx(scored(model, prompt), abs=1e-4)
        assert answer.taken[1].prompt_logprobs is None
        assert answer.taken[0].cached_tokens == 0


def test_completions_end_with_the_context(start: Any) -> None:
    driver = start("qwen2", max_context=40)
    answer = driver.ask(list(range(30)), Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)).all()
    assert (len(answer.token_ids), answer.finish) == (10, Finish.LENGTH)
