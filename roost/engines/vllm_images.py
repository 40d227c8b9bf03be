"""Images in requests to vLLM, which takes one placeholder per image and repeats it itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roost.engines.protocol import EngineError, EngineRefused
from roost.vision.image import Image

IMAGE_FIELD, TOKEN_REQUEST = "content_parts", "GenerateRequest"  # field of /inference/v1/generate, and its schema
IMAGES_NEED = "this server takes no images with token ids; start vLLM 0.32 or later, or write engine: torch in train"


def with_images(body: dict[str, Any], images: Sequence[Image], weights: str) -> dict[str, Any]:
    """The request with the images of its prompt; the response will have the computed prompt, for `check_prompt`.

    The server caches image embeddings by uuid. `weights`, which must change with each load of weights, is part of it,
    so that embeddings of old weights are not used.
    """
    parts = [
        {"type": "image_url", "url": image.data_url, "uuid": f"{image.digest.hex()}-{weights}"} for image in images
    ]
    return {
        **body,
        "token_ids": collapsed(body["token_ids"], images),
        IMAGE_FIELD: parts,
        "return_token_ids": True,
    }


def collapsed(token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
    """Token ids with one placeholder per image.

    Raise EngineRefused if a token of the prompt itself is the placeholder, which vLLM would replace by an image.

    >>> collapsed([5, 9, 9, 9, 6, 9, 9, 7], [Image(b"", 1), Image(b"", 5)])
    [5, 9, 6, 9, 7]
    """
    found: list[int] = []
    done = 0
    starts = [image.start for image in images]
    for start, following in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        placeholder = token_ids[start]
        if placeholder in token_ids[done:start]:
            raise EngineRefused(
                f"token {token_ids.index(placeholder, done)} is an image placeholder ({placeholder}) without an image, "
                "and vLLM would show the next image there; use the built-in engine (engine: torch)"
            )
        found += [*token_ids[done:start], placeholder]
        done = start
        while done < following and token_ids[done] == placeholder:
            done += 1
    return [*found, *token_ids[done:]]


def check_prompt(computed: Sequence[int] | None, token_ids: Sequence[int]) -> None:
    """Raise EngineError unless the server computed exactly these tokens, which the learner trains on."""
    if computed is None or list(computed) != list(token_ids):
        count = "no prompt" if computed is None else f"a prompt of {len(computed)} tokens"
        raise EngineError(
            f"the server reports {count} where {len(token_ids)} tokens with images were sent: its image processor has "
            "other sizes than the model's; remove its --mm-processor-kwargs"
        )
