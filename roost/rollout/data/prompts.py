"""From rows to prompts: columns, messages, chat templates and lengths."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from roost.config.data import DataSettings, DataSource
from roost.config.findings import did_you_mean, shown
from roost.rollout.agents.chat import for_template
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.data.tables import DataError, Row
from roost.vision.image import Image, ImageError, count_placeholders, files_of, fill_images, from_cell, read_text
from roost.vision.processor import Processor, model_processor

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER_ONLY = "{% set messages = messages | selectattr('role', 'equalto', 'user') | list %}" + CHATML
TEMPLATES = {"chatml": CHATML, "empty": USER_ONLY}
USUAL = ("prompt", "messages")  # prompt columns, where none is named
IMAGES = ("images", "image")  # the same, of images
SHOWN = 80  # characters of a task's name

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt; `is_rendered` if a chat template wrote the text."""

    text: str
    messages: Messages
    is_rendered: bool


def prompt_column(source: DataSource, columns: Sequence[str]) -> str:
    """The column of the prompt. Raise DataError if it is not there."""
    wanted = [source.prompt] if source.prompt else USUAL
    found = next((column for column in wanted if column in columns), None)
    if found is not None:
        return found
    raise _missing("prompt", wanted[0], columns)


def check_columns(source: DataSource, columns: Sequence[str]) -> None:
    """Raise DataError if a named column is not there."""
    prompt_column(source, columns)
    for key in ("answer", "choices", "tag_column", "query", "system_column"):
        column = getattr(source, key)
        if column is not None and column not in columns:
            raise _missing(key, column, columns)
    for column in source.images:
        if column not in columns:
            raise _missing("images", column, columns)


def _missing(key: str, column: str, columns: Sequence[str]) -> DataError:
    there = ", ".join(columns) or "none"
    fix = did_you_mean(column, columns) or "name one of these"
    return DataError("RST-T064", f"there is no column {column}", f"the columns are {there}", fix, key)


class PromptFormat:
    """Renders prompts with a tokenizer, or leaves messages and text as they are where there is none."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self.tools: Sequence[Mapping[str, Any]] = ()  # that the chat template shows
        self._encode = lru_cache(maxsize=1024)(self._encoded)

    def prompt(self, row: Row, source: DataSource, column: str, tag: str = "", folder: Path = Path()) -> Prompt:
        """The prompt of a row. Raise DataError if the column does not hold one.

        Paths of images are relative to `folder`.
        """
        template, arguments, suffix = self._style(tag)
        value = row.get(column)
        messages = None if template is False else _messages(value)
        if messages is None and not (isinstance(value, str) and value):
            wanted = "text" if template is False else "text or a list of messages"
            why = f"it is {shown(value)}, not {wanted}"
            raise DataError(
                "RST-T065", f"column {column} holds no prompt", why, "correct the row, or name another column"
            )
        if isinstance(value, str) and source.query and (query := row.get(source.query)):
            value = f"{value}\n{query}"
        if isinstance(value, str) and source.choices and messages is None:
            value += written_choices(row.get(source.choices))
        is_rendered = template not in (None, False) or (template is None and messages is not None)
        system = (row.get(source.system_column) if source.system_column else None) or source.system_prompt
        if system is not None and not is_rendered:
            fix = "write chat_template: true, or remove system_prompt and system_column"
            raise DataError("RST-T060", "a system prompt needs a chat template", "prompts are finished text", fix)
        if messages is None:
            messages = [{"role": "user", "content": value}]
        messages = _with_images(messages, row, source, is_rendered, folder)
        if is_rendered and system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": str(system)}, *messages]
        if not is_rendered or self._tokenizer is None:
            text = value if isinstance(value, str) and not is_rendered else ""
            return Prompt(text + suffix, messages, False)
        return Prompt(self._written(messages, template, arguments) + suffix, messages, True)

    def chat_format(self, tag: str) -> ChatFormat | None:
        """The format of whole conversations of a tag; None where prompts end with a suffix, which no template has."""
        template, arguments, suffix = self._style(tag)
        source = template_text(template) if isinstance(template, str) else None
        return None if suffix else ChatFormat(self._tokenizer, arguments=arguments, template=source)

    def _style(self, tag: str) -> tuple[Any, Mapping[str, Any], str]:
        """Template, its arguments and the suffix of a tag; a mapping in `tag_templates` replaces all three."""
        settings = self._settings
        own = settings.tag_templates.get(tag, settings.chat_template)
        if isinstance(own, Mapping):
            return own.get("chat_template"), own.get("template_arguments") or {}, own.get("prompt_suffix") or ""
        return own, settings.template_arguments, settings.prompt_suffix

    def _written(self, messages: Messages, template: Any, arguments: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        source = template_text(template) if isinstance(template, str) else None
        if source is None and not self._tokenizer.chat_template:
            fix = "write chat_template: chatml, or chat_template: false and finished prompts"
            raise DataError("RST-T067", "the tokenizer has no chat template", "prompts are messages", fix)
        try:
            written = self._tokenizer.apply_chat_template(
                [for_template(message) for message in messages],
                chat_template=source,
                add_generation_prompt=True,
                tokenize=False,
                tools=list(self.tools) or None,
                **arguments,
            )
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            fix = "correct the row, or write another chat_template"
            raise DataError("RST-T065", "the chat template does not take these messages", str(error), fix) from None
        return str(written)

    def ids(
        self, prompt: str, is_rendered: bool, files: Sequence[bytes] = ()
    ) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        """Token IDs and images of a prompt, cut at its end if it is too long and `overlong` is truncate."""
        ids, images = self._encode(prompt, is_rendered), tuple[Image, ...]()
        if files:
            expanded, images = self._processor().expand(ids, files)
            ids = tuple(expanded)
        most = self._settings.max_prompt_tokens
        if most is None or self._settings.overlong != "truncate":
            return ids, images
        for image in images:
            if image.start < most < image.start + self._processor().count(image.data):
                most = image.start  # no image is cut
        return ids[:most], tuple(image for image in images if image.start < most)

    def _encoded(self, prompt: str, is_rendered: bool) -> tuple[int, ...]:
        # A template writes the special tokens itself; text gets those that the tokenizer adds.
        return tuple(self._tokenizer(prompt, add_special_tokens=not is_rendered).input_ids)

    def _processor(self) -> Processor:
        return model_processor(self._tokenizer.name_or_path)

    def lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Tokens of each prompt. A short ASCII text has at most one token per character, and is not tokenized."""
        limit, least = self._settings.max_prompt_tokens or 0, self._settings.min_prompt_tokens
        extra = self._tokenizer.num_special_tokens_to_add() + 1
        found = [len(prompt.text) + extra if prompt.text.isascii() else limit + 1 for prompt in prompts]
        has_files = [bool(files_of(prompt.messages)) for prompt in prompts]
        unknown = [place for place, most in enumerate(found) if most > limit or least or has_files[place]]
        for is_rendered in (False, True):
            places = [place for place in unknown if prompts[place].is_rendered is is_rendered]
            if places:
                texts = [prompts[place].text for place in places]
                for place, ids in zip(
                    places, self._tokenizer(texts, add_special_tokens=not is_rendered).input_ids, strict=True
                ):
                    found[place] = len(ids)
        try:
            for place, prompt in enumerate(prompts):
                if files := files_of(prompt.messages):
                    found[place] += sum(self._processor().count(data) - 1 for data in files)
        except ImageError as error:
            fix = "correct the row, or train a model that reads images"
            raise DataError("RST-T065", "images of a prompt cannot be read", str(error), fix) from None
        return found


def _with_images(messages: Messages, row: Row, source: DataSource, is_rendered: bool, folder: Path) -> Messages:
    """Messages with the images of the row in their places. Raise DataError if they do not fit."""
    try:
        columns = source.images
        if not columns and count_placeholders(messages, folder):
            columns = tuple(column for column in IMAGES if column in row)[:1]
        given = [row[column] for column in columns if row.get(column) is not None]
        cells = [cell for one in given for cell in (one if isinstance(one, list | tuple) else [one])]
        if not cells and not any(isinstance(one.get("content"), list | tuple) for one in messages):
            return messages  # a marker in a text without images is text
        found = fill_images(messages, [from_cell(cell, folder) for cell in cells], folder)
    except ImageError as error:
        fix = "correct the row, or name the columns of images in data.images"
        raise DataError("RST-T065", "a prompt and its images do not fit", str(error), fix) from None
    if files_of(found) and not is_rendered:
        fix = "write chat_template: true"
        raise DataError("RST-T060", "images need a chat template", "it writes their places", fix)
    return found


def template_text(template: str) -> str | None:
    """A template by name, from a file, or as it is written; None for the tokenizer's own."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{%" in template or "{{" in template:
        return template
    if Path(template).is_file():
        return Path(template).read_text()
    what = f"chat_template is {shown(template)}"
    fix = f"write true, false, {', '.join(TEMPLATES)}, a Jinja template or its file"
    raise DataError("RST-T060", what, "there is no such template", fix)


def _messages(value: Any) -> Messages | None:
    """Messages of a column, which may hold them as JSON text; None if it holds none.

    >>> _messages('[{"role": "user", "content": "hi"}]'), _messages("hi")
    ([{'role': 'user', 'content': 'hi'}], None)
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except ValueError:
            return None
    is_list = isinstance(value, list | tuple) and bool(value)
    if not is_list or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value):
        return None
    return [{key: each for key, each in one.items() if each is not None} for one in value]


def short_name(prompt: Prompt) -> str:
    """The question of a prompt, for reports."""
    users = [message_text(one) for one in prompt.messages if one.get("role") == "user"]
    text = " ".join((users[-1] if users and users[-1] else prompt.text).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a message, with a mark for each image."""
    content = message.get("content", "")
    return read_text(content) if files_of([message]) else str(content)


def written_choices(choices: Any) -> str:
    """Choices as lines after a question, as RLinf writes those of robo2vlm; a list may stand in a text.

    >>> written_choices("['Yes', 'No']")
    '\\nChoices:\\nA. Yes\\nB. No\\n'
    """
    if isinstance(choices, str):
        with suppress(ValueError, SyntaxError):
            choices = ast.literal_eval(choices)
    every = choices if isinstance(choices, list | tuple) else [] if choices is None else [choices]
    lines = [f"{chr(ord('A') + place)}. {choice}\n" for place, choice in enumerate(every)]
    return "\n" + "".join(["Choices:\n", *lines] if lines else [])
