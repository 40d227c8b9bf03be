"""`Processor`: images to patches and placeholder tokens, and the three positions of every token (M-RoPE)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.config.findings import counted
from roost.vision.cache import ByteCache
from roost.vision.image import Image, ImageError, decode_rgb, size

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
Ints = npt.NDArray[np.int64]
KEPT_BYTES = 512 << 20  # of cached patches: those of a prompt are needed for every sample of its group


@dataclass(frozen=True, eq=False, slots=True)
class Patches:
    """An image as a vision tower takes it, in an eighth of its bytes: one byte per value, one of equal frames."""

    raw: npt.NDArray[np.uint8]  # [patches, channels, pixels of a patch], resized
    values: npt.NDArray[np.float32]  # [channels, 256], the normalized value of each
    frames: int  # number of equal frames of a patch
    grid: tuple[int, int, int]  # time, height and width in patches

    @property
    def pixels(self) -> npt.NDArray[np.float32]:
        """[patches, numbers of a patch], equal to the floats of the image processor."""
        count, channels, _ = self.raw.shape
        found = self.values[np.arange(channels)[:, None], self.raw]
        return np.repeat(found[:, :, None], self.frames, axis=2).reshape(count, -1)


@dataclass(frozen=True, eq=False, slots=True)
class PromptPositions:
    """Images of a prompt, and the positions of its tokens and of those that follow."""

    images: tuple[tuple[Image, range], ...]  # with the positions of their tokens
    positions: Ints  # [3, tokens of the prompt]

    def at(self, start: int, end: int) -> Ints:
        """Positions of tokens from `start` up to `end`, [3, tokens]; tokens after the prompt are text."""
        size = self.positions.shape[1]
        after = np.arange(max(start, size), max(end, size)) - size + int(self.positions.max()) + 1
        return np.concatenate([self.positions[:, start:end], np.broadcast_to(after, (3, len(after)))], axis=1)


class Processor:
    """The image processor of a model folder. Engine, learner and data use the same one, so they agree on tokens."""

    def __init__(self, images: Any, token_id: int, merge: int) -> None:
        self._images, self.token_id, self._merge = images, token_id, merge
        self._kept = ByteCache[Patches](KEPT_BYTES, lambda patches: patches.raw.nbytes)
        self._values = normalized_values(images)

    @classmethod
    def of_model(cls, model: str, config: Any = None) -> Processor | None:
        """The processor of a model; None if the model reads text alone."""
        from transformers import AutoConfig, AutoImageProcessor

        try:
            config = AutoConfig.from_pretrained(model) if config is None else config
        except (OSError, ValueError):  # a folder with a tokenizer alone
            return None
        if not reads_images(config):
            return None
        # Resize by Pillow even if torchvision is installed, so that tokens and pixels are the same on every machine.
        images = AutoImageProcessor.from_pretrained(model, backend="pil")
        return cls(images, config.image_token_id, config.vision_config.spatial_merge_size)

    def count(self, data: bytes) -> int:
        """Number of tokens of an image, from its size alone."""
        edges = size(data)
        with _naming(*edges):
            patches: int = self._images.get_number_of_image_patches(*edges, {})
        return patches // self._merge**2

    def patches(self, image: Image) -> Patches:
        return self._kept.get(image.digest, lambda: self._processed(image.data))

    def _processed(self, data: bytes) -> Patches:
        picture = decode_rgb(data)
        with _naming(picture.height, picture.width):
            raw, grid = _raw_patches(self._images, picture)
        return Patches(raw, self._values, self._images.temporal_patch_size, grid)

    def expand(self, token_ids: Sequence[int], files: Sequence[bytes]) -> tuple[list[int], tuple[Image, ...]]:
        """The tokens, with one placeholder for each token of an image; and the images with their positions."""
        holders = sum(token == self.token_id for token in token_ids)
        if holders != len(files):
            raise ImageError(f"a prompt has {counted(holders, 'image placeholder')} but {counted(len(files), 'image')}")
        left = iter(files)
        ids: list[int] = []
        images: list[Image] = []
        for token in token_ids:
            if token == self.token_id:
                data = next(left)
                images.append(Image(data, len(ids)))
                ids += [token] * self.count(data)
            else:
                ids.append(token)
        return ids, tuple(images)

    def layout(self, token_ids: Sequence[int], images: Sequence[Image]) -> PromptPositions:
        """Positions of a prompt. Raise ImageError unless the tokens of each image are placeholders."""
        end = 0
        for image in images:
            span = self.span(image)
            if not end <= span.start < span.stop <= len(token_ids):
                raise ImageError(f"an image has tokens {span.start} to {span.stop} of {len(token_ids)}")
            if any(token_ids[index] != self.token_id for index in span):
                raise ImageError(f"tokens {span.start} to {span.stop} are not all {self.token_id}, as its image needs")
            end = span.stop
        spans = tuple((image, self.span(image)) for image in images)
        return PromptPositions(spans, self.positions(len(token_ids), images))

    def span(self, image: Image) -> range:
        """Positions of an image's tokens."""
        time, height, width = self.patches(image).grid
        return range(image.start, image.start + time * height * width // self._merge**2)

    def positions(self, length: int, images: Sequence[Image]) -> Ints:
        """Time, height and width of each token, [3, length]; a sequence may end within an image.

        Text tokens count up by one in all three. The tokens of an image count from the text before it; the text after
        the image continues after the largest of them.
        """
        parts: list[Ints] = []
        done, following = 0, 0
        for image in images:
            before = image.start - done
            parts.append(np.broadcast_to(np.arange(before) + following, (3, before)))
            following += before
            time, height, width = self.patches(image).grid
            own = np.indices((time, height // self._merge, width // self._merge)).reshape(3, -1)
            parts.append(own + following)
            following += max(height, width) // self._merge
            done = image.start + own.shape[1]
        rest = max(0, length - done)
        parts.append(np.broadcast_to(np.arange(rest) + following, (3, rest)))
        return np.concatenate(parts, axis=1)[:, :length].astype(np.int64)


@contextmanager
def _naming(height: int, width: int) -> Iterator[None]:
    """Context in which an image that the processor refuses, such as one of 1 x 300 pixels, is an ImageError."""
    try:
        yield
    except ValueError as error:
        raise ImageError(f"an image of {width} x {height} pixels does not suit the model: {error}") from None


def _raw_patches(images: Any, picture: Any, **options: Any) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
    """Resized patches before they are normalized, of one frame, [patches, channels, pixels], and their grid."""
    found = images(images=[picture], do_rescale=False, do_normalize=False, return_tensors="np", **options)
    time, height, width = (int(each) for each in found["image_grid_thw"][0])
    return _one_frame(images, found["pixel_values"]).astype(np.uint8), (time, height, width)


def _one_frame(images: Any, pixels: Any) -> Any:
    return pixels.reshape(len(pixels), -1, images.temporal_patch_size, images.patch_size**2)[:, :, 0]


def normalized_values(images: Any) -> npt.NDArray[np.float32]:
    """The image processor's normalized value of each byte, [channels, 256], read from an image with all 256."""
    from PIL import Image as Pillow

    edge = images.patch_size * images.merge_size
    size = (edge, edge * -(-256 // edge**2))  # width, height
    ramp = Pillow.frombytes("L", size, bytes(index % 256 for index in range(size[0] * size[1]))).convert("RGB")
    raw, _ = _raw_patches(images, ramp, do_resize=False)
    pixels = _one_frame(images, images(images=[ramp], do_resize=False, return_tensors="np")["pixel_values"])
    values = np.zeros((raw.shape[1], 256), np.float32)
    for channel, row in enumerate(values):
        row[raw[:, channel]] = pixels[:, channel]
    return values


def reads_images(config: Any) -> bool:
    """Return True for a config with a vision tower. Raise ValueError for a family that is not supported."""
    if getattr(config, "vision_config", None) is None:
        return False
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"models of type {config.model_type} read images in a way that is not supported; "
            f"use a text model or one of {', '.join(FAMILIES)}"
        )
    return True


@lru_cache(maxsize=8)
def model_processor(model: str) -> Processor:
    """The image processor of a model. Raise ImageError if the model reads text alone."""
    found = Processor.of_model(model)
    if found is None:
        raise ImageError(f"a prompt has images, but {model} reads text alone")
    return found
