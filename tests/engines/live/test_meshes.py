"""Weights of learners on every mesh reach a server of vLLM: it answers as the learner of each mesh does."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roost.config.train import OptimizerSettings
from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import Sampling
from roost.engines.server_process import LocalOwner
from roost.engines.tiny_model import write_tiny_model
from roost.engines.weights.carriers import write_checkpoint
from roost.engines.weights.probe import Probe, probe_tokens
from roost.engines.weights.source import WeightStream
from roost.engines.weights.update import WeightUpdate
from roost.learner.learner import Learner
from roost.learner.sample import Sample
from tests.engines.live.conftest import SIZES, spec_of
from tests.learner.random_samples import CPU, random_samples, settings_of, totals_of
from tests.learner.ranks import EXPERT, MESHES, meet_in_pairs, on_ranks, ranks_of, sizes_of

FAMILIES = {"qwen2": MESHES, "qwen3_moe": EXPERT}
RUNS = [(family, mesh) for family, meshes in FAMILIES.items() for mesh in meshes]
HEADS = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}  # for tensor and context groups of 4
# Without it, no reload of a mixture passes its probe, and each update ends in a restart of the server.
PACKED = ("--worker-extension-cls", "tests.engines.live.packed_experts.PackedExperts")
PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(max_tokens=16, seed=3, ignore_eos=True)
TOLERANCE = 2e-3  # of log-probs in float32
# Steps large enough that the old weights are clearly not taken for the new ones.
FAST = OptimizerSettings(learning_rate=3e-2, adam_epsilon=1e-4, max_grad_norm=0.0)


def learn_on_meshes(rank, models, folder):
    """Learn on each mesh from other samples, write the weights for engines, and return the probes of this rank.

    Meshes of four come first; then two worlds of two ranks work side by side.
    """
    fours, pairs = ([run for run in RUNS if ranks_of(run[1]) == count] for count in (4, 2))
    found = {run: learn(rank, run, models, folder) for run in fours}
    meet_in_pairs(rank, folder)
    return found | {run: learn(rank % 2, run, models, folder) for run in pairs[rank // 2 :: 2]}


def learn(rank, run, models, folder):
    family, mesh = run
    learner = Learner(settings_of(models[family], parallel=sizes_of(mesh), optimizer=FAST), CPU)
    assert learner._mesh.sizes == mesh
    samples = random_samples(12, 9, 7, 15, seed=RUNS.index(run))
    learner.learn(samples[rank :: ranks_of(mesh)], totals_of(samples))
    stream = WeightStream(learner.module, torch.float32)
    if rank == 0:
        write_checkpoint(stream, models[family], folder_of(run, folder))
    stream.finish()
    tokens = probe_tokens(learner.module.config.vocab_size)
    [logprobs] = learner.score([Sample.of_policy(np.array(tokens))], temperature=1.0)
    return Probe(tokens, tuple(logprobs[1:].tolist()), TOLERANCE)


def folder_of(run, folder):
    return Path(folder) / str(RUNS.index(run))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of a tiny model of each family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: str(write_tiny_model(folder / family, family, **SIZES | HEADS)) for family in FAMILIES}


@pytest.fixture(scope="module")
def learnt(models, tmp_path_factory):
    """Folder with the weights of each run, and the probes of each by its learner's ranks."""
    folder = tmp_path_factory.mktemp("meshes")
    of_ranks = on_ranks(4, learn_on_meshes, models, str(folder))
    return folder, {run: [found[run] for found in of_ranks if run in found] for run in RUNS}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_takes_the_weights_of_every_mesh(learnt, models, tmp_path, family):
    folder, probes = learnt
    runs = [run for run in RUNS if run[0] == family]
    for run in runs:
        first, *others = probes[run]
        assert len(others) + 1 == ranks_of(run[1])
        assert all(first.difference(other.logprobs) < TOLERANCE for other in others)

    spec = spec_of(EngineKind.VLLM, models[family])
    if family == "qwen3_moe":
        spec = replace(spec, args=(*spec.args, *PACKED))

    async def answers():
        found = []
        async with Fleet([LocalOwner(spec, tmp_path)]) as fleet:
            [member] = fleet.pool.members.values()
            engine = member.engine
            for version, run in enumerate(runs, 1):
                probe = probes[run][0]
                before = await engine.score(probe.token_ids)
                assert probe.difference(before) > 100 * TOLERANCE, run  # of other weights
                await fleet.update(WeightUpdate(version, probe, checkpoint=str(folder_of(run, folder))))
                assert member.engine is engine, run  # not a server that was started with the weights
                after = await engine.score(probe.token_ids)
                found.append((run, probe.difference(after), await fleet.generate(PROMPT, SAMPLING)))
        return found

    for version, (run, difference, made) in enumerate(asyncio.run(answers()), 1):
        assert difference < TOLERANCE, run
        assert [span.version for span in made.versions] == [version]
        expected = logprobs_of(folder_of(run, folder), PROMPT, made.token_ids)
        assert made.logprobs == pytest.approx(expected, abs=TOLERANCE), run


@torch.no_grad()
def logprobs_of(folder, prompt, made):
    """Log-probs of transformers with the weights of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *made]])
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[len(prompt) - 1 :].tolist()
