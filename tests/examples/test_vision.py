"""The coloured squares: a vision-language policy learns from images, with the built-in engine on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from roost.trainer.records.run_folder import RunFolder
from roost.vision.processor import Processor
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/vision"


@pytest.mark.long
def test_a_policy_learns_to_name_the_colour(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    commands = (
        [sys.executable, EXAMPLE / "make_files.py"],
        [sys.executable, "-c", "from roost.cli.main import run; run()", "train", EXAMPLE / "rlinf.yaml"],
    )
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder.open(tmp_path / "runs/vision")
    steps = run.steps()
    assert steps[0]["reward/mean"] < 0.3
    assert max(each["mismatch/kl_k3"] for each in steps) < 1e-8, "engine and learner see the same images"
    assert steps[-1]["reward/mean"] > 0.8
    assert Processor.of_model(str(run.policy)) is not None, "the policy folder has the image processor"
