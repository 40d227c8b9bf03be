"""The judgement of probed nodes: a healthy cluster, and broken set-ups one at a time."""

from dataclasses import replace

import pytest

from roost.cluster.inventory import Bandwidth, Inventory
from roost.doctor.judge import (
    Disk,
    Gpu,
    Level,
    Link,
    Measured,
    NodeHealth,
    PathState,
    failures,
    judge,
    judge_bandwidth,
    judge_job,
    judge_machine,
)

GPUS = tuple(Gpu(index, "NVIDIA H100", 79.6, 0.01, 0) for index in range(8))
VERSIONS = {
    "roost": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "nccl": "2.28",
    "CUDA driver": "580.1",
    "vllm": "0.32",
}
HEALTHY = NodeHealth(
    "alpha",
    versions=VERSIONS,
    gpus=GPUS,
    disks=(Disk("/shared/runs", 900.0, "nfs4"),),
    shared_memory_gb=400.0,
    open_files=(65_535, 65_535),
    paths=(PathState("/models/m", "d1"),),
    sees_runs=True,
)
BETA = replace(HEALTHY, name="beta")


def with_gpu(**fields):
    return (*GPUS[:3], replace(GPUS[3], **fields), *GPUS[4:])


def test_healthy_nodes_pass():
    checks = judge([HEALTHY, BETA])
    assert {check.level for check in checks} == {Level.OK}
    assert not any(check.fix for check in checks)
    assert [check.name for check in checks] == [
        *VERSIONS, "GPUs", "clocks", "open files", "/dev/shm", "disk /shared/runs", "/models/m", "runs folder",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "name", "level", "found", "fix"),
    [
        pytest.param({"versions": VERSIONS | {"torch": "2.12.0"}}, "torch", "failed", "2.12.0 on beta",
                     "pip install torch==2.13.0", id="another-torch"),
        pytest.param({"versions": {k: v for k, v in VERSIONS.items() if k != "torch"}}, "torch", "failed",
                     "missing on beta", "pip install torch==2.13.0", id="no-torch"),
        pytest.param({"versions": VERSIONS | {"vllm": "0.31"}}, "vllm", "failed", "0.31 on beta",
                     "pip install vllm==0.32", id="another-vllm"),
        pytest.param({"versions": VERSIONS | {"python": "3.12.1"}}, "python", "failed", "3.12.1 on beta",
                     "use Python 3.11.7", id="another-python"),
        pytest.param({"gpus": with_gpu(uncorrected_errors=2)}, "GPUs", "failed", "beta GPU 3: 2 uncorrected",
                     "nvidia-smi --gpu-reset", id="ecc-errors"),
        pytest.param({"gpus": with_gpu(used_gb=60.0)}, "GPUs", "warning", "beta GPU 3: 60.0 of 79.6 GB in use",
                     "end what uses them", id="busy-gpu"),
        pytest.param({"gpus": (), "gpu_problem": "nvidia-smi fails"}, "GPUs", "failed", "beta: nvidia-smi fails",
                     "reload the driver", id="lost-driver"),
        pytest.param({"clock_offset_s": -7.25}, "clocks", "failed", "beta -7.2 s", "chrony", id="clock"),
        pytest.param({"disks": (Disk("/shared/runs", 0.02, "nfs4"),)}, "disk /shared/runs", "failed",
                     "0.02 GB free on beta (nfs4)", "--runs", id="full-disk"),
        pytest.param({"disks": (Disk("/shared/runs", 5.0),)}, "disk /shared/runs", "warning", "5.00 GB free on beta",
                     "free some space", id="nearly-full-disk"),
        pytest.param({"disks": (Disk("/shared/runs", 900.0, "", "a file cannot be written: Read-only file system"),)},
                     "disk /shared/runs", "failed", "beta: a file cannot", "writable", id="read-only"),
        pytest.param({"shared_memory_gb": 0.064}, "/dev/shm", "warning", "0.06 GB free on beta", "--shm-size",
                     id="shm"),
        pytest.param({"open_files": (1_024, 1_024)}, "open files", "failed", "1,024 on beta", "limits.conf",
                     id="nofile"),
        pytest.param({"open_files": (1_024, 500_000)}, "open files", "warning", "1,024 on beta", "ulimit -n",
                     id="soft-nofile"),
        pytest.param({"paths": (PathState("/models/m"),)}, "/models/m", "failed", "missing on beta", "copy it there",
                     id="missing-model"),
        pytest.param({"paths": (PathState("/models/m", "d2"),)}, "/models/m", "failed", "differs on beta from alpha",
                     "copy it again", id="half-copied-model"),
        pytest.param({"sees_runs": False}, "runs folder", "failed", "not seen by beta", "--runs", id="runs-not-shared"),
    ],
)  # fmt: skip
def test_a_broken_set_up_is_named_with_its_fix(broken, name, level, found, fix):
    checks = judge([HEALTHY, replace(BETA, **broken)])
    (wrong,) = [check for check in checks if check.level is not Level.OK]
    assert (wrong.name, wrong.level) == (name, level)
    assert found in wrong.found and fix in wrong.fix
    assert failures(checks) == ((wrong,) if level == "failed" else ())


ROBOT = replace(BETA, name="robot", gpus=(), versions={name: VERSIONS[name] for name in ("roost", "python", "torch")})


@pytest.mark.parametrize("nodes", [[HEALTHY, BETA, ROBOT], [ROBOT, HEALTHY]], ids=["last", "driver"])
def test_a_node_without_gpus_needs_no_packages_for_them(nodes):
    checks = judge(nodes)
    assert {check.level for check in checks} == {Level.OK}
    assert {check.name: check.found for check in checks}.items() >= VERSIONS.items()


def test_packages_for_gpus_are_compared_where_gpus_are():
    other = replace(ROBOT, versions=VERSIONS | {"vllm": "0.31", "sglang": "0.5"})
    assert not failures(judge([HEALTHY, other]))
    (wrong,) = failures(judge([replace(HEALTHY, gpus=()), other]))
    assert wrong.name == "vllm" and "0.31 on robot" in wrong.found, "without any GPU, all nodes are compared"


def test_one_machine_has_no_neighbours():
    names = [check.name for check in judge([replace(HEALTHY, sees_runs=None)])]
    assert "clocks" not in names and "runs folder" not in names
    assert [check.name for check in judge_machine(HEALTHY)] == ["open files", "/dev/shm", "disk /shared/runs"]


def test_a_slow_link_is_named():
    links = [Link(f"n{one}", f"n{one + 1}", False, speed) for one, speed in enumerate((10.0, 9.5, 1.2, 10.5))]
    measured = Measured("nccl", 5, 38.0, (Link("a", "b", True, 200.0), *links))
    total, within, between = judge_bandwidth(measured)
    assert (total.level, within.level, between.level) == (Level.OK, Level.OK, Level.WARNING)
    assert "n2 to n3 1.20 (median 9.75)" in between.found and "cable" in between.fix
    assert measured.bandwidth == Bandwidth(38.0, 200.0, 1.2)


def test_nodes_that_cannot_meet_fail():
    (check,) = judge_bandwidth(Measured("gloo", problem="not measured: connection refused"))
    assert check.level is Level.FAILED and "GLOO_SOCKET_IFNAME" in check.fix


def test_an_inventory_keeps_the_bandwidth():
    written = {"nodes": [{"accelerators": 8}], "bandwidth": {"all_reduce_gb_s": 38.0, "between_nodes_gb_s": 1.2}}
    inventory = Inventory.from_dict(written)
    assert inventory.bandwidth == Bandwidth(38.0, None, 1.2)
    assert Inventory.from_dict(inventory.to_dict()) == inventory
    assert inventory.first(1).bandwidth == inventory.bandwidth


@pytest.mark.parametrize(("needed", "level"), [(0, Level.OK), (8, Level.OK), (9, Level.WARNING)])
def test_a_job_that_needs_more_than_this_machine_has(needed, level):
    assert judge_job(needed, [HEALTHY]).level is level
