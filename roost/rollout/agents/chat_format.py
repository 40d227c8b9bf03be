"""Chat templates and tool calls: from messages to tokens and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roost.vision.image import Image
from roost.vision.processor import model_processor

BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, with its arguments as canonical JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """An assistant's turn: text, tool calls, and the reasoning before them."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class Parser(Protocol):
    """Splits a turn. `tools` are those offered to the policy; a parser may need them to read a call's arguments."""

    def __call__(self, text: str, tools: Tools = None) -> ParsedReply: ...


def parse_reply(text: str, tools: Tools = None) -> ParsedReply:
    r"""Split a turn as Hermes and Qwen write it; if any call is malformed, all of them are text.

    >>> parse_reply('I look.\n<tool_call>\n{"name": "find", "arguments": {"word": "sun"}}\n</tool_call>')
    ParsedReply(text='I look.', calls=(ToolCall(name='find', arguments='{"word": "sun"}'),), reasoning='')
    >>> parse_reply('<tool_call>find sun</tool_call>').text
    '<tool_call>find sun</tool_call>'
    >>> parse_reply('<think>\nIs it?\n</think>\n\nYes.')
    ParsedReply(text='Yes.', calls=(), reasoning='Is it?')
    """
    reasoning, text = split_reasoning(text)
    calls = [_call(block) for block in BLOCK.findall(text)]
    known = tuple(call for call in calls if call is not None)
    if not known or len(known) != len(calls):
        return ParsedReply(text.strip(), (), reasoning)
    return ParsedReply(BLOCK.sub("", text).strip(), known, reasoning)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return reasoning and the rest. The prompt may have opened the reasoning; a turn that was cut may not close it.

    >>> split_reasoning("so it is</think>7"), split_reasoning("<think>so"), split_reasoning("7")
    (('so it is', '7'), ('so', ''), ('', '7'))
    """
    before, end, after = text.partition("</think>")
    if end or before.lstrip().startswith("<think>"):
        return before.strip().removeprefix("<think>").strip(), after
    return "", text


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call from a message, whose arguments may already be a JSON string.

    >>> tool_call("find", '{"word":   "sun"}') == tool_call("find", {"word": "sun"})
    True
    """
    return ToolCall(str(name), _canonical(_loaded(arguments)))


def _call(block: str) -> ToolCall | None:
    found = _loaded(block)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    return tool_call(found["name"], found.get("arguments", {}))


def _loaded(value: Any) -> Any:
    """Parse a JSON string; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' and eos_token %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NO_THOUGHT = re.compile(r"<think>\s*</think>\s*")
USUAL_ROLES = ("system", "user", "assistant")
# Roles that only some templates know, and their replacement in others.
ROLE_FALLBACKS = {"ipython": "user", "developer": "system"}


class TemplateRefused(ValueError):
    """The chat template rejects these messages, or drops some of them."""


class ChatFormat:
    """A tokenizer with its chat template, or with a plain one if it has none.

    `template` replaces the tokenizer's; `arguments`, such as `enable_thinking`, are passed to it. With
    `keeps_reasoning`, the reasoning of earlier turns stays in the prompt even if the template drops it. `parser` splits
    turns into text, tool calls and reasoning.
    """

    def __init__(
        self,
        tokenizer: Any,
        keeps_reasoning: bool = False,
        arguments: Mapping[str, Any] | None = None,
        parser: Parser = parse_reply,
        template: str | None = None,
    ) -> None:
        self.parse = parser
        self._tokenizer, self._keeps_reasoning, self._arguments = tokenizer, keeps_reasoning, dict(arguments or {})
        self._template = template or tokenizer.chat_template or PLAIN_TEMPLATE

    def ids(self, text: str, adds_special: bool = False) -> Ids:
        """Tokenize a text; `adds_special` adds the tokens that the tokenizer begins a text with."""
        return tuple(self._tokenizer(text, add_special_tokens=adds_special).input_ids)

    def with_images(self, token_ids: Ids, files: Sequence[bytes]) -> tuple[Ids, tuple[Image, ...]]:
        """Expand the template's image placeholders to one token per image feature; return the tokens and the images."""
        expanded, images = model_processor(self._tokenizer.name_or_path).expand(token_ids, files)
        return tuple(expanded), images

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens without special tokens, unless an engine's parser looks for them."""
        skips = self.parse is parse_reply
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        )

    def token(self, token_id: int) -> str:
        """Decode one token, special ones included."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def opening(self, messages: Messages, tools: Tools = None) -> Ids:
        """Token IDs of a conversation from its start, up to the generation prompt."""
        written = self._rendered(messages, tools)
        if tools and written == self._rendered(messages, None):
            raise TemplateRefused("the chat template does not show tools; describe them in a message")
        self._expect_shown(messages, 0, written, tools)
        return self.ids(written)

    def conversations(self, messages: Messages, tools: Tools = None) -> list[list[tuple[Ids, bool]]]:
        """Token IDs of a conversation to learn from, in pieces; True for pieces of the assistant.

        A piece of the assistant ends with its end-of-turn token. Some templates render an earlier turn differently once
        others follow it; such turns become separate sequences, each with its prefix.
        """
        whole = self._rendered(messages, tools, prompts=False)
        alone, spans = [], []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._rendered(messages[:index], tools)
            ended = self._rendered(messages[: index + 1], tools, prompts=False)
            if not ended.startswith(prompt):  # e.g. empty think tags in the generation prompt only
                prompt = self._rendered(messages[:index], tools, prompts=False)
            if not ended.startswith(prompt):
                raise TemplateRefused("the chat template renders a prompt differently once its answer follows")
            if whole.startswith(ended):
                spans.append((len(prompt), len(ended)))
            else:
                alone.append((ended, [(len(prompt), len(ended))]))
        return [self._pieces(text, within) for text, within in (*alone, *([(whole, spans)] if spans else []))]

    def _pieces(self, text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[Ids, bool]]:
        pieces: list[tuple[Ids, bool]] = []
        before, place = "", 0
        for start, end in spans:
            ended = self._ended_turn(self.ids_after(text[:start], text[start:end]))
            pieces += [(self.ids_after(before, text[place:start]) if before else self.ids(text[:start]), False)]
            pieces += [(ended[0], True), (ended[1], False)]
            before, place = text[:end], end
        return [piece for piece in pieces if piece[0]]

    def _ended_turn(self, token_ids: Ids) -> tuple[Ids, Ids]:
        """Split a turn after its last end-of-sequence token; the template adds the rest."""
        end = self._tokenizer.eos_token_id
        places = [index for index, token in enumerate(token_ids) if token == end]
        cut = places[-1] + 1 if places else len(token_ids)
        return token_ids[:cut], token_ids[cut:]

    def continuation(
        self, known: Messages, generated: Sequence[int], ending: int | None, new: Messages, tools: Tools = None
    ) -> Ids | None:
        """Token IDs that follow the policy's last turn, which ends `known`; `generated` has the indices of its turns.

        `ending` is the end-of-turn token that the policy generated. Return None if the template renders earlier
        messages differently now that there are new ones.
        """
        real = self._rendered([*known, *new], tools)
        self._expect_shown([*known, *new], len(known), real, tools)
        if not self._keeps_reasoning and not _in_order([known[index]["content"] for index in generated], real):
            return None
        stand_ins = _stand_ins(generated, real)
        standing = [_with_content(message, stand_ins.get(index)) for index, message in enumerate([*known, *new])]
        written, last = self._rendered(standing, tools), stand_ins[generated[-1]]
        if written.count(last) != 1:
            raise TemplateRefused(
                f"the chat template writes an assistant's text {written.count(last)} times; what follows a turn is "
                "unknown. Use a template that writes it once, or start each conversation anew"
            )
        if not self._begins_with(standing[: generated[-1]], written, tools):
            return None
        return self._after(last, written.split(last)[1], ending)

    def _begins_with(self, shown: Messages, written: str, tools: Tools) -> bool:
        """Return True if the messages before the last turn still render the same, apart from the generation prompt."""
        written, prompted = self._compared(written), self._compared(self._rendered(shown, tools))
        if written.startswith(prompted):
            return True
        ended = self._compared(self._rendered(shown, tools, prompts=False))
        return prompted.startswith(ended) and written.startswith(ended)

    def _compared(self, written: str) -> str:
        """Normalize a rendering: if reasoning is kept, empty think tags are ignored."""
        return NO_THOUGHT.sub("", written) if self._keeps_reasoning else written

    def _after(self, stand_in: str, written: str, ending: int | None) -> Ids:
        """Tokenize what follows a turn, without the end-of-turn token that the policy generated."""
        end = "" if ending is None else self.token(ending)
        if end and written.lstrip().startswith(end):
            return self.ids_after(end, written.lstrip()[len(end) :])
        return self.ids_after(stand_in, written)

    def ids_after(self, before: str, text: str) -> Ids:
        """Tokenize a text in context: some tokenizers treat the start of a text differently."""
        alone, together = self.ids(before), self.ids(before + text)
        return together[len(alone) :] if together[: len(alone)] == alone else self.ids(text)

    def _rendered(self, messages: Messages, tools: Tools, prompts: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            written = self._tokenizer.apply_chat_template(
                [self._known_role(message) for message in messages],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                add_generation_prompt=prompts,
                tokenize=False,
                **self._arguments,
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise TemplateRefused(f"the chat template does not take these messages: {error}") from error
        return str(written)

    def _expect_shown(self, messages: Messages, start: int, written: str, tools: Tools) -> None:
        """Raise TemplateRefused if the template silently drops messages with a role it does not know."""
        first_of = {messages[index]["role"]: index for index in reversed(range(start, len(messages)))}
        for role, index in first_of.items():
            others = [*messages[:index], *messages[index + 1 :]]
            if role not in USUAL_ROLES and others and self._is_same(others, tools, written):
                raise TemplateRefused(f"the chat template leaves out a message of the role {role}; write it as user")

    def _is_same(self, messages: Messages, tools: Tools, written: str) -> bool:
        try:
            return self._rendered(messages, tools) == written
        except TemplateRefused:  # e.g. because answers to tool calls are missing
            return False

    def _known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message["role"]
        is_unknown = role in ROLE_FALLBACKS and role not in str(self._template) and self._template != PLAIN_TEMPLATE
        return {**message, "role": ROLE_FALLBACKS[role]} if is_unknown else dict(message)


def _stand_ins(generated: Sequence[int], real: str) -> dict[int, str]:
    """Return a unique placeholder text for each turn."""
    name = "policy-turn"
    while name in real:
        name += "-"
    return {index: f"{name}{index}." for index in generated}


def _with_content(message: Mapping[str, Any], stand_in: str | None) -> Mapping[str, Any]:
    return message if stand_in is None else {"role": message["role"], "content": stand_in}


def _in_order(texts: Iterable[str], written: str) -> bool:
    """Return True if `written` contains all texts in order, ignoring whitespace.

    >>> _in_order(["a b", "c"], "<a  b> <c>"), _in_order(["c", "a b"], "<a b> <c>")
    (True, False)
    """
    squeezed, place = "".join(written.split()), 0
    for text in texts:
        wanted = "".join(text.split())
        place = squeezed.find(wanted, place)
        if place < 0:
            return False
        place += len(wanted)
    return True
