"""A short chaos run; `make chaos` is the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[3] / "scripts/chaos.py"


@pytest.mark.long
def test_a_run_with_random_faults_learns_the_same_policy():
    ran = subprocess.run(
        [sys.executable, str(CHAOS), "--seconds", "60", "--every", "12", "--seed", "3"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the policy equals the undisturbed run's" in ran.stdout
