"""The examples of the placement documents, as printed there but for the import: each is a session of its own.

A session prints what the document says it prints, or it fails; nothing around it helps or cleans up.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

pytestmark = pytest.mark.long

EXAMPLES = sorted((Path(__file__).parent / "seed_examples").glob("*.txt"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, module_patch):
    module_patch.setenv("ROOST_FAKE_ACCELERATORS", "4")
    session = [sys.executable, "-m", "doctest", str(example)]
    done = subprocess.run(session, env=dict(os.environ), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""
