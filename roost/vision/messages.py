"""Images in messages: parts of a message's content, and markers in its text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.vision.image import Image, ImageError, from_cell

MARKER = "<image>"  # in the text of a data set's prompt
KINDS = ("image", "image_url", "input_image")
SHOWN = "[image]"

Message = Mapping[str, Any]


def is_image(part: Any) -> bool:
    """Return True for a part of a message that is an image."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def has_images(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(map(is_image, content))


def file_of(part: Mapping[str, Any], folder: Path) -> bytes | None:
    """File of an image part, in OpenAI's, Anthropic's or Hugging Face's form; None if it only marks the place."""
    source = part.get("source")
    if isinstance(source, Mapping) and isinstance(source.get("data"), str):
        try:
            return base64.b64decode(source["data"], validate=True)
        except binascii.Error as error:
            raise ImageError(f"an image is not base64: {error}") from None
    given = next((part[key] for key in ("image", "image_url", "bytes", "path") if part.get(key)), None)
    return None if given is None else from_cell(given, folder)


def places(messages: Sequence[Message], folder: Path = Path()) -> int:
    """Number of places for images that have no file yet: markers in text, and parts without an image."""
    count = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            count += content.count(MARKER)
        elif isinstance(content, list | tuple):
            count += sum(is_image(part) and file_of(part, folder) is None for part in content)
    return count


def placed(messages: Sequence[Message], files: Sequence[bytes], folder: Path = Path()) -> list[dict[str, Any]]:
    """Messages with their images as parts that hold the file; `files` fill the places in order.

    Without any place, they come first in the first message of the user.

    >>> placed([{"role": "user", "content": "<image>what is it?"}], [b"abc"])[0]["content"]
    [{'type': 'image', 'image': b'abc'}, {'type': 'text', 'text': 'what is it?'}]
    """
    count = places(messages, folder)
    if count == 0 and files:
        messages = _marked(messages, len(files))
    elif count != len(files):
        raise ImageError(f"a prompt has {count} places for images, but {len(files)} images")
    left = iter(files)
    return [{**message, "content": _filled(message.get("content"), left, folder)} for message in messages]


def _marked(messages: Sequence[Message], count: int) -> list[Message]:
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None:
        raise ImageError("a prompt has images, but no message of the user")
    content = messages[first].get("content")
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content or ""}]
    shown = {**messages[first], "content": [*[{"type": "image"}] * count, *parts]}
    return [*messages[:first], shown, *messages[first + 1 :]]


def _filled(content: Any, files: Iterator[bytes], folder: Path) -> Any:
    if isinstance(content, str):
        if MARKER not in content:
            return content
        first, *rest = content.split(MARKER)
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
        for text in rest:
            parts += [{"type": "image", "image": next(files)}, *([{"type": "text", "text": text}] if text else [])]
        return parts
    if not has_images(content):
        return content
    found = []
    for part in content:
        if is_image(part):
            data = file_of(part, folder)
            found.append({"type": "image", "image": next(files) if data is None else data})
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ImageError(f"a message has a part of type {kind}; text and images are read")
    return found


def files_of(messages: Sequence[Message]) -> list[bytes]:
    """Files of the images in messages that `placed` returned."""
    parts = [part for message in messages if has_images(message.get("content")) for part in message["content"]]
    return [part["image"] for part in parts if is_image(part)]


def read_text(content: Any, with_names: bool = False) -> str:
    """Text of parts of a message, with a mark for each image, or with the name of its content."""
    return "".join(
        (f"[image {Image(part['image']).digest.hex()}]" if with_names else SHOWN) if is_image(part) else part["text"]
        for part in content
    )
