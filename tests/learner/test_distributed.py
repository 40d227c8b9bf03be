"""Two ranks learn as one does, and a checkpoint of the ones is read by the other."""

import dataclasses
import errno
import functools
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from roost.config.job import ParallelSizes
from roost.config.train import AdapterSettings, LearnerSettings, OptimizerSettings
from roost.engines.tiny_model import write_tiny_model
from roost.learner.checksums import check_sums
from roost.learner.distributed import close_distributed, flattened, init_distributed, max_over_ranks, reduced, restored
from roost.learner.forward import Head
from roost.learner.learner import GradientNoise, Learner
from roost.procs.files import DiskFull
from tests.learner.random_samples import CPU, random_samples, settings_of, totals_of
from tests.learner.ranks import in_turn, learn_and_keep, learn_and_read, moments, on_ranks, weights
from tests.limits import HANG_S

# For each step the samples of rank 0 and of rank 1: of other numbers and lengths, once none at all.
SHARES = [
    (random_samples(12, 5, 40, 9, seed=1), random_samples(7, seed=2)),
    (random_samples(30, 30, seed=3), []),
    (random_samples(6, seed=4), random_samples(31, 5, 17, seed=5)),
]
TOTALS = [totals_of([*one, *other]) for one, other in SHARES]

CHANGES = {
    "all weights": {},
    "adapter": {"adapter": AdapterSettings(lora_rank=4), "activation_checkpointing": True},
}
COUNTED = {
    "2 shard": ParallelSizes(),
    "2 replicate": ParallelSizes(shard=1),
    "2 tensor": ParallelSizes(tensor=2),
}


def near(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Case:
    """A learner that learns alone, and again on two ranks."""

    settings: LearnerSettings
    folder: Path
    shares: list
    totals: list
    head: Head = Head.POLICY

    @functools.cached_property
    def alone(self):
        return Learner(self.settings, CPU, self.head)

    @functools.cached_property
    def learnt(self):
        return [
            self.alone.learn([*one, *other], total)
            for (one, other), total in zip(self.shares, self.totals, strict=True)
        ]


@pytest.fixture(scope="module")
def cases(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    tied = models("qwen2", tie_word_embeddings=True)
    made = {
        name: Case(settings_of(tied, **changes), folder / name, SHARES, TOTALS) for name, changes in CHANGES.items()
    }
    rough = settings_of(models(), compute_dtype="bfloat16")
    shares = [tuple([_with_returns(sample) for sample in share] for share in shares) for shares in SHARES[:2]]
    made["critic in bfloat16"] = Case(rough, folder / "critic", shares, TOTALS[:2], Head.VALUE)
    adapted = dataclasses.replace(rough, adapter=AdapterSettings(lora_rank=4))
    made["adapter in bfloat16"] = Case(adapted, folder / "rough", shares, TOTALS[:2])
    return made


@pytest.fixture(scope="module")
def ranks(cases, tmp_path_factory):
    """Results of two ranks in each case, and of how they connect: one start for all, as importing torch is slow."""
    works = {"at a port": (agree_and_look,)}
    for name, case in cases.items():
        arguments = (case.settings, case.shares, case.totals, str(case.folder))
        if name in CHANGES:
            assert case.learnt
            case.alone.save(case.folder / "of one")
            case.alone.wait_saved()
            works[name] = (learn_and_read, *arguments)
        else:
            works[name] = (learn_and_keep, *arguments, case.head)
    for name, sizes in COUNTED.items():
        settings = dataclasses.replace(cases["all weights"].settings, parallel=sizes)
        works[name] = (count_and_save, settings, str(cases["all weights"].folder / name))
    rough = cases["critic in bfloat16"].settings
    works["export"] = (export_late, rough, str(cases["all weights"].folder / "export in bfloat16"))
    works["full disk"] = (export_late, rough, str(cases["all weights"].folder / "full"), 0, True)
    works["noise"] = (noise_of, cases["all weights"].settings)
    works["in a file"] = (agree_in_file, tmp_path_factory.mktemp("meeting") / "meeting.store")
    found = on_ranks(2, in_turn, list(works.values()))
    return {name: [rank[number] for rank in found] for number, name in enumerate(works)}


@pytest.mark.parametrize("name", CHANGES)
def test_two_ranks_are_as_one(cases, ranks, name):
    case, ranks = cases[name], ranks[name]
    settings, folder, alone, learnt = case.settings, case.folder, case.alone, case.learnt
    for number, rank in enumerate(ranks):
        near(rank["weights"], weights(alone), 1e-5)
        for one, other in zip(rank["said"], alone.score(case.shares[0][number]), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        assert rank["learnt"] == ranks[0]["learnt"]
    for one, other in zip(ranks[0]["learnt"], learnt, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        assert one["grad/norm"] == pytest.approx(other["grad/norm"], rel=1e-5)

    for rank in ranks:
        near(rank["again"], rank["weights"], 0)
        assert rank["learnt again"] == rank["learnt"][-1]
        near(rank["read"]["weights"], weights(alone), 0)
        near(rank["read"]["moments"], moments(alone), 0)
        assert rank["read"]["step"] == len(case.shares)

    of_two = Learner(settings, CPU)
    assert check_sums(folder / "before last"), "both ranks have summed their files"
    of_two.restore(folder / "before last")
    of_two.learn([*case.shares[-1][0], *case.shares[-1][1]], case.totals[-1])
    near(weights(of_two), ranks[0]["weights"], 1e-5)
    if settings.adapter is None:
        exported = Learner(dataclasses.replace(settings, model=str(folder / "export")), CPU)
        near(weights(exported), ranks[0]["weights"], 0)
    else:
        assert (folder / "export" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["critic in bfloat16", "adapter in bfloat16"])
def test_two_ranks_in_bfloat16_are_near_one(cases, ranks, name):
    case, (one, other) = cases[name], ranks[name]
    for learnt, total, figures in zip(one["learnt"], case.totals, case.learnt, strict=True):
        assert learnt["skipped"] == 0
        for figure, alone in figures.items():
            # Rounding, which depends on the machine, may bring one token to the other side of a bound.
            tolerance = 1.01 / total.tokens if figure.startswith("clipped") else 1e-3
            assert learnt[figure] == pytest.approx(alone, rel=0.05, abs=tolerance), figure
    near(one["again"], other["weights"], 0)


def noise_of(rank, settings):
    """Estimates of signal and noise, of a minibatch of which each rank has two micro-batches."""
    learner = Learner(settings, CPU)
    learner.learn(HALVES[rank], totals_of([*HALVES[0], *HALVES[1]]))
    return list(learner._noise._newest)


HALVES = [random_samples(31, 20, seed=3), random_samples(29, 24, seed=4)]  # each is a micro-batch


def test_gradient_norms_of_halves_are_over_all_shards(cases, ranks):
    still = dataclasses.replace(cases["all weights"].settings, optimizer=OptimizerSettings(learning_rate=0.0))
    one, expected = Learner(still, CPU), GradientNoise()
    parts = [*map(list, itertools.product(*HALVES)), [*HALVES[0], *HALVES[1]]]
    *halves, whole = (one.learn(some, totals_of(some))["grad/norm"] for some in parts)
    for half in halves:  # each rank has its own order
        expected.add(half, 2, whole, 4)
    (first,), (second,) = ranks["noise"]
    assert first == second
    assert any(first == pytest.approx(each, rel=1e-4) for each in expected._newest)


def count_and_save(rank, settings, folder):
    """Bytes that this rank counts of a checkpoint, which it then writes."""
    learner = Learner(settings, CPU)
    learner.save(folder)
    learner.wait_saved()
    return learner.checkpoint_bytes()


@pytest.mark.parametrize("name", COUNTED)
def test_ranks_count_what_they_write_to_a_checkpoint(cases, ranks, name):
    case = cases["all weights"]
    assert sum(ranks[name]) == pytest.approx(case.alone.checkpoint_bytes(), rel=0.02)
    data = sum(file.stat().st_size for file in (case.folder / name).glob("*.distcp"))
    assert 0.7 * data < sum(ranks[name]) < data  # the names of tiny weights take as much as their numbers


def export_late(rank, settings, folder, after_s=0, fails=False):
    """Error of an export that takes so long on the first rank, and then finds the disk full if so asked."""
    learner = Learner(settings, CPU)
    write = learner.module.save_pretrained

    def late(*arguments, **named):
        time.sleep(after_s)
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments, **named)

    learner.module.save_pretrained = late
    try:
        learner.export(folder)
    except DiskFull as error:
        return [str(error)]
    return []


def test_a_policy_is_exported_as_engines_compute_with_it_and_a_full_disk_is_named_by_all_ranks(cases, ranks):
    folder = cases["all weights"].folder
    assert ranks["export"] == [[], []]
    written = load_file(folder / "export in bfloat16" / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    assert json.loads((folder / "export in bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"
    for [error] in ranks["full disk"]:
        assert f"cannot write the policy to {folder / 'full'}" in error


@pytest.mark.long
def test_ranks_wait_for_a_slow_disk_longer_than_for_each_other(cases, tmp_path):
    settings = cases["all weights"].settings
    assert on_ranks(2, export_late, settings, str(tmp_path / "slow"), 12, limit_s=10) == [[], []]
    assert (tmp_path / "slow" / "model.safetensors").is_file()


def _with_returns(sample):
    return dataclasses.replace(
        sample, values=np.zeros(len(sample), np.float32), returns=np.ones(len(sample), np.float32)
    )


def test_sums_and_maxima():
    parts = [{"loss": 1.0, "max/ratio": 2.0}, {}, {"loss": 0.5, "max/ratio": 1.0, "tokens": 3}]
    assert reduced(parts) == {"loss": 1.5, "max/ratio": 2.0, "tokens": 3}


def test_a_rank_that_there_is_not():
    with pytest.raises(ValueError, match="rank 2 is not among the 2"):
        init_distributed(2, 2, "127.0.0.1", 1, CPU)


@pytest.mark.parametrize("where", ["at a port", "in a file"])
def test_ranks_agree_without_listening_on_every_interface(ranks, where):
    assert [largest for largest, _ in ranks[where]] == [1, 1]
    assert not {host for _, hosts in ranks[where] for host in hosts} & {"0.0.0.0", "::"}


def agree_in_file(rank, file):
    """As below, after the ranks have met once more."""
    close_distributed()
    init_distributed(rank, 2, "", 0, CPU, HANG_S, file)
    return agree_and_look(rank)


def agree_and_look(rank):
    """Agreement of the ranks, and the addresses at which this rank's process accepts connections."""
    connections = psutil.Process().net_connections("tcp")
    return max_over_ranks(rank), [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]


def test_samples_are_sent_as_their_arrays_lie_in_memory():
    experts = np.arange(12 * 2 * 3, dtype=np.int16).reshape(12, 2, 3)
    odd = dataclasses.replace(random_samples(12)[0], reward=0.5, routed_experts=experts)
    samples = [odd, *random_samples(5, 7, seed=1)]
    lengths, payload = flattened(samples)
    arrays = sum(len(sample._arrays()) for sample in samples)
    assert len(lengths) == 1 + arrays - len(samples), "old log-probs are the engine's, the same array"
    assert lengths[0] < 2_000, "the structure has no numbers of the arrays"
    found = restored(lengths, payload)
    for one, other in zip(found, samples, strict=True):
        assert one.reward == other.reward
        for here, there in zip(one._arrays(), other._arrays(), strict=True):
            assert here.dtype == there.dtype
            assert here.flags.aligned
            np.testing.assert_array_equal(here, there)


def refused(rank, settings):
    with pytest.raises(ValueError) as error:
        Learner(settings, CPU)
    return [str(error.value)]


def test_a_checkpoint_with_other_weights_than_its_config_is_refused_by_all_ranks(tmp_path):
    """Only the first rank reads it: transformers unties embeddings and a head that differ."""
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for [message] in on_ranks(2, refused, settings_of(folder)):
        assert message.startswith("lm_head.weight") and "tie_word_embeddings: false" in message
