"""Write the model that the example trains: a small transformer that knows nothing, with one token per word and number.

python examples/math/make_model.py [FOLDER [VOCABULARY]]

VOCABULARY is a number of tokens that a tensor size divides; those beyond the words stay unused.
"""

import argparse
import re

import torch
from make_data import LARGEST, NAMES, THINGS, VERBS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

MARKS = ["<end>", "<user>", "<assistant>"]
AROUND = [" has ", " ", " and ", ". How many?", "Answer:\n\n\\boxed{", "}"]
NUMBERS = [str(number) for number in range(2 * LARGEST + 1)]
WORDS = [*MARKS, *AROUND, *NUMBERS, *NAMES, *THINGS, *VERBS]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{{ '<end>' if message['role'] == 'assistant' }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
)


def write_model(folder: str, vocabulary: int = len(WORDS)) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=max(vocabulary, len(WORDS)),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=0,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    pattern = "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs/math-model", metavar="FOLDER")
    parser.add_argument("vocabulary", nargs="?", type=int, default=len(WORDS), metavar="VOCABULARY")
    given = parser.parse_args()
    logging.disable_progress_bar()
    write_model(given.folder, given.vocabulary)
    print("model:", given.folder)
