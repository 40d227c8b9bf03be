"""Losses, their gradients and corrections agree with numbers computed by RLinf's and ROLL's own functions.

tests/golden/losses.jsonl has up to five cases for each of their functions. docs/losses.md lists where Roost differs on
purpose; such cases are not among them.
"""

import json
from pathlib import Path

from tests.grid import grid
from tests.learner.golden_losses import error, settings_of

FILE = Path(__file__).parents[1] / "golden" / "losses.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
WITH_KEYS = [case for case in CASES if case["config"]]


@grid("case", CASES, ids=lambda case: case["id"])
def test_numbers_agree_with_the_other_program(case):
    assert error(case) <= 1e-5


@grid("case", WITH_KEYS, ids=lambda case: case["id"])
def test_keys_of_the_other_program_are_followed(case):
    """Nothing is refused, and nothing is said not to be followed."""
    findings = settings_of(case)[1]
    assert not findings.has_errors
    assert not [finding for finding in findings.found if "follow" in finding.what and "is followed" not in finding.what]
