"""One step of the model (chunks in, logits and tokens out), and the thread that runs steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np
import torch
import torch.fx.experimental._config as shape_settings
from numpy.typing import NDArray
from torch import Tensor

from roost.engines.protocol import Ids, Sampling
from roost.torch_engine.attention import Attention, BySequence, DecodeTogether, Paged, Tables
from roost.torch_engine.model import DecodeGraphs, LoadedModel, forward
from roost.torch_engine.scheduler import Batch, Chunk, Gathered, Ints, LayerCache, RoutingTable, Tracked, flatten
from roost.torch_engine.update import Adapters
from roost.vision.tower import FeatureCache

NEVER = float("-inf")
LARGEST_MASK = 1024  # token ids; a larger sampling mask is not returned, because it would be most of a response


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, with its log-prob under the distribution it was sampled from."""

    token_ids: list[int]
    logprobs: list[float]
    masks: dict[int, Ids] = field(default_factory=dict)  # by row; empty if larger than LARGEST_MASK


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the rows of a batch, on its device; None where no row needs them."""

    is_greedy: Tensor | None
    all_greedy: bool
    temperatures: Tensor | None
    min_p: tuple[Tensor, Tensor] | None  # rows, and the log of their min-p
    top: TopFilter | None
    masked: Tensor | None  # rows that return their sampling mask

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> SamplingBatch:
        greedy = [sampling.is_greedy for sampling in samplings]
        temperatures = [1.0 if sampling.is_greedy else sampling.temperature for sampling in samplings]
        min_p = {row: each.min_p for row, each in enumerate(samplings) if not greedy[row] and each.min_p > 0.0}
        top = {
            row: each for row, each in enumerate(samplings) if not greedy[row] and (each.top_k > 0 or each.top_p < 1.0)
        }

        masked = [row for row, each in enumerate(samplings) if each.wants_mask]

        def tensor(values: Iterable[float], dtype: torch.dtype | None = None) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            is_greedy=tensor(greedy) if any(greedy) else None,
            all_greedy=all(greedy),
            temperatures=tensor(temperatures) if any(each != 1.0 for each in temperatures) else None,
            min_p=(tensor(min_p), tensor(min_p.values()).log()) if min_p else None,
            top=None
            if not top
            else TopFilter(
                rows=tensor(top),
                counts=tensor(each.top_k for each in top.values()),
                most=0 if any(each.top_k == 0 for each in top.values()) else max(each.top_k for each in top.values()),
                shares=tensor((each.top_p for each in top.values()), torch.float64)
                if any(each.top_p < 1.0 for each in top.values())
                else None,
            ),
            masked=tensor(masked) if masked else None,
        )


@dataclass(frozen=True, slots=True)
class TopFilter:
    """Rows that use top-k or top-p, and their parameters."""

    rows: Tensor
    counts: Tensor  # top-k; 0 keeps all
    most: int  # largest top-k; 0 if a row keeps all
    shares: Tensor | None  # top-p


def sample(logits: Tensor, batch: SamplingBatch, uniforms: NDArray[np.float64]) -> SampledTokens:
    """Sample one token per row. Temperature 0 is greedy, with the log-prob under the model's distribution."""
    logits = logits.float()
    if batch.all_greedy:
        return _with_logprobs(logits, logits.argmax(-1))
    if batch.temperatures is not None:
        logits = logits / batch.temperatures[:, None]
    logits = _filtered(logits, batch)
    tokens = _inverse_transform(logits, torch.from_numpy(uniforms).to(logits.device))
    if batch.is_greedy is not None:
        tokens = torch.where(batch.is_greedy, logits.argmax(-1), tokens)
    sampled = _with_logprobs(logits, tokens)
    return sampled if batch.masked is None else replace(sampled, masks=_masks(logits, batch.masked))


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of one token per row, without computing all log-probs."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _with_logprobs(logits: Tensor, tokens: Tensor) -> SampledTokens:
    return SampledTokens(tokens.tolist(), chosen_logprobs(logits, tokens).tolist())


def _masks(logits: Tensor, rows: Tensor) -> dict[int, Ids]:
    """Token ids that the filters left, by row."""
    is_kept = logits[rows] > NEVER
    is_kept &= is_kept.sum(-1, keepdim=True) <= LARGEST_MASK
    ends = is_kept.sum(-1).cumsum(0).cpu().numpy()[:-1]
    ids = is_kept.nonzero()[:, 1].int().cpu().numpy()
    return dict(zip(rows.tolist(), np.split(ids, ends), strict=True))


def _inverse_transform(logits: Tensor, uniforms: Tensor) -> Tensor:
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


def _filtered(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits after min-p, top-k and top-p, in this order, for the rows that use them."""
    if batch.min_p is not None:
        rows, floor = batch.min_p
        part = logits[rows]
        below = part < part.amax(-1, keepdim=True) + floor[:, None]
        logits = logits.index_copy(0, rows, part.masked_fill_(below, NEVER))
    if batch.top is not None:
        part = logits[batch.top.rows]
        below = part < _thresholds(part, batch.top)[:, None]
        logits = logits.index_copy(0, batch.top.rows, part.masked_fill_(below, NEVER))
    return logits


def _thresholds(logits: Tensor, top: TopFilter) -> Tensor:
    """Smallest logit per row that top-k and then top-p keep; ties are kept."""
    vocabulary = logits.shape[-1]
    ordered = logits.topk(min(top.most, vocabulary) or vocabulary, -1).values
    counts = top.counts.clamp(max=vocabulary)
    least = ordered.gather(-1, torch.where(counts == 0, vocabulary, counts)[:, None] - 1)
    if top.shares is None:
        return least.squeeze(-1)
    # Top-k keeps ties with its last token; those in `ordered` also count for top-p.
    ordered = ordered.masked_fill(ordered < least, NEVER)
    cumulative = ordered.softmax(-1).cumsum(-1, dtype=torch.float64)
    # A token is kept if the cumulative probability before it is below top_p; the first always is.
    kept = (cumulative < top.shares[:, None]).sum(-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
    return torch.maximum(ordered.gather(-1, kept), least).squeeze(-1)


STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, which spreads adjacent indices
MASK = (1 << 64) - 1


def seed_keys(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Keys of random streams from the seeds of requests."""
    return _mixed(np.array([seed & MASK for seed in seeds], np.uint64) + STRIDE)


def uniforms(keys: NDArray[np.uint64], indices: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from stream keys and token indices.

    >>> bool(uniforms(seed_keys([7, 5]), [0, 3])[1] == uniforms(seed_keys([5]), [3])[0])
    True
    """
    # Mixed a second time, so that adjacent seeds do not give shifted copies of one stream.
    bits = _mixed(keys + (np.array(indices, np.uint64) + np.uint64(1)) * STRIDE)
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
        pages: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._pages = pages
        self._graphs = graphs
        self._features = None if model.processor is None else FeatureCache(model.module.base_model, model.processor)
        self.routing: RoutingTable | None = None  # set by the engine once routed experts are requested

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], cache: Sequence[LayerCache]) -> Tensor:
        """Logits of the rows that need them, in chunk order."""
        batch, device = flatten(chunks, self._block_size), self._model.device
        adapters = [chunk.tracked.request.adapter for chunk in chunks]
        self._adapters.select(adapters, [chunk.size for chunk in chunks], device)
        is_decode = len(batch.token_ids) == len(chunks) == len(batch.rows)
        # Adapters hook into layers, which would be compiled again for every combination of adapters.
        is_eager = self._model.is_compiled and self._adapters.names
        stance = torch.compiler.set_stance("force_eager") if is_eager else nullcontext()
        # Else torch.compile takes a first prompt as long as a dimension of the model for that, and recompiles later.
        with stance, shape_settings.patch(use_duck_shape=False):
            if self._graphs is not None and is_decode and len(set(adapters)) == 1:
                logits, experts = self._graphs.run(batch, cache, adapters[0])
                self._keep_routing(batch, experts)
                return logits
            token_ids = torch.from_numpy(batch.token_ids).to(device)
            positions, embeddings = self._with_images(chunks, batch, token_ids)
            logits = forward(
                self._model.module,
                token_ids,
                torch.from_numpy(positions).to(device),
                torch.from_numpy(batch.rows).to(device),
                self._attention(chunks, batch, cache),
                embeddings,
            )
        if self._model.routers is not None:
            self._keep_routing(batch, self._model.routers.chosen())
        if device.type == "cpu":
            _prepare_decode(chunks)
        return logits

    def _with_images(self, chunks: Sequence[Chunk], batch: Batch, token_ids: Tensor) -> tuple[Ints, Tensor | None]:
        """Positions of a batch's tokens, three each if prompts have images, and embeddings if it has image tokens."""
        if self._features is None or all(chunk.tracked.layout is None for chunk in chunks):
            return batch.positions, None
        positions = np.repeat(batch.positions[None], 3, axis=0)
        embeddings: Tensor | None = None
        for chunk, first in zip(chunks, batch.starts.tolist(), strict=False):
            layout = chunk.tracked.layout
            if layout is None:
                continue
            positions[:, first : first + chunk.size] = layout.at(chunk.start, chunk.end)
            for image, span in layout.images:
                start, end = max(span.start, chunk.start), min(span.stop, chunk.end)
                if start < end:
                    if embeddings is None:
                        embeddings = self._model.module.get_input_embeddings()(token_ids)
                    features = self._features.get(image)[start - span.start : end - span.start]
                    embeddings[first + start - chunk.start : first + end - chunk.start] = features
        return positions, embeddings

    def forget_images(self) -> None:
        """Drop cached image embeddings, because the weights have changed."""
        if self._features is not None:
            self._features.clear()

    def _keep_routing(self, batch: Batch, experts: Tensor | None) -> None:
        if self.routing is not None and experts is not None:
            self.routing.write(batch.slots, experts)

    def drop_graphs(self) -> None:
        """Drop captured CUDA graphs before the memory they refer to is freed."""
        if self._graphs is not None:
            self._graphs.drop()

    def _attention(self, chunks: Sequence[Chunk], batch: Batch, cache: Sequence[LayerCache]) -> Attention:
        if self._model.device.type == "cpu":
            return BySequence(cache, batch, [chunk.tracked.gathered for chunk in chunks])
        if self._pages:
            return Paged(cache, Tables.of(batch, self._model.device), batch)
        return DecodeTogether(cache, batch)


def _prepare_decode(chunks: Sequence[Chunk]) -> None:
    """Enable gathered keys and values for sequences that decode from the next step on."""
    for chunk in chunks:
        if chunk.makes_token and chunk.tracked.gathered is None:
            chunk.tracked.gathered = Gathered()


def without_stops(logits: Tensor, sequences: Sequence[Tracked]) -> Tensor:
    """Logits in which sequences with fewer than `min_tokens` cannot stop."""
    early = [
        (row, token_id)
        for row, each in enumerate(sequences)
        if len(each.logprobs) < each.request.sampling.min_tokens
        for token_id in each.stop_ids
    ]
    if not early:
        return logits
    rows, ids = torch.tensor(early, device=logits.device).unbind(-1)
    return logits.float().index_put((rows, ids), logits.new_tensor(NEVER, dtype=torch.float32))


@dataclass(frozen=True, eq=False, slots=True)
class Penalties:
    """Repetition penalties of the rows of a batch, and the tokens in each row's sequence."""

    factors: Tensor  # [rows, 1]
    seen: Tensor  # [rows, vocabulary]

    @classmethod
    def of(cls, sequences: Sequence[Tracked], vocabulary: int, device: torch.device) -> Penalties | None:
        """None if no sequence has a penalty."""
        factors = [each.request.sampling.repetition_penalty for each in sequences]
        if all(factor == 1.0 for factor in factors):
            return None
        seen = torch.zeros(len(sequences), vocabulary, dtype=torch.bool, device=device)
        for row, each in enumerate(sequences):
            if factors[row] != 1.0:
                seen[row, torch.tensor(each.token_ids, device=device)] = True
        return cls(torch.tensor(factors, device=device)[:, None], seen)

    def applied(self, logits: Tensor) -> Tensor:
        """Logits of seen tokens divided by the factor if positive, else multiplied (Keskar et al., 2019)."""
        logits = logits.float()
        lowered = torch.where(logits > 0, logits / self.factors, logits * self.factors)
        return torch.where(self.seen, lowered, logits)

    def add(self, token_ids: Sequence[int]) -> None:
        self.seen[range(len(token_ids)), list(token_ids)] = True


# A sequence, its next token, the token's log-prob and its sampling mask, if any.
NewToken: TypeAlias = tuple[Tracked, int, float, Ids | None]


class Sampler:
    """Samples next tokens. Sampling parameters stay on the device while consecutive batches have the same sequences."""

    def __init__(self) -> None:
        self._sequences: list[Tracked] = []
        self._batch = SamplingBatch.of([], torch.device("cpu"))
        self._keys = seed_keys([])
        self._penalties: Penalties | None = None

    @torch.inference_mode()
    def next_tokens(self, chunks: Sequence[Chunk], logits: Tensor) -> Iterable[NewToken]:
        """Sample a token for every sequence that is computed to its end; rows of logits are in chunk order."""
        sequences: list[Tracked] = []
        rows: list[int] = []
        row = 0
        for chunk in chunks:
            if chunk.tracked.is_scored:
                _score(chunk, logits[row : row + chunk.size])
                row += chunk.size
            elif chunk.makes_token:
                row += 1
            if chunk.makes_token:
                sequences.append(chunk.tracked)
                rows.append(row - 1)
        if not sequences:
            return []
        if sequences != self._sequences:
            self._sequences = sequences
            self._batch = SamplingBatch.of([each.request.sampling for each in sequences], logits.device)
            self._keys = seed_keys([each.seed for each in sequences])
            self._penalties = Penalties.of(sequences, logits.shape[-1], logits.device)
        numbers = uniforms(self._keys, [len(each.logprobs) for each in sequences])
        logits = without_stops(logits if len(rows) == len(logits) else logits[rows], sequences)
        if self._penalties is not None:
            logits = self._penalties.applied(logits)
        sampled = sample(logits, self._batch, numbers)
        if self._penalties is not None:
            self._penalties.add(sampled.token_ids)
        masks = map(sampled.masks.get, range(len(sequences)))
        return zip(sequences, sampled.token_ids, sampled.logprobs, masks, strict=True)


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
