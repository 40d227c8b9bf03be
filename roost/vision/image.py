"""`Image`: an image file and the position of its first token; and the images of chat messages."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from roost.config.findings import counted

DATA_URL = re.compile(r"^data:image/[\w.+-]+;base64,", re.IGNORECASE)
LARGEST_PIXELS = 1 << 26  # of an image that is decoded: a small file may hold gigabytes


class ImageError(ValueError):
    """An image cannot be read, or does not fit its prompt."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image file (PNG, JPEG, ...), and the position of its first token in a sequence.

    >>> Image(b"...", 3).at(5).start
    5
    """

    data: bytes
    start: int = 0
    digest: bytes = field(default=b"", compare=False)  # hash of the data, computed unless it is given

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.blake2b(self.data, digest_size=16).digest())

    def __repr__(self) -> str:  # without its bytes, which would fill a log
        return f"Image({len(self.data)} bytes, start={self.start})"

    @property
    def data_url(self) -> str:
        return f"data:image/{_kind(self.data)};base64,{base64.b64encode(self.data).decode()}"

    def at(self, start: int) -> Image:
        """The same image at another position."""
        return Image(self.data, start, self.digest)


def _kind(data: bytes) -> str:
    return "jpeg" if data[:3] == b"\xff\xd8\xff" else "webp" if data[8:12] == b"WEBP" else "png"


def from_data_url(url: str) -> bytes:
    """Bytes of an image in a data URL. Raise ImageError for any other URL: nothing is fetched from the network.

    >>> from_data_url(Image(b"abc").data_url)
    b'abc'
    """
    if not (found := DATA_URL.match(url)):
        raise ImageError(f"an image is {url[:60]!r}; send it as data:image/png;base64,...")
    return _from_base64(url[found.end() :])


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ImageError(f"an image is not base64: {error}") from None


def from_cell(value: Any, folder: Path) -> bytes:
    """Bytes of an image in a data set: a file's bytes, its path, a data URL, or a mapping as Hugging Face writes it.

    Relative paths are looked up in `folder`, where the data file is.

    >>> from_cell({"bytes": b"abc", "path": "a.png"}, Path())
    b'abc'
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image") or value.get("url")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:"):
        return from_data_url(value)
    if isinstance(value, str | Path):
        path = folder / value
        if not path.is_file():
            raise ImageError(f"there is no image {path}")
        return path.read_bytes()
    if hasattr(value, "save"):  # an image of Pillow, which data sets of the hub decode to
        return png(value)
    raise ImageError(f"a column of images has {type(value).__name__}; it must be bytes or a path")


def png(image: Any) -> bytes:
    """An image of Pillow as a PNG file."""
    written = BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def decode_rgb(data: bytes) -> Any:
    """The decoded Pillow image, in RGB, upright by its EXIF orientation, and on white where it is transparent.

    vLLM decodes images in the same way. Raise ImageError if it cannot be read.
    """
    found = _header(data)
    from PIL import Image as Pillow, ImageOps

    try:
        found = ImageOps.exif_transpose(found)
        if found.mode == "RGB" or not found.has_transparency_data:
            return found.convert("RGB")
        drawn = found.convert("RGBA")
        ground = Pillow.new("RGB", drawn.size, "white")
        ground.paste(drawn, mask=drawn.getchannel("A"))
        return ground
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"an image of {len(data)} bytes cannot be read: {error}") from None


def size(data: bytes) -> tuple[int, int]:
    """Height and width, from the header alone. EXIF orientation is not applied, so they may be swapped."""
    width, height = _header(data).size
    return height, width


def thumbnail(data: bytes, longest: int = 96) -> str:
    """A small copy as a data URL, for reports; empty if it cannot be read."""
    try:
        small = decode_rgb(data)
    except ImageError:
        return ""
    small.thumbnail((longest, longest))
    return Image(png(small)).data_url


def _header(data: bytes) -> Any:
    try:
        from PIL import Image as Pillow
    except ImportError:
        raise ImageError("images need Pillow; install roost[vision]") from None
    try:
        found = Pillow.open(BytesIO(data))
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ImageError(f"{len(data)} bytes are not an image: {error}") from None
    if found.width * found.height > LARGEST_PIXELS:
        raise ImageError(f"an image has {found.width} x {found.height} pixels; at most {LARGEST_PIXELS:,} are read")
    return found


MARKER = "<image>"  # placeholder in the text of a data set's prompt
IMAGE_TYPES = ("image", "image_url", "input_image")  # of parts of messages
SHOWN = "[image]"  # for an image in plain text

Message = Mapping[str, Any]


def is_image(part: Any) -> bool:
    """Return True for a part of a message that is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def has_images(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(map(is_image, content))


def image_bytes(part: Mapping[str, Any], folder: Path) -> bytes | None:
    """Bytes of an image part in the form of OpenAI, Anthropic or Hugging Face; None for a placeholder."""
    source = part.get("source")
    if isinstance(source, Mapping) and isinstance(source.get("url"), str):
        return from_data_url(source["url"])
    if isinstance(source, Mapping) and isinstance(source.get("data"), str):
        return _from_base64(source["data"])
    given = next((part[key] for key in ("image", "image_url", "bytes", "path") if part.get(key)), None)
    return None if given is None else from_cell(given, folder)


def count_placeholders(messages: Sequence[Message], folder: Path = Path()) -> int:
    """Number of placeholders for images: markers in text, and parts without an image."""
    count = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            count += content.count(MARKER)
        elif isinstance(content, list | tuple):
            count += sum(is_image(part) and image_bytes(part, folder) is None for part in content)
    return count


def fill_images(messages: Sequence[Message], files: Sequence[bytes], folder: Path = Path()) -> list[dict[str, Any]]:
    """Messages with image parts that hold the file's bytes; `files` fill the placeholders in order.

    Without placeholders, images go to the start of the first user message.

    >>> fill_images([{"role": "user", "content": "<image>what is it?"}], [b"abc"])[0]["content"]
    [{'type': 'image', 'image': b'abc'}, {'type': 'text', 'text': 'what is it?'}]
    """
    count = count_placeholders(messages, folder)
    if count == 0 and files:
        messages = _marked(messages, len(files))
    elif count != len(files):
        raise ImageError(f"a prompt has {counted(count, 'image placeholder')} but {counted(len(files), 'image')}")
    left = iter(files)
    return [{**message, "content": _filled(message.get("content"), left, folder)} for message in messages]


def _marked(messages: Sequence[Message], count: int) -> list[Message]:
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None:
        raise ImageError("a prompt has images, but no user message")
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
            data = image_bytes(part, folder)
            found.append({"type": "image", "image": next(files) if data is None else data})
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ImageError(f"a message has a part of type {kind}; text and images are read")
    return found


def files_of(messages: Sequence[Message]) -> list[bytes]:
    """The image files in messages that `fill_images` returned."""
    parts = [part for message in messages if has_images(message.get("content")) for part in message["content"]]
    return [part["image"] for part in parts if is_image(part)]


def read_text(content: Any, with_names: bool = False) -> str:
    """Text of a message's parts, with `[image]` for each image, or `[image DIGEST]` with `with_names`."""
    return "".join(
        (f"[image {Image(part['image']).digest.hex()}]" if with_names else SHOWN) if is_image(part) else part["text"]
        for part in content
    )
