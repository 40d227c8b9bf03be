"""Advantages and normalised rewards agree with numbers computed by RLinf's and ROLL's own functions.

golden_advantages.jsonl has two or three cases for each of their functions and estimators. docs/decisions.md lists where
Roost differs on purpose; such cases are not among them.
"""

import json
from pathlib import Path

from tests.grid import grid
from tests.trainer.golden_advantages import error, settings_of

FILE = Path(__file__).with_name("golden_advantages.jsonl")
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@grid("case", CASES, ids=lambda case: case["id"])
def test_numbers_agree_with_the_other_program(case):
    assert error(case) <= 1e-5


@grid("case", CASES, ids=lambda case: case["id"])
def test_keys_of_the_other_program_are_followed(case):
    """Nothing is refused, and nothing is said not to be followed."""
    findings = settings_of(case)[1]
    assert not findings.has_errors
    assert not [finding for finding in findings.found if "follow" in finding.what]
