"""Text to token ids and back, with the tokenizer in the model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character, or not yet
CONTEXT = 6  # tokens before a new one that decide how it is written, such as whether a space precedes it
WINDOW = 24


class NoTokenizer(ValueError):
    """Text was asked for, but there is no tokenizer."""


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
            # What a folder without a tokenizer raises depends on the model's family.
            return cls(None, f"{model} has no tokenizer that can be loaded ({_first_line(error)})")
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # some families make one up, without words
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
        """The tokens of a conversation in the model's own chat template; ValueError says what is wrong with it."""
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
        """One token as it is written alone."""
        return self.decode((token_id,), skip_special_tokens=False)


class TextStream:
    """Turns tokens into text as they come; a character of several tokens appears when it is whole."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt[-CONTEXT:])
        before = self._decoded(self._window)
        if REPLACEMENT in before:  # the prompt's broken characters are no part of the completion
            self._window, before = [], ""
        self._sent = len(before)

    def add(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._decoded(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        piece = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if whole == len(text) and len(self._window) > WINDOW:
            self._forget()
        return piece

    def rest(self) -> str:
        """The broken characters at the end, once no more tokens come."""
        text = self._decoded(self._window)
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def _forget(self) -> None:
        """Keep only the last tokens, unless they begin in the middle of a character."""
        window = self._window[-CONTEXT:]
        text = self._decoded(window)
        if REPLACEMENT not in text:
            self._window, self._sent = window, len(text)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids, self._skip_special_tokens)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
