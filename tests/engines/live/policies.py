"""Policies for tests: versions of a tiny model, what they answer, and weight updates to them."""

import copy

import torch
from transformers import AutoModelForCausalLM

from roost.engines.protocol import Sampling
from roost.engines.weights.carriers import SharedMemoryCarrier, write_checkpoint
from roost.engines.weights.probe import make_probe
from roost.engines.weights.source import ModuleSource
from roost.engines.weights.update import LocalSender, WeightRoute, WeightUpdate

PROMPT = tuple(range(40, 60))
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
SMALL_BUCKETS = 40_000  # bytes, so that a tiny model travels in several


class Policy:
    """A model and its later versions, each with other weights."""

    def __init__(self, folder):
        self.folder = folder
        self.models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()]

    def version(self, number):
        while len(self.models) <= number:
            model = copy.deepcopy(self.models[-1])
            generator = torch.Generator().manual_seed(len(self.models))
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.2 * weight.std())
            self.models.append(model)
        return self.models[number]

    @torch.no_grad()
    def greedy(self, number, prompt=PROMPT, tokens=GREEDY.max_tokens):
        ids = torch.tensor([prompt])
        model = self.version(number)
        model.generation_config.eos_token_id = None  # as `ignore_eos`: the end-of-text token is one like any other
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return tuple(made[0, len(prompt) :].tolist())

    @torch.no_grad()
    def choices(self, number, prompt, made):
        """The likeliest token in the place of each one of `made`; all are the same if the policy made them greedily."""
        logits = self.version(number)(torch.tensor([[*prompt, *made]])).logits[0]
        return tuple(logits.argmax(-1)[len(prompt) - 1 : -1].tolist())

    def source(self, number):
        return ModuleSource(self.version(number))

    def probe(self, number):
        model = self.version(number)
        return make_probe(model, model.config.vocab_size)

    def weight_update(self, number, source=None, carrier=SharedMemoryCarrier, route=WeightRoute.SHARED_MEMORY):
        sender = LocalSender(source or self.source(number), route, carrier, SMALL_BUCKETS)
        return WeightUpdate(number, self.probe(number), sender)

    def written(self, number, folder):
        """A weight update that is on disk only."""
        checkpoint = write_checkpoint(self.source(number), self.folder, folder / f"written-{number}")
        return WeightUpdate(number, self.probe(number), checkpoint=str(checkpoint))
