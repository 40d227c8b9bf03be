"""Text of a request: tokens to characters, stop strings, and the state of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.engines.protocol import Finish, Sampling, SamplingMasks, VersionSpan, joined_masks, joined_spans
from roost.net.routing import Routing
from roost.torch_engine.scheduler import Progress


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be returned now, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


class StopScanner:
    """Looks for stop strings, and holds back text that may be the beginning of one.

    >>> scanner = StopScanner(("END",))
    >>> scanner.add("one E").text, scanner.add("N"), scanner.add("D two")
    ('one ', Scanned(text='', stop=None), Scanned(text='', stop='END'))
    """

    def __init__(self, stops: tuple[str, ...], keeps_stop: bool = False) -> None:
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held_back = ""

    def add(self, piece: str) -> Scanned:
        text = self._held_back + piece
        if found := _first_stop(text, self._stops):
            start, stop = found
            self._held_back = ""
            return Scanned(text[: start + len(stop)] if self._keeps_stop else text[:start], stop)
        end = len(text) - _length_of_beginning(text, self._stops)
        self._held_back = text[end:]
        return Scanned(text[:end])

    def rest(self) -> str:
        """Return the held-back text at the end."""
        rest, self._held_back = self._held_back, ""
        return rest


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Position and text of the first stop string; on a tie, the one listed first."""
    found = [(text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    if not found:
        return None
    start, _, stop = min(found)
    return start, stop


def _length_of_beginning(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of a text that could begin a stop string.

    >>> _length_of_beginning("tea</", ("</end>", "ab"))
    2
    """
    longest = max((len(stop) for stop in stops), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not a character, or not a complete one
CONTEXT = 6  # tokens before a new one that affect its text, such as whether a space precedes it
WINDOW = 24  # tokens decoded together at most, until the window is cut back to CONTEXT


class NoTokenizer(ValueError):
    """Text was requested, but there is no tokenizer."""


class TextCodec:
    """A model's tokenizer, or the reason why there is none."""

    def __init__(self, tokenizer: Any, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self.missing = missing

    @classmethod
    def from_folder(cls, model: str) -> TextCodec:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError, KeyError, TypeError) as error:
            # The error for a folder without a tokenizer depends on the model's family.
            return cls(None, f"{model} has no tokenizer that can be loaded ({_first_line(error)})")
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # some families create an empty one
            return cls(None, f"{model} has no tokenizer: its vocabulary is empty")
        return cls(tokenizer)

    def check(self) -> None:
        """Raise if there is no tokenizer."""
        if self._tokenizer is None:
            raise NoTokenizer(f"{self.missing}; send token ids to /inference/v1/generate instead")

    @property
    def tokenizer(self) -> Any:
        self.check()
        return self._tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text has half a character at position {error.start}") from error
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_arguments: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template; raise ValueError if the template refuses it."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_arguments,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template does not take these messages: {_first_line(error)}") from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # Cleaning up spaces would change text that was already sent.
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Text of a single token."""
        return self.decode((token_id,), skip_special_tokens=False)


class TextStream:
    """Detokenizes incrementally; a character of several tokens is returned when it is complete."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt[-CONTEXT:])
        before = self._decoded(self._window)
        if REPLACEMENT in before:  # the prompt's broken characters are not part of the completion
            self._window, before = [], ""
        self._sent = len(before)

    def add(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._decoded(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        piece = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if whole == len(text) and len(self._window) > WINDOW:
            self._shorten_window()
        return piece

    def rest(self) -> str:
        """Incomplete characters at the end, when no more tokens follow."""
        text = self._decoded(self._window)
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def _shorten_window(self) -> None:
        """Keep only the last tokens, unless they begin in the middle of a character."""
        window = self._window[-CONTEXT:]
        text = self._decoded(window)
        if REPLACEMENT not in text:
            self._window, self._sent = window, len(text)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids, self._skip_special_tokens)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True, slots=True)
class TextWanted:
    """Text options of a completion: codec and stop strings."""

    codec: TextCodec
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False  # the stop string or token is part of the text
    skips_special: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Increment of a completion."""

    index: int  # of the completion in its request
    start: int  # tokens that came before
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish | None
    stop_reason: int | str | None  # the request's stop token or stop string that ended it, if one did
    masks: SamplingMasks | None = None  # if requested


class Sample:
    """One completion in progress: collects the engine's tokens, and ends where a stop string appears."""

    def __init__(self, index: int, prompt: tuple[int, ...], sampling: Sampling, wanted: TextWanted | None) -> None:
        self.index = index
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._masks: list[SamplingMasks] = []
        self.routing: Routing | None = None  # of prompt and completion, if requested; set at the end
        self.text = ""
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: tuple[float, ...] | None = None
        self.cached_tokens = 0
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
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
        """True if it ended at a stop string, which the engine does not look for."""
        return isinstance(self.stop_reason, str)

    @property
    def whole(self) -> Piece:
        """The completion as one piece."""
        tokens, logprobs, masks = tuple(self.token_ids), tuple(self.logprobs), joined_masks(self._masks)
        return Piece(self.index, 0, tokens, logprobs, self.text, self.finish, self.stop_reason, masks)

    def take(self, progress: Progress) -> Piece:
        start = len(self.token_ids)
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, progress.cached_tokens)
        text, kept = self._written(progress)
        self.token_ids.extend(progress.token_ids[:kept])
        self.logprobs.extend(progress.logprobs[:kept])
        masks = None if progress.masks is None else progress.masks[:kept]
        self._masks += [] if masks is None else [masks]
        self.take_routing(progress)
        self._spans.append(VersionSpan(progress.version, start, len(self.token_ids)))
        if self.cut_short:
            self.finish = Finish.STOP
        elif progress.finish is not None:
            self.finish = progress.finish
            text += self._rest()
            if self.finish is Finish.STOP and self.token_ids[-1] in self._stop_token_ids:
                self.stop_reason = self.token_ids[-1]
        self.text += text
        tokens, logprobs = progress.token_ids[:kept], progress.logprobs[:kept]
        return Piece(self.index, start, tokens, logprobs, text, self.finish, self.stop_reason, masks)

    def take_routing(self, progress: Progress | None) -> None:
        """Take the routed experts, if any, of the tokens up to a stop string."""
        if progress is not None and progress.routing is not None:
            self.routing = progress.routing[: len(self.prompt) + len(self.token_ids) - 1]

    def _written(self, progress: Progress) -> tuple[str, int]:
        """Text of new tokens, and how many of them the completion keeps: those up to a stop string, or all."""
        if self._wanted is None:
            return "", len(progress.token_ids)
        shown = progress.token_ids
        if progress.finish is Finish.STOP and not self._wanted.keeps_stop:
            shown = shown[:-1]  # the text does not include the stop token
        if not self._wanted.stops:
            return self._stream.add(shown), len(progress.token_ids)
        text = ""
        for count, token_id in enumerate(shown, start=1):
            piece = self._stream.add((token_id,))
            if len(self.token_ids) + count <= self._min_tokens:
                text += piece
                continue
            scanned = self._scanner.add(piece)
            text += scanned.text
            if scanned.stop is not None:
                self.stop_reason = scanned.stop
                return text, count
        return text, len(progress.token_ids)

    def _rest(self) -> str:
        if self._wanted is None:
            return ""
        return self._scanner.rest() + self._stream.rest()
