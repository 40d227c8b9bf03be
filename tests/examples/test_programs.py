"""Example programs run to their end as the pages tell a reader to run them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("program", ["workers/relay.py", "engines/update.py"])
def test_a_program_runs_to_its_end(program, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / program)], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
