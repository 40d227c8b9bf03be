"""Probes of this machine, with limits and disks that are really too small."""

import subprocess
import sys
from pathlib import Path

import pytest

from roost.doctor.judge import Level, failures, judge, judge_machine
from roost.doctor.probe import digest_of, probe_machine, probe_node
from tests.cli.terminal import run, write
from tests.limits import HANG_S
from tests.small_disk import small_disk

JOB = """
cluster: {num_nodes: 1, num_gpus_per_node: 1, component_placement: {"actor,rollout": 0}}
actor: {model: {model_path: MODEL}}
train:
  task: {_target_: roost.rollout.arithmetic.Arithmetic, largest: 4}
"""


def test_this_machine_is_described(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    health = probe_node("here", [tmp_path], [str(model), str(tmp_path / "gone")], None, {})
    assert {"roost", "python", "torch", "ray"} <= set(health.versions)
    assert health.disks[0].free_gb > 0 and not health.disks[0].problem
    assert [state.digest is None for state in health.paths] == [False, True]
    wrong = failures(judge([health]))
    assert [check.name for check in wrong if check.name.startswith(str(tmp_path))] == [str(tmp_path / "gone")]


def test_a_digest_sees_names_sizes_and_content(tmp_path):
    def model(name, weights=b"w" * 3_000_000, file="weights"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / file).write_bytes(weights)
        return digest_of(tmp_path / name)

    first = model("a")
    assert first == model("b")
    others = {
        model("c", b"w" * 2_999_999),
        model("d", b"w" * 2_999_999 + b"x"),
        model("e", file="other"),
        model("f", b""),
    }
    assert first not in others and len(others) == 4
    assert digest_of(tmp_path / "a" / "inner" / "weights") is not None and digest_of(tmp_path / "none") is None


def test_a_full_disk_fails(tmp_path):
    with small_disk(tmp_path / "runs", 1 << 20) as folder:
        (check,) = [check for check in judge_machine(probe_machine([folder / "later"])) if "later" in check.name]
        assert check.level is Level.FAILED and "0.00 GB free" in check.found and "tmpfs" in check.found
        (folder / "filled").write_bytes(bytes((1 << 20) - 4096))
        assert "later" in [
            Path(check.name).name for check in failures(judge_machine(probe_machine([folder / "later"])))
        ]


@pytest.mark.parametrize(("limit", "code"), [("-Sn 200", 0), ("-n 200", 1)])
def test_a_low_limit_of_open_files_is_reported(limit, code, tmp_path):
    command = f"ulimit {limit}; exec {sys.executable} -m roost doctor --runs {tmp_path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "200 on this machine" in " ".join(done.stdout.split())
    assert ("ulimit -n" if code == 0 else "limits.conf") in done.stdout


def test_a_missing_path_of_a_job_fails(tmp_path):
    job = write(tmp_path, JOB.replace("MODEL", str(tmp_path / "no-model")))
    done = run("doctor", job, "--runs", tmp_path, width=200)
    assert done.exit_code == 1
    assert "missing on this machine" in done.stdout and "1 of" in done.stdout


def test_training_does_not_start_on_a_full_disk(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    job = write(tmp_path, JOB.replace("MODEL", str(model)))
    with small_disk(tmp_path / "runs", 1 << 20) as folder:
        done = run("train", job, "--runs", folder)
    assert done.exit_code == 1
    assert "RST-L002" in done.output and "loading torch" not in done.output


def test_saving_needs_a_cluster(tmp_path):
    done = run("doctor", "--save", tmp_path / "machines.json")
    assert done.exit_code == 2 and "--cluster" in done.output
