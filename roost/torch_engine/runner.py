"""One step of the model (chunks in, logits and tokens out), and the thread that runs steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.engines.protocol import Sampling
from roost.torch_engine.attention import Attention, BySequence, DecodeTogether, Flash, Tables
from roost.torch_engine.cache import Gathered, LayerCache
from roost.torch_engine.graphs import DecodeGraphs
from roost.torch_engine.model import LoadedModel, forward
from roost.torch_engine.scheduler import Batch, Chunk, Tracked, flatten
from roost.torch_engine.update import Adapters

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, with its log-prob under the distribution it was sampled from."""

    token_ids: list[int]
    logprobs: list[float]


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: NDArray[np.float64]) -> SampledTokens:
    """Sample one token per row. Temperature 0 is greedy, with the log-prob under the model's distribution."""
    logits = logits.float()
    greedy = [sampling.is_greedy for sampling in samplings]
    if all(greedy):
        tokens = logits.argmax(-1)
        return _with_logprobs(logits, tokens)
    device = logits.device
    temperatures = [1.0 if sampling.is_greedy else sampling.temperature for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=device)[:, None]
    logits = _filtered(logits, samplings)
    tokens = _inverse(logits, torch.from_numpy(uniforms).to(device))
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=device), logits.argmax(-1), tokens)
    return _with_logprobs(logits, tokens)


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of one token per row, without computing all log-probs."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _with_logprobs(logits: Tensor, tokens: Tensor) -> SampledTokens:
    return SampledTokens(tokens.tolist(), chosen_logprobs(logits, tokens).tolist())


def _inverse(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling, in double precision, because a vocabulary has a long tail."""
    probabilities = logits.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Rounding must not move the target past the last token.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    # A parallel cumsum may decrease by a rounding error and stop at a token that was filtered out.
    is_possible = probabilities.gather(-1, tokens[:, None]).squeeze(-1) > 0
    return torch.where(is_possible, tokens, logits.argmax(-1))


def _filtered(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits after min-p, top-k and top-p, in this order, for the rows that use them."""
    rows = [row for row, each in enumerate(samplings) if not each.is_greedy and each.min_p > 0.0]
    if rows:
        part = logits[rows]
        floor = torch.tensor([samplings[row].min_p for row in rows], device=logits.device).log()
        below = part < part.amax(-1, keepdim=True) + floor[:, None]
        logits = logits.index_copy(0, _index(rows, logits), part.masked_fill_(below, NEVER))
    rows = [row for row, each in enumerate(samplings) if not each.is_greedy and (each.top_k > 0 or each.top_p < 1.0)]
    if rows:
        part = logits[rows]
        below = part < _thresholds(part, [samplings[row] for row in rows])[:, None]
        logits = logits.index_copy(0, _index(rows, logits), part.masked_fill_(below, NEVER))
    return logits


def _thresholds(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Smallest logit per row that top-k and then top-p keep; ties are kept."""
    vocabulary = logits.shape[-1]
    counts = [min(each.top_k, vocabulary) or vocabulary for each in samplings]
    ordered = logits.topk(max(counts), -1).values
    counts_per_row = torch.tensor(counts, device=logits.device)[:, None]
    least = ordered.gather(-1, counts_per_row - 1)
    if all(each.top_p == 1.0 for each in samplings):
        return least.squeeze(-1)
    # Top-k keeps ties with its last token; those within the table also count for top-p.
    ordered = ordered.masked_fill(ordered < least, NEVER)
    cumulative = ordered.softmax(-1).cumsum(-1, dtype=torch.float64)
    shares = torch.tensor([each.top_p for each in samplings], dtype=torch.float64, device=logits.device)[:, None]
    # A token is kept if the cumulative probability before it is below top_p; the first always is.
    kept = (cumulative < shares).sum(-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
    return torch.maximum(ordered.gather(-1, kept), least).squeeze(-1)


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, which spreads adjacent indices
MASK = (1 << 64) - 1


def uniforms(seeds: list[int], indices: list[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from seeds and token indices.

    >>> bool(uniforms([7, 5], [0, 3])[1] == uniforms([5], [3])[0])
    True
    """
    keys = np.array([seed & MASK for seed in seeds], np.uint64)
    counters = np.array(indices, np.uint64)
    # Mixed twice, so that adjacent seeds do not give shifted copies of one stream.
    bits = _mixed(_mixed(keys + STRIDE) + (counters + np.uint64(1)) * STRIDE)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class Runner:
    """Runs batches of chunks over a key-value cache."""

    def __init__(
        self,
        model: LoadedModel,
        adapters: Adapters,
        block_size: int,
        flashes: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._flashes = flashes
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], cache: Sequence[LayerCache]) -> Tensor:
        """Logits of the rows that need them, in chunk order."""
        batch, device = flatten(chunks, self._block_size), self._model.device
        adapters = [chunk.tracked.request.adapter for chunk in chunks]
        self._adapters.select(adapters, [chunk.size for chunk in chunks], device)
        is_decode = len(batch.token_ids) == len(chunks) == len(batch.rows)
        if self._graphs is not None and is_decode and len(set(adapters)) == 1:
            return self._graphs.run(batch, cache, adapters[0])
        logits = forward(
            self._model.module,
            torch.from_numpy(batch.token_ids).to(device),
            torch.from_numpy(batch.positions).to(device),
            torch.from_numpy(batch.rows).to(device),
            self._attention(chunks, batch, cache),
        )
        if device.type == "cpu":
            _prepare_decode(chunks)
        return logits

    def drop_graphs(self) -> None:
        """Drop captured CUDA graphs before the memory they refer to is freed."""
        if self._graphs is not None:
            self._graphs.drop()

    def _attention(self, chunks: Sequence[Chunk], batch: Batch, cache: Sequence[LayerCache]) -> Attention:
        if self._model.device.type == "cpu":
            return BySequence(cache, batch, [chunk.tracked.gathered for chunk in chunks])
        if not self._flashes:
            return DecodeTogether(cache, batch)
        longest_chunk = int((batch.starts[1:] - batch.starts[:-1]).max())
        return Flash(cache, Tables.of(batch, self._model.device), longest_chunk, int(batch.lengths.max()))


def _prepare_decode(chunks: Sequence[Chunk]) -> None:
    """Enable gathered keys and values for sequences that decode from the next step, when their blocks are filled."""
    for chunk in chunks:
        if chunk.makes_token and chunk.tracked.gathered is None:
            chunk.tracked.gathered = Gathered()


@dataclass(frozen=True, slots=True)
class NewToken:
    """The next token of a sequence."""

    tracked: Tracked
    token_id: int
    logprob: float


@torch.inference_mode()
def next_tokens(chunks: Sequence[Chunk], logits: Tensor) -> list[NewToken]:
    """Sample a token for every sequence that is computed to its end; rows are in chunk order."""
    drawing: list[Tracked] = []
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        if chunk.scored_rows:
            _score(chunk, logits[row : row + chunk.size])
            row += chunk.size
        elif chunk.makes_token:
            row += 1
        if chunk.makes_token:
            drawing.append(chunk.tracked)
            rows.append(row - 1)
    if not drawing:
        return []
    numbers = uniforms([each.seed for each in drawing], [each.generated for each in drawing])
    used = logits if len(rows) == len(logits) else logits[rows]
    drawn = draw(used, [each.request.sampling for each in drawing], numbers)
    return [NewToken(*each) for each in zip(drawing, drawn.token_ids, drawn.logprobs, strict=True)]


def _score(chunk: Chunk, logits: Tensor) -> None:
    """Append the log-probs of the prompt tokens that follow those of the chunk."""
    following = chunk.tracked.token_ids[chunk.start + 1 : chunk.end + 1]
    targets = torch.tensor(following, dtype=torch.int64, device=logits.device)
    chunk.tracked.prompt_logprobs += chosen_logprobs(logits[: len(following)], targets).tolist()


T = TypeVar("T")


class StepThread:
    """Calls `step` until it returns False, and again after every action. An action never runs during a step."""

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        ended: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: BaseException | None = None
        self._step = step
        self._ended = ended  # called once, on the thread, with the exception that ended it, if any
        self._clock = clock
        self._step_began: float | None = None
        self._actions: deque[Callable[[], None]] = deque()
        self._waiting: set[Future[object]] = set()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def step_seconds(self) -> float | None:
        """Seconds the current step has run; None between steps."""
        began = self._step_began  # read once: the step may end meanwhile
        return None if began is None else self._clock() - began

    def post(self, action: Callable[[], None]) -> None:
        """Run an action before the next step, without waiting for it."""
        with self._changed:
            self._check_open()
            self._actions.append(action)
            self._changed.notify()

    def call(self, action: Callable[[], T]) -> T:
        """Run an action before the next step; return its result or raise its error."""
        if threading.current_thread() is self._thread:
            return action()
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.post(answer)
        return self.wait(future)

    def wait(self, future: Future[T]) -> T:
        """Wait for a future that the thread resolves; raise RuntimeError if the thread ends first."""
        with self._changed:
            if not future.done():
                self._check_open()
                self._waiting.add(future)  # type: ignore[arg-type]
        try:
            return future.result()
        finally:
            with self._changed:
                self._waiting.discard(future)

    def stop(self) -> None:
        """Stop the thread after the current step; return when it has ended."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            has_more = False
            while self._wait_for_work(has_more):
                while self._actions:
                    self._actions.popleft()()
                self._step_began = self._clock()
                has_more = self._step()
                self._step_began = None
        except BaseException as error:  # waiting callers must get any error
            self.failure = error
        with self._changed:
            self._is_open = False
            left, self._waiting = self._waiting, set()
        self._ended(self.failure)
        for future in left:
            if not future.done():
                future.set_exception(self._closed())

    def _wait_for_work(self, has_more: bool) -> bool:
        with self._changed:
            while self._is_open and not self._actions and not has_more:
                self._changed.wait()
            return self._is_open

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._closed()

    def _closed(self) -> RuntimeError:
        if self.failure is None:
            return RuntimeError("the engine is closed")
        return RuntimeError(f"the engine died of {type(self.failure).__name__}: {self.failure}")
