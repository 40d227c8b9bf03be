"""Scratch folders do not outlive their processes for long."""

import subprocess
import sys

from roost.engines.scratch import scratch_folder

LEAVES = """
import os, sys
from roost.engines.scratch import scratch_folder
scratch_folder("weights", sys.argv[1])
os._exit(1)
"""


def test_what_a_killed_process_left_goes(tmp_path):
    mine = scratch_folder("weights", tmp_path)
    subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    other = scratch_folder("fleet", tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "another kind is not ours to judge"
    again = scratch_folder("weights", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, again])
