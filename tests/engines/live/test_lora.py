"""Adapters in real engines: loaded, replaced under their name, used beside the model itself, and let go.

Their context is small, so the test of a full context is here.
"""

import asyncio

import pytest

from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import EngineRefused, Finish, Sampling, UpdateFailed
from roost.engines.weights.probe import make_probe
from roost.engines.weights.update import WeightUpdate
from tests.engines.live.conftest import spec_of

RANK = 4
SMALL_CONTEXT = 256
TOLERANCE = 1e-3
PROMPT = [72, 101, 108, 108, 111]
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def running_engine(engine_kind, start_engine, model_folder):
    return start_engine(spec_of(engine_kind, model_folder, lora_rank=RANK, max_context=SMALL_CONTEXT))


@pytest.fixture(scope="module")
def adapted(model_folder, tmp_path_factory):
    """Writes an adapter by its seed: its folder, and the model with it as peft runs it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def write(seed):
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        config = LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        folder = tmp_path_factory.mktemp("adapters") / f"adapter-{seed}"
        model.save_pretrained(folder)
        return str(folder), model

    return write


def logprobs_of(model, done):
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, done.token_ids, strict=True)]


async def with_adapter(engine):
    return await engine.generate(PROMPT, GREEDY, adapter="policy")


def test_a_completion_ends_where_the_context_is_full(running_engine):
    prompt = [1] * (SMALL_CONTEXT - 5)
    done = running_engine.run(lambda engine: engine.generate(prompt, GREEDY))
    assert (len(done.token_ids), done.finish) == (5, Finish.LENGTH)


def test_requests_with_and_without_an_adapter_at_once(running_engine, engine_kind, adapted):
    if engine_kind is EngineKind.VLLM:
        pytest.skip("vLLM 0.32 for CPUs applies an adapter to all requests of a batch")

    async def scenario(engine):
        plain = await engine.generate(PROMPT, GREEDY)
        await engine.load_adapter("policy", adapted(1)[0])
        alone = await with_adapter(engine)
        together = await asyncio.gather(with_adapter(engine), engine.generate(PROMPT, GREEDY))
        await engine.unload_adapter("policy")
        return (alone, plain), together

    apart, together = running_engine.run(scenario)
    assert [done.token_ids for done in together] == [done.token_ids for done in apart]


def test_an_adapter_is_loaded_replaced_and_let_go(running_engine, adapted):
    (first_folder, first), (second_folder, second) = adapted(1), adapted(2)

    async def scenario(engine):
        assert (await engine.capabilities()).takes_adapters
        plain = await engine.generate(PROMPT, GREEDY)
        await engine.load_adapter("policy", first_folder)
        with_first, still_plain = await with_adapter(engine), await engine.generate(PROMPT, GREEDY)
        score = await engine.score(PROMPT, adapter="policy")
        await engine.load_adapter("policy", second_folder)
        with_second = await with_adapter(engine)
        await engine.unload_adapter("policy")
        with pytest.raises(EngineRefused, match="policy"):
            await with_adapter(engine)
        with pytest.raises(EngineRefused):
            await engine.load_adapter("policy", first_folder + "-that-is-not-there")
        return plain, with_first, still_plain, score, with_second, await engine.generate(PROMPT, GREEDY)

    plain, with_first, still_plain, score, with_second, plain_again = running_engine.run(scenario)
    assert plain.token_ids == still_plain.token_ids == plain_again.token_ids
    assert with_first.token_ids != plain.token_ids
    assert with_first.logprobs == pytest.approx(logprobs_of(first, with_first), abs=TOLERANCE)
    assert with_second.logprobs == pytest.approx(logprobs_of(second, with_second), abs=TOLERANCE)
    assert score == pytest.approx(scores_of(first), abs=TOLERANCE)


def scores_of(model):
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [float(rows[place, token]) for place, token in enumerate(PROMPT[1:])]


class Borrowed:
    """Owns a server that others started, and leaves it alone."""

    def __init__(self, running):
        self.spec = running.spec
        self._url = running.url

    async def start(self, model=None):
        return self._url

    async def stop(self):
        pass

    async def is_running(self):
        return True


def test_updates_of_an_adapter(running_engine, engine_kind, adapted):
    """Only the adapter is trained: engines keep the model, and serve the newest adapter as the policy."""
    adapters = {number: adapted(number + 10) for number in (1, 2)}

    def weight_update(number):
        folder, model = adapters[number]
        return WeightUpdate(number, make_probe(model, vocabulary=256), adapter=folder)

    async def scenario():
        made = []
        async with Fleet([Borrowed(running_engine)]) as fleet:
            member = next(iter(fleet.pool.members.values()))
            for number in (1, 2):
                await fleet.update(weight_update(number))
                made.append(await fleet.generate(PROMPT, GREEDY))
            adapter = member.adapter
            if engine_kind is EngineKind.TORCH:  # others would be started again, which this owner does not do
                with pytest.raises(UpdateFailed, match="does not answer with the new weights"):
                    wrong = WeightUpdate(3, make_probe(adapters[2][1], vocabulary=256), adapter=adapters[1][0])
                    await fleet.update(wrong)
                made.append(await fleet.generate(PROMPT, GREEDY))
            return made, adapter

    made, adapter = asyncio.run(scenario())
    for number, completion in zip((1, 2, 2), made, strict=False):
        assert completion.logprobs == pytest.approx(logprobs_of(adapters[number][1], completion), abs=TOLERANCE)
        assert [span.version for span in completion.versions] == [number]
    assert made[0].token_ids != made[1].token_ids
    assert adapter == "policy-2"
