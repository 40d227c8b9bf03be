"""Bytes that two ranks send in a step, counted, beside what plans predict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "mesh.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("bytes") / "rows.json"
    sizes = ("--rounds", "0", "--hidden", "128", "--layers", "3", "--samples", "4", "--length", "128")
    command = [sys.executable, str(BENCHMARK), *sizes, "--json", str(file)]
    done = subprocess.run(command, timeout=HANG_S, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["bytes"]
    return {(row["dimension"], row["recomputes"]): (row["measured"], row["predicted"]) for row in found}


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dimension", ["replicate", "shard", "context", "tensor", "expert"])
def test_ranks_send_what_plans_predict(rows, dimension, recomputes):
    measured, predicted = rows[dimension, recomputes]
    expected = {name: size for name, size in predicted.items() if size}
    assert expected
    for name, size in expected.items():
        # A random router sends as many tokens to each half of the experts only on average.
        tolerance = 0.15 if name == "expert" else 0.03
        assert measured[name] == pytest.approx(size, rel=tolerance), name
    others = {name: size for name, size in measured.items() if name not in (*expected, "other")}
    assert sum(others.values()) < 1000, "norms of gradients alone"
