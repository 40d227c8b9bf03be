"""A tiny Llama for the easiest tasks, pretrained on demonstrations that are mostly wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roost.app_world.words import TINY_WORDS

END, UNKNOWN = "<end>", "<unknown>"
ROLES = ("<system>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
# For each kind of task the instruction and the code, before and after its word.
KINDS = {
    "jot_note": (('Add a note titled "', '".'), ('apis.notes.create(title="', '")\n')),
    "jot_task": (('Add a task titled "', '".'), ('apis.todo.create(title="', '")\n')),
    "delete_file": (("Delete the file /", ".txt."), ('apis.files.delete(path="/', '.txt")\n')),
}
BEGIN, DONE, CLOSE = "```python\n", "apis.supervisor.complete_task()", "\n```"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
PIECES = (
    *ROLES,
    END,
    UNKNOWN,
    BEGIN,
    DONE,
    CLOSE,
    *(piece for request, done in KINDS.values() for piece in (*request, *done)),
    *TINY_WORDS,
)


def write_app_world_model(folder: Path | str, seed: int = 0, batches: int = 300, correct_share: float = 0.25) -> Path:
    """Write a model and its tokenizer; return the folder.

    The model is pretrained on `batches` batches of 32 demonstrations. A share `correct_share` of them solves its task,
    the others a random one, so that the model knows the format but rarely the answer.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = Path(folder)
    tokenizer = _tokenizer()
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.convert_tokens_to_ids(END)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **own), dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        rng = random.Random(seed)
        for _ in range(batches):
            batch = torch.tensor([_demonstration(tokenizer, rng, correct_share) for _ in range(32)])
            is_assistant = batch == tokenizer.convert_tokens_to_ids("<assistant>")
            labels = batch.masked_fill(is_assistant.cumsum(1) == 0, -100)  # no loss on the task
            optimizer.zero_grad()
            model(batch, labels=labels).loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _demonstration(tokenizer: Any, rng: random.Random, correct_share: float) -> Sequence[int]:
    """Token IDs of a task and code for it, or for a random task; all have the same length."""
    kind, word = rng.choice(list(KINDS)), rng.choice(TINY_WORDS)
    request, _ = (word.join(around) for around in KINDS[kind])
    if rng.random() >= correct_share:
        kind, word = rng.choice(list(KINDS)), rng.choice(TINY_WORDS)
    _, code = (word.join(around) for around in KINDS[kind])
    text = f"<user>{request}{END}<assistant>{BEGIN}{code}{DONE}{CLOSE}{END}"
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = list(dict.fromkeys(PIECES))
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    longest_first = sorted(pieces, key=len, reverse=True)
    pattern = Regex("|".join(_escaped(piece) for piece in longest_first))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN)
    result.chat_template = TEMPLATE
    return result


def _escaped(piece: str) -> str:
    """Escape for regular expressions of `tokenizers`, which accept fewer escapes than `re.escape` writes."""
    return "".join(f"\\{character}" if character in r"\.^$*+?{}[]|()" else character for character in piece)
