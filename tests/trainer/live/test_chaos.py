"""scripts/chaos.py: a short run passes, and what would hide a failure is one itself."""

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from pathlib import Path

import pytest

from tests.limits import HANG_S

SCRIPT = Path(__file__).parents[3] / "scripts" / "chaos.py"


@pytest.fixture(scope="module", autouse=True)
def machine():
    """No Ray of the tests' own: the script starts one."""


@pytest.fixture(scope="module")
def chaos():
    spec = importlib.util.spec_from_file_location("chaos", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos"] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["chaos"]


@pytest.fixture
def trial(chaos, tmp_path):
    """A run that makes no step, in the place of a real one."""
    trial = chaos.Trial(tmp_path, steps=1, mark=uuid.uuid4().hex)
    with chaos.ended_afterwards(trial.mark):
        trial.process = sleeping(chaos, trial.mark)
        yield trial


def sleeping(chaos, mark):
    return subprocess.Popen(["sleep", str(HANG_S)], env={**os.environ, chaos.MARK: mark}, start_new_session=True)


@pytest.mark.long
def test_a_short_run_passes_and_leaves_nothing():
    with tempfile.TemporaryDirectory(prefix="c") as folder:  # a short name, for the sockets in it
        environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--seconds", "60", "--every", "12", "--seed", "3"],
            env={**environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            printed, _ = process.communicate(timeout=4 * HANG_S)  # it starts four runs or more
        finally:
            process.terminate()  # the script ends its run
            process.wait(HANG_S)
        assert process.returncode == 0, printed
        assert not list(Path(folder).iterdir())


def test_a_run_that_makes_no_step_is_a_failure(chaos, trial, monkeypatch, capsys):
    monkeypatch.setattr(chaos, "START_LIMIT", 0.01)
    monkeypatch.setattr(chaos, "START_SHARE", 0.0)  # so that it is waited for
    with pytest.raises(SystemExit):
        chaos.disturb(trial, {"kill driver": chaos.kill_driver}, seconds=HANG_S, every=0.01, seed=0)
    assert "FAILED: no step after step 0" in capsys.readouterr().out
    assert trial.process.poll() is None  # no fault has cured it


def test_a_run_that_exits_without_faults_is_a_failure(chaos, trial, monkeypatch, capsys):
    monkeypatch.setattr(chaos, "start_run", lambda *words, **named: subprocess.Popen(["false"]))
    trial.process = None
    with pytest.raises(SystemExit):
        chaos.stop(trial)
    assert "FAILED: the run exits again and again" in capsys.readouterr().out


def test_a_run_is_ended_with_the_script(chaos):
    mark = uuid.uuid4().hex
    process = sleeping(chaos, mark)
    with pytest.raises(KeyboardInterrupt), chaos.ended_afterwards(mark):
        raise KeyboardInterrupt
    assert process.wait(HANG_S) != 0


def test_a_fault_that_never_finds_its_process_is_reported(chaos, trial, monkeypatch):
    monkeypatch.setattr(chaos, "FIND_LIMIT", 0.01)
    assert not chaos.kill(trial, random.Random(0), "no such process")
    tries = chaos.Tries(tried=Counter({"kill learner": 3, "kill GCS": 3}), hits=Counter({"kill GCS": 3}))
    assert tries.never_found(["kill GCS", "kill learner"]) == ["kill learner"]
    short = chaos.Tries(tried=Counter({"kill learner": 1}), hits=Counter({"kill GCS": 2}))
    assert not short.never_found(["kill GCS", "kill learner"])


def test_the_working_folder_is_kept_only_after_a_failure(chaos, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_command = subprocess.run
    refuse = ["false"]  # no mounts outside a namespace of the script's own
    monkeypatch.setattr(subprocess, "run", lambda words, **named: run_command(refuse, **named))
    with chaos.working_folder():
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit), chaos.working_folder() as (work, _):
        raise SystemExit(1)
    assert work.is_dir()
