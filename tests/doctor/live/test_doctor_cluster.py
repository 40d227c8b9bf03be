"""`roost doctor --cluster`: on a local Ray, and on two nodes of which one lacks a model."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

import roost
from roost.doctor.cluster import joined, probe_nodes
from roost.doctor.judge import judge
from tests.cli.terminal import run, write
from tests.doctor.test_probe import JOB
from tests.limits import HANG_S
from tests.local_ray import shared_ray


@pytest.fixture(scope="module")
def ray_here():
    patch = pytest.MonkeyPatch()
    shared_ray(patch)
    yield
    patch.undo()


def test_nodes_of_a_ray_cluster_are_probed(ray_here, tmp_path):
    reported = []
    with joined(None, reported.append) as nodes:
        (health,) = probe_nodes(nodes, [tmp_path], [str(tmp_path)], tmp_path)
        assert reported == [
            "no Ray is named or found: this machine alone is checked; name one with --address HOST:PORT"
        ]
        assert health.versions["roost"] == roost.__version__ and abs(health.clock_offset_s) < HANG_S
    assert all(check.name for check in judge([health]))
    assert list(tmp_path.iterdir()) == []


def test_bandwidth_is_measured_and_planned_on(ray_here, tmp_path, monkeypatch):
    saved = tmp_path / "machines.json"
    monkeypatch.chdir(tmp_path)  # not the folder of Ray's processes
    done = run("doctor", "--cluster", "--runs", "runs", "--save", saved, width=200)
    assert f"disk {tmp_path / 'runs'}" in done.stdout, done.output
    assert "all-reduce over 2" in done.stdout, done.output
    cluster = {"num_nodes": 1, "component_placement": {"actor,rollout": "all"}}
    plan = roost.plan({"cluster": cluster}, saved)
    assert plan.inventory.bandwidth.within_node_gb_s > 0
    assert roost.Plan.from_json(plan.to_json()).inventory.bandwidth == plan.inventory.bandwidth


@pytest.mark.long
def test_a_model_that_one_node_lacks_is_named(tmp_path):
    """Two nodes of a Ray: the second has an empty file system where the first has the model and the runs."""
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("mount namespaces need root")
    model = tmp_path / "shared" / "model"
    model.mkdir(parents=True)
    (model / "weights").write_text("w")
    job = write(tmp_path, JOB.replace("MODEL", str(model)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="rd-", dir="/tmp")  # short: the paths of Ray's sockets are limited
    environ = {**os.environ, "RAY_ADDRESS": "", "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
    ray = f"{sys.executable} -m ray.scripts.scripts start --block --num-cpus=1 --node-ip-address=127.0.0.1 "
    head = f"exec {ray} --head --port={port} --include-dashboard=false"
    worker = f"mount -t tmpfs tmpfs {tmp_path}/shared && exec {ray} --address=127.0.0.1:{port}"
    with contextlib.ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        for command in (["bash", "-c", head], ["unshare", "--mount", "bash", "-c", worker]):
            process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            ends.callback(process.wait, HANG_S)
            ends.callback(process.terminate)
            wait_for_port(port)
        words = [sys.executable, "-m", "roost", "doctor", str(job), "--address", f"127.0.0.1:{port}", "--quick",
                 "--runs", str(tmp_path / "shared" / "runs")]  # fmt: skip
        deadline = time.monotonic() + HANG_S
        while True:
            done = subprocess.run(words, env={**environ, "COLUMNS": "250"}, capture_output=True, text=True, check=False)
            if "runs folder" in done.stdout or time.monotonic() > deadline:  # else the second node has yet to join
                break
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert f"{model} failed missing on " in said and " not seen by " in said, said
    assert f"joining the Ray at 127.0.0.1:{port}" in done.stderr and f":{port}: 2 nodes" in done.stderr
    assert "3 of" in said and "job failed cannot be planned" in said and "has no config.json" in done.stderr


def wait_for_port(port):
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")


def test_no_cluster_is_an_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "roost", "doctor", "--address", "auto", "--save", str(tmp_path / "machines.json")],
        env={**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "ray start --head" in done.stderr
