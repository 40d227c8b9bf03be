"""Weights that ranks write to shared files: as gathered ones, from every mesh, and as many bytes as the plan says."""

import asyncio
import contextlib
import resource
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import roost
from roost.config.job import ParallelSizes
from roost.engines.protocol import UpdateFailed
from roost.engines.tiny_model import write_tiny_model
from roost.engines.weights import carriers
from roost.engines.weights.payload import SharedMemory
from roost.engines.weights.shards import ShardFiles
from roost.engines.weights.source import WeightStream
from roost.engines.weights.update import send
from roost.learner.learner import Learner
from tests.learner.random_samples import CPU, settings_of
from tests.learner.ranks import on_ranks

BUCKET = 40_000  # bytes: several buckets, which cut a layer's experts
MESHES = {
    "fsdp": ParallelSizes(),
    "hsdp": ParallelSizes(shard=2),
    "tensor": ParallelSizes(tensor=2),
    "tensor alone": ParallelSizes(tensor=4, shard=1),
    "context": ParallelSizes(context=2),
    "hsdp, tensor": ParallelSizes(tensor=2, shard=1),
}
EXPERTS = {
    "experts": ParallelSizes(expert=2),
    "experts alone": ParallelSizes(expert=4),
    "experts, hsdp": ParallelSizes(expert=2, shard=2),
    "experts, tensor": ParallelSizes(expert=2, tensor=2),
    "experts, hsdp, tensor": ParallelSizes(expert=2, tensor=2, shard=1),
}
CASES = [("qwen2", name) for name in MESHES] + [("qwen3_moe", name) for name in ("fsdp", *EXPERTS)]


class Communicated(TorchDispatchMode):
    """Bytes that this thread of a rank receives from others in gathering."""

    received = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(function):
            self.received += found.numel() * found.element_size() - args[0].numel() * args[0].element_size()
        return found


class CountedFiles(ShardFiles):
    """Counts what the sender receives as well: it streams in a thread of its own, where it packs."""

    received = 0

    def pack(self, infos, tensors, is_last):
        with Communicated() as gathering:
            payload = super().pack(infos, tensors, is_last)
        self.received += gathering.received
        return payload


class Receiver:
    """An engine that loads files; it fails at a bucket if told so."""

    url = "http://engine"

    def __init__(self, fails_at=None):
        self.tensors, self.buckets, self.fails_at = {}, 0, fails_at

    async def start_update(self, manifest):
        self.manifest = manifest

    async def take(self, payload):
        assert isinstance(payload.by, SharedMemory)
        if self.buckets == self.fails_at:
            raise UpdateFailed("no")
        self.buckets += 1
        self.tensors |= {name: tensor.clone() for name, tensor in load_file(payload.by.path).items()}
        self.folder = Path(payload.by.path).parent

    async def finish_update(self, version):
        pass

    async def abandon_update(self):
        pass


def sent_by(learner, rank, fails_at=None):
    """Send as a learner's worker does; what the engine of the sender has, and the bytes that this rank wrote."""
    files = CountedFiles(learner.module, torch.bfloat16, 1, BUCKET)
    engine = Receiver(fails_at)
    try:
        sent = asyncio.run(send([engine], files, 3, files, BUCKET, with_fingerprints=True)) if rank == 1 else None
    finally:
        files.finish()
    return files, engine, sent


def on_meshes(rank, models):
    found = {}
    for family, name in CASES:
        learner = Learner(settings_of(models[family], parallel=(MESHES | EXPERTS)[name]), CPU)
        with Communicated() as gathering:
            stream = WeightStream(learner.module, torch.bfloat16)
            gathered = dict(zip((info.name for info in stream.tensors), stream.stream(), strict=True))
        with Communicated() as sharing:
            files, engine, sent = sent_by(learner, rank)
        found[family, name] = {
            "wrote": files.written,
            "gathered": gathering.received,
            "shared": sharing.received + files.received,
            "size": sent and sent.size,
            "fingerprints": sent and len(sent.fingerprints),
            "differ": rank == 1 and [key for key in gathered if not torch.equal(gathered[key], engine.tensors[key])],
            "complete": rank == 1 and engine.tensors.keys() == gathered.keys(),
            "buckets": engine.buckets,
            "left": rank == 1 and engine.folder.exists(),
        }
    files, engine, sent = sent_by(learner, rank, fails_at=1)
    after = torch.ones(1)
    dist.all_reduce(after)
    return found | {"failed": {"failed": sent and list(sent.failed), "after": after.item(), "buckets": engine.buckets}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen2": str(write_tiny_model(folder / "dense", "qwen2", tie_word_embeddings=True, **sizes)),
        "qwen3_moe": str(write_tiny_model(folder / "mixture", "qwen3_moe", **sizes)),
    }


@pytest.fixture(scope="module")
def of_ranks(models):
    return on_ranks(4, on_meshes, models)


def planned(model, sizes, engine):
    """Routes of a plan with a learner of four ranks, to an engine on a device of its own or without one."""
    config = {
        "cluster": {
            "num_nodes": 1,
            "num_gpus_per_node": 5,
            "component_placement": {"actor": {"placement": "0-3"}, "rollout": engine},
            "node_groups": [{"label": "hosts", "node_ranks": 0, "ignore_hardware": True}],
        },
        "actor": {
            "training_backend": "fsdp",
            "fsdp_config": {"fsdp_size": sizes.shard or -1},
            "model": {
                "model_path": model,
                "tensor_model_parallel_size": sizes.tensor,
                "context_parallel_size": sizes.context,
                "expert_model_parallel_size": sizes.expert,
            },
        },
        "rollout": {"model": {"model_path": model}},
    }
    (routes,) = roost.plan(config, layout="as_written").routes.engines
    return routes


@pytest.mark.parametrize("case", CASES, ids=map(str, CASES))
def test_shards_of_every_mesh_are_the_whole_weights(of_ranks, models, case):
    found = [each[case] for each in of_ranks]
    sender = found[1]
    assert sender["complete"]
    assert sender["differ"] == []
    assert sender["buckets"] > 3
    assert sender["fingerprints"] > 3
    assert not sender["left"]
    assert all(each["shared"] == 0 for each in found), "no rank gathers"
    assert sum(each["wrote"] for each in found) == sender["size"]
    assert max(each["wrote"] for each in found) < 0.3 * sender["size"], "each rank writes its share, also of copies"


@pytest.mark.parametrize("case", CASES, ids=map(str, CASES))
def test_bytes_are_those_of_the_plan(of_ranks, models, case):
    found = [each[case] for each in of_ranks]
    family, name = case
    sizes = (MESHES | EXPERTS)[name]
    by_files = planned(models[family], sizes, {"node_group": "hosts", "placement": "0"})
    assert (by_files.weight_bytes, by_files.gathered_bytes) == (found[1]["size"], 0)
    by_device = planned(models[family], sizes, "4")
    assert by_device.weight_bytes == found[1]["size"]
    # Norms and routers are whole in each rank of a tensor group, which the plan counts as divided.
    near = 0.02 if sizes.tensor > 1 else 0
    assert [each["gathered"] for each in found] == [pytest.approx(by_device.gathered_bytes, rel=near, abs=1)] * 4


def test_an_update_that_fails_ends_on_all_ranks(of_ranks):
    found = [each["failed"] for each in of_ranks]
    assert found[1]["failed"] == ["http://engine"]
    assert found[1]["buckets"] == 1
    assert all(each["after"] == 4 for each in found), "collectives that follow are not mixed up"


@contextlib.contextmanager
def no_more_files():
    """This process cannot open files, nor map them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_folder():
    """This process has no place for files, in memory or on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carriers, "MEMORY_FOLDER", Path("/nowhere"))
        patch.setattr(tempfile, "tempdir", "/nowhere")
        yield


FAILURES = {"another rank maps no file": (0, no_more_files), "the sender makes no folder": (1, no_folder)}


def failing(rank, model):
    learner = Learner(settings_of(model), CPU)
    with pytest.raises(ValueError, match="no file holds this bucket"):
        ShardFiles(learner.module, None, 1, BUCKET).pack((), iter(()), is_last=False)
    found = {}
    for case, (fails, failure) in FAILURES.items():
        with failure() if rank == fails else contextlib.nullcontext():
            try:
                sent_by(learner, rank)
                found[case] = ""
            except UpdateFailed as error:
                found[case] = str(error)
    after = torch.ones(1)
    dist.all_reduce(after)
    return found | {"after": after.item()}


def test_an_error_of_one_rank_ends_the_update_on_all(models):
    one, sender = on_ranks(2, failing, models["qwen2"], limit_s=60)
    assert one["another rank maps no file"] == sender["another rank maps no file"]
    assert "rank 0 cannot write its shards: " in one["another rank maps no file"]
    assert (one["the sender makes no folder"], "/nowhere" in sender["the sender makes no folder"]) == ("", True)
    assert one["after"] == sender["after"] == 2, "collectives that follow are not mixed up"
