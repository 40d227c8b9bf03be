"""Small tokenizers with chat templates like those of known families, and engines that say what a test wants."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roost.engines.protocol import Finish
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.episode import Transcript
from tests.rollout.script import completion

# Adds a system message where there is none, lists tools, and shows outputs of tools as a user's.
QWEN = """{%- if messages[0].role != 'system' or tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role in ('user', 'assistant') or (message.role == 'system' and not (tools and loop.first)) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Leaves out the reasoning of turns before the last user's message; may prompt a turn without reasoning.
THINKING = """{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < last.user %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# Begins every turn with reasoning, also one that has none; and leaves it out before the last user's message.
REASONING = """{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set said = message.content.split('</think>') %}
{%- if message.role == 'assistant' and loop.index0 > last.user %}
{{- '<think>\\n' + (said[0] if said | length > 1 else '').split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

# Strips every text, and ends turns with a token and nothing else.
LLAMA = """{{- bos_token }}{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}{# ipython #}"""

# Puts the system's message before the last user's, which thereby changes with every message.
MISTRAL = """{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST]' }}
{%- if loop.index0 == last.user and messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- elif message.role != 'system' %}{{ raise_exception('only user and assistant') }}{% endif %}{%- endfor %}"""

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]"]
END, BEGIN = "<|endoftext|>", "<|begin|>"


def tokenizer(template=None, eos="<|im_end|>"):
    """Of bytes, with the merges that make ` hello` and `ab` one token."""
    merges = [("a", "b"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    model = models.BPE({word: index for index, word in enumerate(words)}, merges)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=eos,
        bos_token=BEGIN,
        extra_special_tokens=[token for token in (*SPECIAL, END) if token != eos],
    )
    fast.chat_template = template
    return fast


QWEN_TOKENIZER = tokenizer(QWEN)
KINDS = {
    "qwen": QWEN_TOKENIZER,
    "thinking": tokenizer(THINKING),
    "reasoning": tokenizer(REASONING),
    "llama": tokenizer(LLAMA, eos="<|eot_id|>"),
    "mistral": tokenizer(MISTRAL, eos=END),
    "plain": tokenizer(None, eos=END),
}


def ids(text, of=QWEN_TOKENIZER):
    return tuple(of(text, add_special_tokens=False).input_ids)


class Engine:
    """Says one thing after another: a text, which it ends, tokens as they are, or what a function does."""

    def __init__(self, *says, of=QWEN_TOKENIZER):
        self.of, self._says = of, list(says)
        self.asked, self.options = [], []

    async def sample(self, token_ids, turn, max_tokens, options=None):
        self.asked.append(tuple(token_ids))
        self.options.append(options)
        says = self._says.pop(0)
        if callable(says):
            says = await says()
        if isinstance(says, str):
            return completion((*ids(says, self.of), self.of.eos_token_id))
        finish = Finish.STOP if says[-1] == self.of.eos_token_id else Finish.LENGTH
        return completion(says, finish=finish)

    @property
    def shown(self):
        """Its prompts as text."""
        return [self.of.decode(asked, skip_special_tokens=False) for asked in self.asked]


def talk(engine, **settings):
    """A policy over an engine, and its transcript."""
    transcript = Transcript(engine.sample)
    return ChatPolicy(transcript, ChatFormat(engine.of, **settings)), transcript


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def tool(content):
    return {"role": "tool", "content": content}
