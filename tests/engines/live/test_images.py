"""vLLM shows a model images as the learner does: the same tokens, the same log-probs, also after a weight sync."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from roost.config.train import OptimizerSettings
from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import EngineRefused, Sampling
from roost.engines.server_process import LocalOwner
from roost.engines.weights.carriers import write_checkpoint
from roost.engines.weights.probe import Probe, probe_tokens, probe_with_image
from roost.engines.weights.source import ModuleSource
from roost.engines.weights.update import WeightUpdate
from roost.learner.learner import Learner
from roost.learner.sample import Sample
from roost.rollout.colours import square, write_colour_model
from roost.vision.processor import FAMILIES
from tests.engines.live.conftest import spec_of
from tests.learner.random_samples import CPU, settings_of, totals_of
from tests.vision.shown import IMAGE, WIDE, completed, sample, samples

FAST = OptimizerSettings(learning_rate=1e-2, adam_epsilon=1e-4, max_grad_norm=0.0)
TOLERANCE = 2e-3  # of log-probs in float32


def prompts_of(processor):
    """Prompts with one image, several, none, the same tokens with another image, and an image that is resized."""
    red, blue = (sample(processor, [[0, 6, *IMAGE, 10, 11]], [square(name, 1)]) for name in ("red", "blue"))
    assert red.token_ids.tolist() == blue.token_ids.tolist()
    resized = sample(processor, [[0, *IMAGE, 12]], [square("green", 4, edge=27)])
    return [*samples(processor)[:3], red, blue, resized]


async def differences(fleet, learner, prompts):
    """Largest difference of log-probs between engine and learner, of each prompt's completion."""
    found = []
    for prompt in prompts:
        sampling = Sampling(max_tokens=6, seed=1, ignore_eos=True, images=prompt.images)
        made = await fleet.generate(prompt.token_ids.tolist(), sampling)
        [wanted] = learner.score([completed(prompt, made.token_ids)])
        found.append(float(np.abs(wanted[len(prompt) :] - made.logprobs).max()))
    return found


def probe_of(learner):
    tokens, images = probe_with_image(probe_tokens(learner.module.config.get_text_config().vocab_size), learner.vision)
    [logprobs] = learner.score([replace(Sample.of_policy(np.array(tokens)), images=images)])
    return Probe(tokens, tuple(logprobs[1:].tolist()), TOLERANCE, images)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_and_learner_agree_on_images(family, tmp_path):
    folder = write_colour_model(tmp_path / "model", family, **WIDE)
    learner = Learner(settings_of(str(folder), optimizer=FAST), CPU)
    prompts, placeholder_said = prompts_of(learner.vision), samples(learner.vision)[3]
    first = probe_of(learner)

    async def scenario():
        async with Fleet([LocalOwner(spec_of(EngineKind.VLLM, folder, max_context=256), tmp_path)]) as fleet:
            await fleet.weights.calibrate(first)
            [member] = fleet.pool.members.values()
            before = await differences(fleet, learner, prompts)
            with pytest.raises(EngineRefused, match="vLLM would show the next image there"):
                shown = Sampling(images=placeholder_said.images)
                await fleet.generate(placeholder_said.token_ids.tolist(), shown)

            learnt = samples(learner.vision)
            visual = {name: weight.clone() for name, weight in learner.weights() if "visual" in name}
            learner.learn(learnt, totals_of(learnt))
            assert all((weight != visual[name]).any() for name, weight in learner.weights() if name in visual)
            written = write_checkpoint(ModuleSource(learner.module, torch.float32), folder, tmp_path / "written")
            await fleet.update(WeightUpdate(1, probe_of(learner), checkpoint=str(written)))
            return member.baseline, before, await differences(fleet, learner, prompts)

    baseline, before, after = asyncio.run(scenario())
    assert max(baseline, *before, *after) < TOLERANCE, (baseline, before, after)
    assert first.difference(probe_of(learner).logprobs) > 50 * TOLERANCE
