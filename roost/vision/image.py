"""`Image`: the file of an image, and where its tokens begin."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

DATA_URL = re.compile(r"^data:image/[\w.+-]+;base64,", re.IGNORECASE)
LARGEST_PIXELS = 1 << 26  # of an image that is decoded: a small file may hold gigabytes


class ImageError(ValueError):
    """Something is not an image that can be read."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image file (PNG, JPEG, ...), and the position of its first token in a sequence.

    >>> Image(b"...", 3).at(5).start
    5
    """

    data: bytes
    start: int = 0
    digest: bytes = field(default=b"", compare=False)  # name of the content, computed unless it is given

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
    try:
        return base64.b64decode(url[found.end() :], validate=True)
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


def png(opened: Any) -> bytes:
    """An image of Pillow as a PNG file."""
    written = BytesIO()
    opened.save(written, "PNG")
    return written.getvalue()


def opened(data: bytes) -> Any:
    """The image of Pillow in a file, in RGB. Raise ImageError if it cannot be read."""
    found = _header(data)
    try:
        return found.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"an image of {len(data)} bytes cannot be read: {error}") from None


def size(data: bytes) -> tuple[int, int]:
    """Height and width, from the header alone."""
    width, height = _header(data).size
    return height, width


def thumbnail(data: bytes, longest: int = 96) -> str:
    """A small copy as a data URL, for reports; empty if it cannot be read."""
    try:
        small = opened(data)
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
