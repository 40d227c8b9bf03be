"""Offloading: memory is free, nothing else has changed."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from roost.config.train import AdapterSettings
from roost.learner.distributed import close_distributed, init_distributed
from roost.learner.residence import plain_tensors
from roost.trainer.learners import LearnerWorker
from roost.transport.host_tensors import tensor_parts
from tests.learner.random_samples import CPU, assert_equal, random_samples, totals_of, trained
from tests.limits import HANG_S

BATCHES = [random_samples(12, 9, seed=1), random_samples(20, 5, seed=2), random_samples(7, 30, seed=3)]


def bytes_held(learner, part):
    weights = list(learner.module.parameters())
    moments = [tensor for state in learner._optimizer.state.values() for tensor in state.values()]
    tensors = {"weight": weights, "optimizer": moments}[part]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_a_sharded_tensor_has_the_storage_of_its_local_one(tmp_path):
    init_distributed(0, 1, "", 0, CPU, HANG_S, tmp_path / "meeting")
    try:
        local = torch.ones(4)
        mesh = init_device_mesh("cpu", (1,))
        [plain] = plain_tensors(DTensor.from_local(local, mesh, [Shard(0)]))
    finally:
        close_distributed()
    assert plain.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


@pytest.mark.parametrize("adapter", [None, AdapterSettings(lora_rank=4)], ids=["all weights", "adapter"])
def test_learning_goes_on_as_if_never_offloaded(learner, adapter):
    expected, described = trained(learner(adapter=adapter), *BATCHES)
    one = learner(adapter=adapter)
    for samples in BATCHES:
        one.offload()
        one.load()
        weights, told_too = trained(one, samples)
    assert_equal(weights, expected)
    assert told_too == described


def test_the_memory_of_what_is_offloaded_is_free(learner):
    one = learner()
    held = {part: bytes_held(one, part) for part in ("weight", "optimizer")}
    one.offload(["optimizer"])
    assert (bytes_held(one, "weight"), bytes_held(one, "optimizer")) == (held["weight"], 0)
    one.offload()
    assert bytes_held(one, "weight") == 0
    one.load(["weight"])
    assert (bytes_held(one, "weight"), bytes_held(one, "optimizer")) == (held["weight"], 0)
    one.load()
    assert {part: bytes_held(one, part) for part in held} == held


def test_what_is_offloaded_in_the_background_is_freed_by_the_next_call(learner):
    expected, _ = trained(learner(), *BATCHES)
    one = learner()
    for samples, after in zip(BATCHES, (["weight"], [], None), strict=True):
        held = bytes_held(one, "optimizer")
        one.offload(["grad", "optimizer"], in_background=True)
        assert bytes_held(one, "optimizer") == held
        one.score(samples)  # weights are there
        if after is not None:
            one.offload(after)
            assert bytes_held(one, "optimizer") == 0
        one.load()
        assert bytes_held(one, "optimizer") == held
        weights, _ = trained(one, samples)
    assert_equal(weights, expected)


def test_what_leaves_in_the_background_cannot_be_changed(learner, tmp_path):
    """The next load brings back what was copied, so that a step in between would be lost."""
    samples = BATCHES[0]
    expected, _ = trained(learner(), samples)
    one = learner()
    one.save(tmp_path / "step")
    one.wait_saved()
    others = list(learner().weights())
    for parts, changes in (
        (["weight"], [lambda: one.take(others), lambda: one.restore(tmp_path / "step")]),
        (["optimizer"], [lambda: one.restore(tmp_path / "step")]),
    ):
        one.offload(parts, in_background=True)
        for change in (*changes, lambda: one.learn(samples, totals_of(samples))):
            with pytest.raises(RuntimeError, match=f"{parts[0]} are being offloaded; load them first"):
                change()
        one.score(samples)  # what only reads need not wait
        one.load()
    weights, _ = trained(one, samples)
    assert_equal(weights, expected)


def test_twice_is_as_once(learner):
    one, samples = learner(), BATCHES[0]
    before = one.score(samples)[0]
    one.load()
    for _ in range(2):
        one.offload()
    for _ in range(2):
        one.load()
    assert one.score(samples)[0].tolist() == before.tolist()


def test_tied_weights_stay_tied(models, learner):
    one = learner("llama")
    one.module.lm_head.weight = one.module.model.embed_tokens.weight
    one.offload()
    one.load()
    assert one.module.lm_head.weight.data_ptr() == one.module.model.embed_tokens.weight.data_ptr()


def test_gradients_move_too(learner):
    one = learner()
    for weight in one.module.parameters():
        weight.grad = weight.detach().clone()
    one.offload(["grad"])
    with pytest.raises(RuntimeError, match="grad are offloaded"):
        one.learn(BATCHES[0], totals_of(BATCHES[0]))
    assert all(weight.grad.untyped_storage().nbytes() == 0 for weight in one.module.parameters())
    one.load(["grad"])
    assert all((weight.grad == weight).all() for weight in one.module.parameters())


def test_gradients_that_there_are_not_need_not_come_back(learner):
    one = learner()
    one.offload(["grad"])
    assert one.learn(BATCHES[0], totals_of(BATCHES[0]))["skipped"] == 0


@pytest.mark.parametrize("part", ["weight", "optimizer"])
def test_what_is_offloaded_cannot_be_used(learner, part, tmp_path):
    one, samples = learner(), BATCHES[0]
    one.offload([part])
    with pytest.raises(RuntimeError, match=f"{part} .*load"):
        one.learn(samples, totals_of(samples))
    if part == "weight":
        with pytest.raises(RuntimeError, match="load"):
            one.score(samples)
        with pytest.raises(RuntimeError, match="load"):
            one.export(tmp_path / "export")
    else:
        with pytest.raises(RuntimeError, match="load"):
            one.save(tmp_path / "saved")


def test_parts_that_there_are_not(learner):
    with pytest.raises(ValueError, match="no cache to offload"):
        learner().offload(["cache"])


def test_weights_that_were_given_to_another_learner_can_be_offloaded(learner):
    """What is sent is seen through numpy, and storage that numpy has seen cannot be resized."""
    sent = []

    class Giver(LearnerWorker):
        _rank, _group_name = 0, "actor"

        def broadcast(self, bucket, groups):
            sent.extend(tensor_parts(weight) for _, weight in bucket or ())

    worker = object.__new__(Giver)
    worker._learner = learner()
    worker.give_weights("reference")
    assert len(sent) == len(dict(worker._learner.weights()))
    worker._learner.offload()
    worker._learner.load()
    worker._learner.score(random_samples(9))
