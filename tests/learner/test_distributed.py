"""Two ranks learn as one does, and a checkpoint of the ones is read by the other."""

import dataclasses

import numpy as np
import psutil
import pytest

from roost.config.train import AdapterSettings
from roost.learner.checksums import check_sums
from roost.learner.distributed import init_distributed, most, together
from roost.learner.heads import POLICY, VALUE
from roost.learner.learner import Learner
from tests.learner.drawn import CPU, drawn_samples, settings_of, totals_of
from tests.learner.ranks import in_turn, learn_and_keep, learn_and_read, moments, on_ranks, weights

# For each step the samples of rank 0 and of rank 1: of other numbers and lengths, once none at all.
SHARES = [
    (drawn_samples(12, 5, 40, 9, seed=1), drawn_samples(7, seed=2)),
    (drawn_samples(30, 30, seed=3), []),
    (drawn_samples(6, seed=4), drawn_samples(31, 5, 17, seed=5)),
]
TOTALS = [totals_of([*one, *other]) for one, other in SHARES]

SETTINGS = [
    pytest.param({}, id="all weights"),
    pytest.param(
        {"adapter": AdapterSettings(lora_rank=4), "activation_checkpointing": True},
        id="adapter",
        marks=pytest.mark.long,
    ),
]


def near(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("changes", SETTINGS)
def test_two_ranks_are_as_one(models, tmp_path, changes):
    settings = settings_of(models("qwen2", tie_word_embeddings=True), **changes)
    alone = Learner(settings, CPU)
    told = [alone.learn([*one, *other], total) for (one, other), total in zip(SHARES, TOTALS, strict=True)]
    alone.save(tmp_path / "of one")
    alone.wait_saved()
    ranks = on_ranks(2, learn_and_read, settings, SHARES, TOTALS, str(tmp_path))

    for number, rank in enumerate(ranks):
        near(rank["weights"], weights(alone), 1e-5)
        for one, other in zip(rank["said"], alone.score(SHARES[0][number]), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        assert rank["told"] == ranks[0]["told"]
    for one, other in zip(ranks[0]["told"], told, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        assert one["grad/norm"] == pytest.approx(other["grad/norm"], rel=1e-5)

    for rank in ranks:
        near(rank["again"], rank["weights"], 0)
        assert rank["told again"] == rank["told"][-1]
        near(rank["read"]["weights"], weights(alone), 0)
        near(rank["read"]["moments"], moments(alone), 0)
        assert rank["read"]["step"] == len(SHARES)

    of_two = Learner(settings, CPU)
    assert check_sums(tmp_path / "before last"), "both ranks have summed their files"
    of_two.restore(tmp_path / "before last")
    of_two.learn([*SHARES[-1][0], *SHARES[-1][1]], TOTALS[-1])
    near(weights(of_two), ranks[0]["weights"], 1e-5)
    if settings.adapter is None:
        exported = Learner(dataclasses.replace(settings, model=str(tmp_path / "export")), CPU)
        near(weights(exported), ranks[0]["weights"], 0)
    else:
        assert (tmp_path / "export" / "adapter_model.safetensors").is_file()


@pytest.mark.long
def test_two_ranks_in_bfloat16_are_near_one(models, tmp_path):
    shares = [tuple([_with_returns(sample) for sample in share] for share in shares) for shares in SHARES[:2]]
    plain = settings_of(models(), compute_dtype="bfloat16")
    adapted = dataclasses.replace(plain, adapter=AdapterSettings(lora_rank=4))
    cases = [
        (learn_and_keep, plain, shares, TOTALS[:2], str(tmp_path / "critic"), VALUE),
        (learn_and_keep, adapted, shares, TOTALS[:2], str(tmp_path / "adapter"), POLICY),
    ]
    ranks = on_ranks(2, in_turn, cases)
    for number, (_, settings, _, _, _, head) in enumerate(cases):
        one, other = (rank[number] for rank in ranks)
        alone = Learner(settings, CPU, head)
        for (first, second), total, told in zip(shares, TOTALS, one["told"], strict=False):
            assert told["skipped"] == 0
            for name, figure in alone.learn([*first, *second], total).items():
                # Rounding, which depends on the machine, may bring one token to the other side of a bound.
                tolerance = 1.01 / total.tokens if name.startswith("clipped") else 1e-3
                assert told[name] == pytest.approx(figure, rel=0.05, abs=tolerance), name
        near(one["again"], other["weights"], 0)


def _with_returns(sample):
    return dataclasses.replace(
        sample, values=np.zeros(len(sample), np.float32), returns=np.ones(len(sample), np.float32)
    )


def test_sums_and_maxima():
    parts = [{"loss": 1.0, "max/ratio": 2.0}, {}, {"loss": 0.5, "max/ratio": 1.0, "tokens": 3}]
    assert together(parts) == {"loss": 1.5, "max/ratio": 2.0, "tokens": 3}


def test_a_rank_that_there_is_not():
    with pytest.raises(ValueError, match="rank 2 is not among the 2"):
        init_distributed(2, 2, "127.0.0.1", 1, CPU)


@pytest.mark.parametrize("meets_in_file", [pytest.param(True, id="in a file"), pytest.param(False, id="at a port")])
def test_ranks_agree_without_listening_on_every_interface(tmp_path, meets_in_file):
    found = on_ranks(2, agree_and_look, file=tmp_path / "meeting.store" if meets_in_file else None)
    assert [largest for largest, _ in found] == [1, 1]
    assert not {host for _, hosts in found for host in hosts} & {"0.0.0.0", "::"}


def agree_and_look(rank):
    """What the ranks agree on, and the addresses at which this rank's process accepts connections."""
    connections = psutil.Process().net_connections("tcp")
    return most(rank), [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]
