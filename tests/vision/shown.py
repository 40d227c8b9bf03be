"""Samples of coloured squares with their tokens, and the log-probs that transformers alone gives them."""

from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from roost.learner.sample import NOT_GENERATED, Sample
from roost.rollout.colours import TEXT_SIZES, VOCABULARY, square
from roost.vision.processor import Processor

PAD = VOCABULARY["<|image_pad|>"]
START, END = VOCABULARY["<|vision_start|>"], VOCABULARY["<|vision_end|>"]
IMAGE = [START, PAD, END]
# vLLM's attention on CPUs takes heads of 32 numbers and more.
WIDE = {"hidden_size": 128, "rope_parameters": {**TEXT_SIZES["rope_parameters"], "mrope_section": [4, 6, 6]}}


def sample(processor, pieces, files=(), seed=0):
    """Pieces of tokens, given and generated in turn; each placeholder of a given piece is an image."""
    random, left = np.random.default_rng(seed), list(files)
    ids, turns, images = [], [], []
    for number, piece in enumerate(pieces):
        is_given = number % 2 == 0
        found = (piece, ())
        if is_given:
            count = piece.count(PAD)
            found = processor.expand(piece, left[:count])
            del left[:count]
        images += [image.at(image.start + len(ids)) for image in found[1]]
        ids += found[0]
        turns += [NOT_GENERATED if is_given else number // 2] * len(found[0])
    size = len(ids)
    logprobs = -3 - random.random(size).astype(np.float32)
    return Sample(
        np.array(ids),
        np.array(turns),
        logprobs,
        random.normal(size=size).astype(np.float32),
        old_logprobs=logprobs,
        images=tuple(images),
    )


def samples(processor):
    """One image, two turns with two images of which one is larger, text alone, and a placeholder of the policy's."""
    red, blue, green = square("red", 1), square("blue", 2, edge=24), square("green", 3)
    return [
        sample(processor, [[0, 6, *IMAGE, 10, 11], [16, 1]], [red], seed=1),
        sample(processor, [[0, *IMAGE, 12], [17, 3], [*IMAGE, 6], [18, 18, 1]], [blue, green], seed=2),
        sample(processor, [[0, 6, 10], [19, 1]], seed=3),
        sample(processor, [[0, *IMAGE], [PAD, 16], [*IMAGE], [1]], [green, red], seed=4),
    ]


def completed(prompt, token_ids):
    """A prompt with its completion, as the learner sees it."""
    return replace(Sample.of_policy(np.array([*prompt.token_ids, *token_ids])), images=prompt.images)


def plain_logprobs(folder, one):
    """Log-probs of all tokens but the first, of a sample alone, by transformers' own forward pass."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    processor = Processor.of_model(str(folder))
    ids = torch.from_numpy(one.token_ids)[None]
    types = torch.zeros_like(ids)
    for image in one.images:
        types[0, list(processor.span(image))] = 1
    given = {}
    if one.images:
        patches = [processor.patches(image) for image in one.images]
        grids = torch.tensor([each.grid for each in patches])
        given["position_ids"] = model.model.get_rope_index(ids, types, grids)[0]
        # Their places by hand: transformers takes the policy's own placeholders for images.
        pixels = torch.from_numpy(np.concatenate([each.pixels for each in patches]))
        found = model.model.get_image_features(pixels, grids, return_dict=True).pooler_output
        embeddings = model.get_input_embeddings()(ids)
        embeddings[types.bool()] = torch.cat(tuple(found))
        given["inputs_embeds"] = embeddings
    else:
        given["input_ids"] = ids
    logits = model(**given).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, ids[0, 1:, None]).squeeze(-1)
