"""A small model that was taught a few turns by heart, in Qwen's chat format with a tool."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roost.engines.tiny_model import SIZES
from roost.rollout.agents.chat_format import ChatFormat
from tests.rollout.agents.talk import QWEN_TOKENIZER, assistant, ids, tool, user

FIND = {"name": "find", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FIND}]
ASKS, CALL = user("Colour of the sun?"), '<tool_call>\n{"name": "find", "arguments": {"word": "sun"}}\n</tool_call>'
COUNT, COUNTED = user("Count."), "one two three four"
ANSWER = "It is yellow."


def taught():
    """Prompts as token IDs, and what the model is to say."""
    form = ChatFormat(QWEN_TOKENIZER)
    opening = form.opening([ASKS], TOOLS)
    reported = (*ids(CALL), QWEN_TOKENIZER.eos_token_id)
    shown = [ASKS, assistant(CALL)]
    after = form.continuation(shown, [1], QWEN_TOKENIZER.eos_token_id, [tool("yellow")], TOOLS)
    return [
        (opening, reported),
        ((*opening, *reported, *after), (*ids(ANSWER), QWEN_TOKENIZER.eos_token_id)),
        (form.opening([COUNT]), (*ids(COUNTED), QWEN_TOKENIZER.eos_token_id)),
    ]


def write_taught_model(folder):
    """Write the model; raise if it has not learnt its turns."""
    sizes = {**SIZES, "vocab_size": len(QWEN_TOKENIZER), "eos_token_id": QWEN_TOKENIZER.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes), dtype=torch.float32)
    lessons = [
        (torch.tensor([[*prompt, *reported]]), torch.tensor([[*[-100] * len(prompt), *reported]]))
        for prompt, reported in taught()
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.set_num_threads(1)  # as the engine's tests: matrices this small are not worth a second core
    for _ in range(300):
        losses = [model(input_ids=tokens, labels=labels).loss for tokens, labels in lessons]
        loss = torch.stack(losses).sum()
        if loss.item() < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1, f"it has not learnt its turns: the loss is {loss.item()}"
    model.save_pretrained(folder)
    QWEN_TOKENIZER.save_pretrained(folder)
    return folder
