"""Images of coloured squares, and a small vision-language model with one token per word, for a laptop."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from roost.rollout.rewards.reward import Answer, Reads, right_answers, wrong_answer
from roost.vision.image import Image, png

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (230, 210, 50)}
QUESTION = "what colour is the square ?"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = ("user", "assistant", "system", "<unk>", *QUESTION.split(), *COLOURS)
VOCABULARY = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PATCH = 4  # pixels; an image of 16 x 16 has 16 patches, and 4 tokens
TEXT_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": VOCABULARY["<|im_end|>"],
    "initializer_range": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
VISION_SIZES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.05,
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2},
}
WIDTH_KEY = {"qwen2_5_vl": "out_hidden_size", "qwen2_vl": "hidden_size"}  # of the vision tower's output


def square(colour: str, seed: int, edge: int = 16) -> bytes:
    """A PNG of a square of about this colour at a random place on a grey background."""
    from PIL import Image as Pillow

    rng = random.Random(seed)
    background = rng.randrange(90, 170)
    image = Pillow.new("RGB", (edge, edge), (background,) * 3)
    size = rng.randrange(edge // 2, edge - 1)
    left, top = rng.randrange(edge - size), rng.randrange(edge - size)
    shade = tuple(max(0, min(255, part + rng.randrange(-25, 26))) for part in COLOURS[colour])
    image.paste(shade, (left, top, left + size, top + size))
    return png(image)


def rows(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows of a data set: a question with an image, and the name of its colour."""
    names = list(COLOURS)
    for number in range(count):
        colour = names[number % len(names)]
        image = Image(square(colour, seed * count + number)).data_url
        yield {"prompt": f"<image>{QUESTION}", "image": image, "answer": colour}


def write_colour_data(path: Path | str, count: int = 64, seed: int = 0) -> Path:
    """Write rows as JSON lines; return the file."""
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed)))
    return path


def write_colour_model(folder: Path | str, family: str = "qwen2_5_vl", seed: int = 0, **sizes: Any) -> Path:
    """Write an untrained vision-language model, its tokenizer and its image processor; return the folder.

    `sizes` replace those of the text model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

    folder = Path(folder)
    text = {**TEXT_SIZES, **sizes}
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config={**VISION_SIZES, **FAMILY_SIZES[family], WIDTH_KEY[family]: text["hidden_size"]},
        image_token_id=VOCABULARY["<|image_pad|>"],
        video_token_id=VOCABULARY["<|video_pad|>"],
        vision_start_token_id=VOCABULARY["<|vision_start|>"],
        vision_end_token_id=VOCABULARY["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    pixels = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=pixels).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


class ColourName:
    """Reward: 1 for the name of the colour alone, 0.5 if more follows it, else 0."""

    reads: ClassVar[Reads] = {"answer": wrong_answer}

    async def score(self, answer: Answer) -> float:
        said, [wanted] = answer.text.split(), right_answers(answer.task, "answer")
        return 1.0 if said == [wanted] else 0.5 if said[:1] == [wanted] else 0.0

    async def close(self) -> None:
        pass
