"""Weights of learners on meshes reach one server of vLLM: it answers as the learner of each mesh does."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from roost.config.job import MeshSizes, ParallelSizes
from roost.config.train import OptimizerSettings
from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import Sampling
from roost.engines.server_process import LocalOwner
from roost.engines.weights.carriers import write_checkpoint
from roost.engines.weights.probe import Probe, probe_tokens
from roost.engines.weights.source import WeightStream
from roost.engines.weights.update import WeightUpdate
from roost.learner.distributed import close_distributed, init_distributed
from roost.learner.learner import Learner
from roost.learner.sample import Sample
from tests.engines.live.conftest import spec_of
from tests.learner.random_samples import CPU, random_samples, settings_of, totals_of
from tests.learner.ranks import READ, on_ranks
from tests.limits import HANG_S

MESHES = {
    "2 shard x 2 tensor": MeshSizes(1, 2, 1, 2),
    "2 shard": MeshSizes(1, 2, 1, 1),
    "2 tensor": MeshSizes(1, 1, 1, 2),
    "2 context": MeshSizes(1, 1, 2, 1),
}
PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(max_tokens=16, seed=3, ignore_eos=True)
TOLERANCE = 2e-3  # of log-probs in float32
# Steps large enough that the old weights are clearly not taken for the new ones.
FAST = OptimizerSettings(learning_rate=3e-2, adam_epsilon=1e-4, max_grad_norm=0.0)


def learn_on_meshes(rank, model, folder):
    """Learn on each mesh from other samples, write the weights for engines, and return the probes of the first ranks.

    The mesh of four comes first; then two worlds of two ranks work side by side.
    """
    folder = Path(folder)
    (wide, mesh), *pairs = MESHES.items()
    found = {wide: learn(rank, model, 0, mesh, folder / wide)}
    close_distributed()
    if rank == 2:
        PreTrainedModel.from_pretrained = READ  # the first of its world reads the model
    init_distributed(rank % 2, 2, "", 0, CPU, HANG_S, folder / f"meeting {rank // 2}")
    for number, (name, mesh) in list(enumerate(pairs, 1))[rank // 2 :: 2]:
        found[name] = learn(rank % 2, model, number, mesh, folder / name)
    return found


def learn(rank, model, seed, mesh, folder):
    sizes = ParallelSizes(tensor=mesh.tensor, context=mesh.context, shard=mesh.fsdp)
    learner = Learner(settings_of(model, parallel=sizes, optimizer=FAST), CPU)
    assert learner._mesh.sizes == mesh
    samples = random_samples(12, 9, 7, 15, seed=seed)
    ranks = mesh.data * mesh.model
    learner.learn(samples[rank::ranks], totals_of(samples))
    stream = WeightStream(learner.module, torch.float32)
    if rank == 0:
        write_checkpoint(stream, model, folder)
    stream.finish()
    tokens = probe_tokens(learner.module.config.vocab_size)
    [logprobs] = learner.score([Sample.of_policy(np.array(tokens))], temperature=1.0)
    return Probe(tokens, tuple(logprobs[1:].tolist()), TOLERANCE)


@pytest.fixture(scope="module")
def learnt(model_folder, tmp_path_factory):
    """Folder with the weights of each mesh, and the probe of each by its learner."""
    folder = tmp_path_factory.mktemp("meshes")
    of_ranks = on_ranks(4, learn_on_meshes, str(model_folder), str(folder))
    return folder, {name: [found[name] for found in of_ranks if name in found] for name in MESHES}


@pytest.mark.long
@pytest.mark.vllm
def test_vllm_takes_the_weights_of_every_mesh(learnt, model_folder, tmp_path):
    folder, probes = learnt
    for name, mesh in MESHES.items():
        first, *others = probes[name]
        assert len(others) + 1 == mesh.data * mesh.model
        assert all(first.difference(other.logprobs) < TOLERANCE for other in others)

    async def answers():
        async with Fleet([LocalOwner(spec_of(EngineKind.VLLM, model_folder), tmp_path)]) as fleet:
            [member] = fleet.pool.members.values()
            for version, (name, (probe, *_)) in enumerate(probes.items(), 1):
                before = await member.engine.score(probe.token_ids)
                assert probe.difference(before) > 100 * TOLERANCE  # of other weights
                await fleet.update(WeightUpdate(version, probe, checkpoint=str(folder / name)))
                after = await member.engine.score(probe.token_ids)
                yield name, probe.difference(after), await fleet.generate(PROMPT, SAMPLING)

    async def collected():
        return [answer async for answer in answers()]

    for version, (name, difference, made) in enumerate(asyncio.run(collected()), 1):
        assert difference < TOLERANCE, name
        assert [span.version for span in made.versions] == [version]
        assert made.logprobs == pytest.approx(logprobs_of(folder / name, PROMPT, made.token_ids), abs=TOLERANCE)


@torch.no_grad()
def logprobs_of(folder, prompt, made):
    """Log-probs of transformers with the weights of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *made]])
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[len(prompt) - 1 :].tolist()
