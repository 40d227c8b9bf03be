"""Fingerprints of tensors, equal on every device, and probes: fixed tokens with their expected log-probs."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from roost.engines.protocol import Engine, UpdateFailed
from roost.vision.image import Image, png
from roost.vision.processor import Processor

CHUNK = 1 << 22  # words hashed at a time by torch, to need little extra memory
SPREAD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, as a signed number
# Finalization steps of the SplitMix64 generator: shift and multiplier.
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype of a tensor and a 16-digit hexadecimal hash of its bytes and shape.

    Every word is hashed with its position, and the hashes are summed modulo 2**64. Integer sums do not depend on the
    order, so GPU and CPU agree.

    >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(3))
    True
    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    found = Fingerprints()
    found.add("", tensor)
    return found.read()[""]


class Fingerprints:
    """Fingerprints of many tensors, read together, because each read waits for the device."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, tuple[str, int]] = {}  # dtype, and checksum of the shape

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash a tensor; on a GPU the hash is computed asynchronously, in stream order."""
        self._totals[name] = _total(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._kinds[name] = dtype, zlib.crc32(repr(tuple(tensor.shape)).encode())

    def read(self) -> dict[str, str]:
        """Fingerprints by name."""
        by_device: dict[torch.device, list[str]] = {}
        for name, total in self._totals.items():
            by_device.setdefault(total.device, []).append(name)
        values: dict[str, int] = {}
        for names in by_device.values():
            values |= zip(names, torch.stack([self._totals[name] for name in names]).tolist(), strict=True)
        return {name: f"{dtype}:{(values[name] ^ shape) % 2**64:016x}" for name, (dtype, shape) in self._kinds.items()}


@cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """The Triton kernel, or None if it cannot be compiled, for example without a C compiler."""
    try:
        from roost.engines.weights.hash_kernel import add_hashes

        add_hashes(*torch.zeros(2, 1, dtype=torch.int64, device="cuda"))
    except Exception as error:
        warnings.warn(f"no Triton kernel for fingerprints; torch computes them, more slowly: {error}", stacklevel=2)
        return None
    return add_hashes


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the hashes of a tensor's words, on its device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    if tensor.is_cuda and flat.numel() >= 8 and flat.data_ptr() % 8 == 0 and (add_hashes := _kernel()):
        start = flat.numel() // 8 * 8
        add_hashes(flat[:start].view(torch.int64), total)
    for begin in range(start, flat.numel(), CHUNK * 8):
        words = _words(flat[begin : begin + CHUNK * 8])
        places = torch.arange(begin // 8 + 1, begin // 8 + 1 + words.numel(), device=tensor.device)
        total += _hashed(words ^ (places * SPREAD)).sum()
    return total


def _hashed(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in MIXING:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words


def _words(part: torch.Tensor) -> torch.Tensor:
    """Bytes as 64-bit integers, zero-padded."""
    missing = -part.numel() % 8
    if missing:
        part = torch.cat([part, part.new_zeros(missing)])
    # The view needs 8-byte alignment.
    aligned = part if part.data_ptr() % 8 == 0 else part.clone()
    return aligned.view(torch.int64)


# 32 tokens are enough to tell weights apart.
LENGTH = 32
TOKEN_STEP = 73
TOLERANCES = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.25, "float16": 0.08}


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids with their images, log-probs of all but the first token, and the tolerance for engines."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    images: tuple[Image, ...] = ()  # among the tokens; without one the probe does not depend on the vision tower

    async def answers(self, engine: Engine, adapter: str | None = None) -> tuple[float, ...]:
        """Log-probs of an engine."""
        return await engine.score(self.token_ids, adapter, self.images)

    def difference(self, logprobs: Sequence[float]) -> float:
        """Largest absolute difference from an engine's log-probs.

        >>> Probe((1, 2, 3), (-1.0, -2.0), 0.01).difference([-1.0, -2.5])
        0.5
        """
        if len(logprobs) != len(self.logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities came for a probe of {len(self.logprobs)}")
        return max(abs(one - other) for one, other in zip(logprobs, self.logprobs, strict=True))


def probe_tokens(vocabulary: int, length: int = LENGTH) -> tuple[int, ...]:
    """Fixed token ids spread over the vocabulary.

    >>> probe_tokens(100, 4)
    (1, 74, 47, 20)
    """
    return tuple((1 + place * TOKEN_STEP) % vocabulary for place in range(length))


PROBE_EDGE = 56  # pixels; the smallest image that the supported processors do not enlarge
AFTER_IMAGE = 8  # minimum of tokens after the image, whose log-probs depend on it


def probe_image() -> bytes:
    """A fixed image whose patches all differ, as PNG."""
    from PIL import Image as Pillow

    pixels = (np.indices((PROBE_EDGE, PROBE_EDGE, 3)) * np.array([4, 3, 60])[:, None, None, None]).sum(0) % 256
    return png(Pillow.fromarray(pixels.astype(np.uint8)))


def probe_with_image(tokens: Sequence[int], processor: Processor) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """Tokens of a probe with an image after the first token, and the image. Other image placeholders are left out.

    The image's tokens replace others, so that the probe still fits into the context of engines.
    """
    first, *others = (token for token in tokens if token != processor.token_id)
    ids, images = processor.expand([first, processor.token_id], [probe_image()])
    return (*ids, *others[: max(AFTER_IMAGE, len(tokens) - len(ids))]), images


@torch.no_grad()
def make_probe(model: nn.Module, vocabulary: int, tolerance: float | None = None) -> Probe:
    """Compute the log-probs of the fixed tokens with a Hugging Face model."""
    tokens = probe_tokens(vocabulary)
    weight = next(model.parameters())
    ids = torch.tensor([tokens], device=weight.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    limit = TOLERANCES.get(str(weight.dtype).removeprefix("torch."), 0.25) if tolerance is None else tolerance
    return Probe(tokens, tuple(found.tolist()), limit)


CLEARLY = 0.02  # a log-prob change larger than rounding
MARGIN = 2.0  # allowed multiple of the difference with equal weights, because rounding depends on the weights


class NotLoaded(UpdateFailed):
    """Every call succeeded, but the engine does not have the new weights."""


async def verify_by_fingerprints(engine: Engine, sent: Mapping[str, str]) -> bool:
    """Compare the engine's tensors with those sent; return False if they are not comparable by name and dtype."""
    differing = compare_fingerprints(sent, await engine.fingerprints())
    if differing is None:
        return False
    if differing:
        raise NotLoaded(
            f"{engine.url} has other weights than were sent: {len(differing)} of {len(sent)} tensors differ, such as "
            f"{differing[0]}"
        )
    return True


def compare_fingerprints(sent: Mapping[str, str], held: Mapping[str, str]) -> list[str] | None:
    """Names of tensors that differ, or None if the two sides cannot be compared.

    >>> compare_fingerprints({"a": "float32:1", "b": "float32:2"}, {"a": "float32:1", "b": "float32:3"})
    ['b']
    >>> compare_fingerprints({"a": "float32:1"}, {"a": "bfloat16:9"}) is None
    True
    """
    if not sent or set(sent) != set(held):
        return None
    if any(sent[name].split(":")[0] != held[name].split(":")[0] for name in sent):
        return None
    return [name for name in sent if sent[name] != held[name]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Probe answers expected of an engine after an update, and the references to judge them by."""

    probe: Probe
    baseline: float = 0.0  # the engine's difference with equal weights
    before: Sequence[float] | None = None  # its answers with the old weights
    probe_before: Probe | None = None  # the learner's probe of the old weights

    @property
    def allowed(self) -> float:
        """Allowed log-prob error: what rounding allows, or the error with equal weights plus a margin.

        >>> Expected(Probe((1, 2), (-1.0,), tolerance=0.25), baseline=1.4).allowed
        2.8
        """
        return max(self.probe.tolerance, MARGIN * self.baseline)

    @property
    def has_moved(self) -> bool:
        """True if the learner's own log-probs clearly differ between old and new weights, or if that is unknown."""
        known = self.probe_before is not None and self.probe_before.token_ids == self.probe.token_ids
        return not known or self.probe_before is None or self.probe.difference(self.probe_before.logprobs) > CLEARLY


async def verify_by_probe(engine: Engine, expected: Expected, adapter: str | None = None) -> None:
    """Raise NotLoaded if the engine's answers to the probe do not match the new weights."""
    wrong = judge_answers(expected, await expected.probe.answers(engine, adapter))
    if wrong:
        raise NotLoaded(f"{engine.url} does not answer with the new weights: {wrong}")


def judge_answers(expected: Expected, answers: Sequence[float]) -> str:
    """Describe the problem with an engine's answers; empty if they are fine.

    They must be within the allowed error, or, for a model so sensitive that rounding alone exceeds that, clearly closer
    than the answers of the old weights. If the learner's log-probs changed and the engine's did not change at all, the
    engine still has the old weights.

    >>> probe = Probe((1, 2, 3), (-1.0, -2.0), tolerance=0.1)
    >>> judge_answers(Expected(probe), (-1.05, -2.0))
    ''
    >>> judge_answers(Expected(probe), (-1.5, -2.0))
    'the probe (log-probabilities of fixed tokens) is off by 0.5, and 0.1 is allowed'
    >>> judge_answers(Expected(probe, baseline=0.4), (-1.5, -2.0))
    ''
    >>> judge_answers(Expected(probe, before=(-4.0, -2.0)), (-1.5, -2.0))
    ''
    >>> judge_answers(Expected(probe, before=(-1.05, -2.0)), (-1.05, -2.0))
    'its answers to the probe are exactly those it gave with the old weights'
    """
    probe, before = expected.probe, expected.before
    difference = probe.difference(answers)
    if before is not None and tuple(before) == tuple(answers) and difference > CLEARLY and expected.has_moved:
        return "its answers to the probe are exactly those it gave with the old weights"
    if difference <= expected.allowed:  # in this form NaN fails
        return ""
    if before is not None and difference < probe.difference(before) / 2:
        return ""
    off = f"is off by {difference:.4g}, and {expected.allowed:.4g} is allowed"
    known = f"; with equal weights it was off by {expected.baseline:.4g}" if expected.baseline else ""
    return f"the probe (log-probabilities of fixed tokens) {off}{known}"
