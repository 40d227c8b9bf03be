"""The vision tower of a transformers model: from patches to embeddings among those of the text tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roost.vision.cache import ByteCache
from roost.vision.image import Image
from roost.vision.processor import Processor

# Extra terms that some models pass to their attention, and that Roost's attention would silently ignore.
UNSUPPORTED_ATTENTION_TERMS = ("softcap", "s_aux", "position_bias", "alibi_slopes")
KEPT_BYTES = 256 << 20  # of embeddings that an engine caches on its device


@dataclass(frozen=True, eq=False, slots=True)
class ImageRows:
    """Patches of all images of a batch, and the positions of their tokens in it."""

    pixels: Tensor
    grids: Tensor
    places: Tensor
    kept: Tensor  # rows of the tower's output for these positions; a sequence may end within an image


def model_class(config: Any) -> Any:
    """The transformers class that loads a policy of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from roost.vision.processor import reads_images

    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def attention_of(config: Any, name: str) -> str | dict[str, str]:
    """Attention implementations: `name` for the text, torch's for the tower, whose patches are not a sequence."""
    return name if getattr(config, "vision_config", None) is None else {"text_config": name, "vision_config": "sdpa"}


def image_rows(
    processor: Processor, sequences: Sequence[tuple[int, int, Sequence[Image]]], device: torch.device
) -> ImageRows | None:
    """Images of sequences (first position in the batch, length, images); None without images."""
    pixels, grids, places, kept = [], [], [], []
    done = 0
    known: dict[bytes, int] = {}  # samples of one prompt share their images, and the tower computes each once
    for first, length, images in sequences:
        for image in images:
            span = processor.span(image)
            inside = np.arange(len(span))[: max(0, length - image.start)]
            if image.digest not in known:
                known[image.digest] = done
                patches = processor.patches(image)
                pixels.append(patches.pixels)
                grids.append(patches.grid)
                done += len(span)
            places.append(first + image.start + inside)
            kept.append(known[image.digest] + inside)
    if not pixels:
        return None
    arrays = (np.concatenate(pixels), np.array(grids), np.concatenate(places), np.concatenate(kept))
    return ImageRows(*(torch.from_numpy(array).to(device) for array in arrays))


class FeatureCache:
    """A cache of image embeddings for requests with the same images; clear it when the weights change."""

    def __init__(self, body: Any, processor: Processor, limit: int = KEPT_BYTES) -> None:
        self._body, self._processor = body, processor
        self._kept = ByteCache[Tensor](limit, lambda kept: kept.nbytes)

    def get(self, image: Image) -> Tensor:
        """Embeddings of an image's tokens. Each image is computed alone, so that they do not depend on the batch."""
        return self._kept.get(image.digest, lambda: self._computed(image))

    def _computed(self, image: Image) -> Tensor:
        patches, device = self._processor.patches(image), self._body.device
        grid = torch.tensor([patches.grid], device=device)
        return features(self._body, torch.from_numpy(patches.pixels).to(device), grid)

    def clear(self) -> None:
        self._kept.clear()


def features(body: Any, pixels: Tensor, grids: Tensor) -> Tensor:
    """Embeddings of all tokens of images, [tokens, hidden size]."""
    found: Tensor = torch.cat(tuple(body.get_image_features(pixels, grids, return_dict=True).pooler_output))
    return found


def embedded(body: Any, token_ids: Tensor, images: ImageRows | None) -> Tensor:
    """Embeddings of the tokens of a batch, with those of its images at their positions.

    A placeholder token that the policy generated belongs to no image and is embedded like any other token. Without
    images, the tower runs on a blank one, because all ranks must call the same sharded layers.
    """
    tokens: Tensor = body.get_input_embeddings()(token_ids)
    if images is None:
        config = body.config.vision_config
        merge, numbers = config.spatial_merge_size, config.temporal_patch_size * config.patch_size**2
        blank = torch.zeros(merge**2, config.in_channels * numbers, device=token_ids.device)
        grid = torch.tensor([[1, merge, merge]], device=token_ids.device)
        return tokens + 0.0 * features(body, blank, grid).sum()
    found = features(body, images.pixels, images.grids).index_select(0, images.kept)
    return tokens.index_copy(0, images.places, found.to(tokens.dtype))
