"""Bytes that two ranks send in a step, counted, beside what plans predict."""

import importlib
from pathlib import Path

import pytest

from tests.forked import FORKED

pytestmark = pytest.mark.long
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows():
    """Of benchmarks/mesh.py, whose ranks are forked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        mesh = importlib.import_module("mesh")
        return mesh.measured(rounds=0, hidden=128, layers=3, samples=4, length=128, context=FORKED)[0]


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dimension", ["replicate", "shard", "context", "tensor", "expert"])
def test_ranks_send_what_plans_predict(rows, dimension, recomputes):
    measured, predicted = rows[recomputes][dimension]
    expected = {name: size for name, size in predicted.items() if size}
    assert expected
    for name, size in expected.items():
        # A random router sends as many tokens to each half of the experts only on average.
        tolerance = 0.15 if name == "expert" else 0.03
        assert measured[name] == pytest.approx(size, rel=tolerance), name
    others = {name: size for name, size in measured.items() if name not in (*expected, "other")}
    assert sum(others.values()) < 1000, "norms of gradients alone"
