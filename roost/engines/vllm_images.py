"""Images in requests to vLLM, which repeats the placeholder of each image itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roost.engines.protocol import EngineError, EngineRefused
from roost.vision.image import Image

IMAGE_FIELD, TOKEN_REQUEST = "content_parts", "GenerateRequest"  # a field of the route for tokens, and its schema
IMAGES_NEED = (
    "this server takes no images beside token ids, as vLLM 0.32 does on /inference/v1/generate; start a newer vLLM, or "
    "write engine: torch in train"
)


def with_images(body: dict[str, Any], images: Sequence[Image], weights: str) -> dict[str, Any]:
    """A request for tokens with the images of its prompt.

    The server keeps what its vision tower made of an image by the image's name, so that the name has `weights`: a word
    for the weights, another one after each load, even of the same version. It returns the prompt that it computed, for
    `check_prompt`.
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
    """Token ids with one placeholder for each image. Raise EngineRefused if vLLM would take another for an image's.

    >>> collapsed([5, 9, 9, 9, 6, 9, 9, 7], [Image(b"", 1), Image(b"", 5)])
    [5, 9, 6, 9, 7]
    """
    found: list[int] = []
    done = 0
    starts = [image.start for image in images]
    for start, following in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        holder = token_ids[start]
        if holder in token_ids[done:start]:
            raise EngineRefused(
                f"token {token_ids.index(holder, done)} is the placeholder of images ({holder}), but of none of these, "
                "and vLLM would show the next image there; use the built-in engine (engine: torch)"
            )
        found += [*token_ids[done:start], holder]
        done = start
        while done < following and token_ids[done] == holder:
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
