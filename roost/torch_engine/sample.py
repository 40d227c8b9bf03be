"""One completion as it grows: tokens, their log-probabilities and versions, and the text they make."""

from __future__ import annotations

from dataclasses import dataclass

from roost.engines.generation import Finish, Sampling, VersionSpan, joined_spans
from roost.torch_engine.sequence import Progress
from roost.torch_engine.stop_strings import StopScanner
from roost.torch_engine.text_codec import TextCodec, TextStream


@dataclass(frozen=True, slots=True)
class TextWanted:
    """How a completion is written, and which strings end it."""

    codec: TextCodec
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False  # a stop string or token is part of the text
    skips_special: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to a completion since the piece before."""

    index: int  # of the completion in its request
    start: int  # tokens that came before
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish | None
    stop_reason: int | str | None  # the stop token or string; None where the model ended by itself


class Sample:
    """Takes what the engine makes for one completion, and cuts it where a stop string appears."""

    def __init__(self, index: int, prompt: tuple[int, ...], sampling: Sampling, wanted: TextWanted | None) -> None:
        self.index = index
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: tuple[float, ...] | None = None
        self.cached_tokens = 0
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._spans: list[VersionSpan] = []
        self._wanted = wanted
        if wanted is not None:
            self._stream = TextStream(wanted.codec, prompt, wanted.skips_special)
            self._scanner = StopScanner(wanted.stops, wanted.keeps_stop)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        return joined_spans(tuple(self._spans))

    @property
    def cut_short(self) -> bool:
        """Whether it ended at a stop string, of which the engine knows nothing."""
        return isinstance(self.stop_reason, str)

    @property
    def whole(self) -> Piece:
        """The completion as one piece."""
        return Piece(
            self.index, 0, tuple(self.token_ids), tuple(self.logprobs), self.text, self.finish, self.stop_reason
        )

    def take(self, progress: Progress) -> Piece:
        start = len(self.token_ids)
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, progress.cached_tokens)
        text, kept = self._written(progress)
        self.token_ids.extend(progress.token_ids[:kept])
        self.logprobs.extend(progress.logprobs[:kept])
        self._spans.append(VersionSpan(progress.version, start, len(self.token_ids)))
        if self.cut_short:
            self.finish = Finish.STOP
        elif progress.finish is not None:
            self.finish = progress.finish
            text += self._rest()
            if self.finish is Finish.STOP and self.token_ids[-1] in self._stop_token_ids:
                self.stop_reason = self.token_ids[-1]
        self.text += text
        return Piece(
            self.index, start, progress.token_ids[:kept], progress.logprobs[:kept], text, self.finish, self.stop_reason
        )

    def _written(self, progress: Progress) -> tuple[str, int]:
        """The text of new tokens, and how many of them there are up to the end of a stop string."""
        if self._wanted is None:
            return "", len(progress.token_ids)
        shown = progress.token_ids
        if progress.finish is Finish.STOP and not self._wanted.keeps_stop:
            shown = shown[:-1]  # the token that ends it is not meant to be read
        if not self._wanted.stops:
            return self._stream.add(shown), len(progress.token_ids)
        text = ""
        for count, token_id in enumerate(shown, start=1):
            scanned = self._scanner.add(self._stream.add((token_id,)))
            text += scanned.text
            if scanned.stop is not None:
                self.stop_reason = scanned.stop
                return text, count
        return text, len(progress.token_ids)

    def _rest(self) -> str:
        if self._wanted is None:
            return ""
        return self._scanner.rest() + self._stream.rest()
