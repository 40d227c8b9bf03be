"""The coloured squares: a vision-language policy learns from images on the CPU, with the built-in engine and vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from roost.rollout.colours import write_colour_model
from roost.trainer.records.run_folder import RunFolder
from roost.vision.processor import Processor
from tests.engines.live.conftest import VLLM_PYTHON
from tests.limits import HANG_S
from tests.vision.shown import WIDE

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/vision"


def ran(folder, *command):
    """Run a program of this interpreter to its end in a folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def train(folder, *overrides):
    ran(folder, "-c", "from roost.cli.main import run; run()", "train", EXAMPLE / "rlinf.yaml", *overrides)
    return RunFolder.open(folder / "runs/vision")


@pytest.mark.long
def test_a_policy_learns_to_name_the_colour(tmp_path):
    ran(tmp_path, EXAMPLE / "make_files.py")
    run = train(tmp_path)
    steps = run.steps()
    assert steps[0]["reward/mean"] < 0.3
    assert max(each["mismatch/kl_k3"] for each in steps) < 1e-8, "engine and learner see the same images"
    assert steps[-1]["reward/mean"] > 0.8
    assert Processor.of_model(str(run.policy)) is not None, "the policy folder has the image processor"


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get(VLLM_PYTHON), reason=f"{VLLM_PYTHON} names no interpreter")
def test_a_policy_learns_from_images_that_vllm_has_seen(tmp_path):
    ran(tmp_path, EXAMPLE / "make_files.py")
    write_colour_model(tmp_path / "runs/vision-files/model", **WIDE)
    python = f"+train.engine_options.python={os.environ[VLLM_PYTHON]}"
    eager = "+train.engine_options.args=[--enforce-eager]"
    run = train(tmp_path, "+train.engine=vllm", python, eager, "runner.max_steps=2")
    steps = run.steps()
    assert [each["step"] for each in steps] == [1, 2]
    assert all(each["grad/norm"] > 0 for each in steps)
    assert max(each["mismatch/logprob_max"] for each in steps) < 2e-3, "vLLM and learner see the same images"
    assert [each["version"] for each in run.evaluations()] == [0, 2], "vLLM took the weights of the last step"
