"""The compared ways to generate: the built-in engine, and those of transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from roost.engines.protocol import Sampling
from roost.torch_engine.engine import Progress, Request, TorchEngine

Way: TypeAlias = Callable[[], list[list[int]]]
ROOM = 2048  # tokens that one request may have
PAGE = 64


@dataclass(frozen=True)
class Task:
    """One request: its prompt and the number of tokens to generate."""

    prompt: tuple[int, ...]
    answer: int


def by_engine(engine: TorchEngine, tasks: Sequence[Task]) -> list[list[int]]:
    """All requests at once; nothing is left over from the round before."""
    engine.reset_prefix_cache()
    answers: list[list[int]] = [[] for _ in tasks]
    left, all_done = [len(tasks)], threading.Event()

    def listener(answer: list[int]) -> Callable[[Progress], None]:
        def listen(progress: Progress) -> None:
            answer.extend(progress.token_ids)
            if progress.finish is not None:
                left[0] -= 1
                if left[0] == 0:
                    all_done.set()

        return listen

    for place, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
        sampling = Sampling(max_tokens=task.answer, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(place), task.prompt, sampling), listener(answer))
    all_done.wait()
    if engine.failure is not None:
        raise engine.failure
    return answers


def generate_ways(module: Any, tasks: Sequence[Task], sizes: Sequence[int]) -> dict[str, Way]:
    """transformers' `generate`, which runs a batch until its longest answer is done."""

    def batches(size: int) -> Way:
        return lambda: by_generate(module, tasks, size)

    return {f"generate, batches of {size}" if size > 1 else "generate, one by one": batches(size) for size in sizes}


@torch.inference_mode()
def by_generate(module: Any, tasks: Sequence[Task], size: int) -> list[list[int]]:
    """Left-padded batches of prompts of similar length; the lengths of answers are not known in advance."""
    order = sorted(range(len(tasks)), key=lambda place: len(tasks[place].prompt))
    answers: list[list[int]] = [[] for _ in tasks]
    for first in range(0, len(order), size):
        places = order[first : first + size]
        width = max(len(tasks[place].prompt) for place in places)
        ids = torch.zeros(len(places), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(places):
            prompt = tasks[place].prompt
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(tasks[place].answer for place in places)
        made = module.generate(
            ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        for row, place in enumerate(places):
            answers[place] = made[row, width : width + tasks[place].answer].tolist()
    return answers


def by_continuous_batching(module: Any, tasks: Sequence[Task], max_batch_tokens: int) -> list[list[int]]:
    """transformers' own continuous batching, with as much room as it can use."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = GenerationConfig(max_new_tokens=ROOM, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=len(tasks) * ROOM // PAGE, max_batch_tokens=max_batch_tokens, use_cuda_graph=False
    )
    answers: list[list[int]] = [[] for _ in tasks]
    with module.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, warmup=False
    ) as manager:
        for place, task in enumerate(tasks):
            manager.add_request(list(task.prompt), request_id=str(place), max_new_tokens=task.answer)
        left = len(tasks)
        while left:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[int(result.request_id)] = list(result.generated_tokens)
                left -= 1
    return answers
