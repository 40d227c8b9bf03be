"""Real runs that go wrong are told so in the terminal; tests/trainer/test_diagnosis.py has recorded ones."""

import pytest

from tests.trainer.pathologies import CASES, run_case

# A few steps more than the recorded run of the case took.
STEPS = {"length": 6, "format": 14, "engine": 5, "learning-rate": 12}


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.name in STEPS], ids=lambda case: case.name)
def test_a_run_that_goes_wrong_is_diagnosed(case, model, tmp_path):
    notes = []
    run = run_case(case, model, tmp_path / case.name, notes, max_steps=STEPS[case.name])
    named = [note for note in notes if note.startswith("diagnosis: ")]
    assert sum(note.startswith(f"diagnosis: {case.diagnosis} at step ") for note in named) == 1
    assert len(run.steps()) == STEPS[case.name], "it is told, and the run goes on"
    if case.name == "engine":
        broken = [token for token in run.token_lines if token["step"] > 1]
        assert all(token["token"] and abs(token["ratio"] - 1) > 1e-3 for token in broken) and broken
