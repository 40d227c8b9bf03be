"""Environment variables that a server does not inherit."""

import pytest

from roost.cluster.hardware.accelerators.nvidia import NVIDIA
from roost.placement.component_plan import Process
from roost.placement.placement import Placement
from roost.procs.child_env import child_env
from roost.runtime.launch import process_env
from roost.transport.context import Address

REMOVED = {
    "torchrun": {"RANK": "1", "GROUP_RANK": "0", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "2"},
    "accelerate": {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2", "MEGATRON_LM_TP_DEGREE": "2"},
    "mpi": {"OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "PMIX_RANK": "1", "SLURM_PROCID": "1"},
    "ray": {"RAY_JOB_ID": "01", "RAY_RAYLET_PID": "7", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"},
    "learner": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCHDYNAMO_DISABLE": "1"},
    "nccl of the learner": {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"},
    "node rank": {"ROOST_NODE_RANK": "1", "RLINF_NODE_RANK": "1"},
}
KEPT = {
    "masks": {"CUDA_VISIBLE_DEVICES": "3", "ASCEND_RT_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "0"},
    "network": {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"},
    "user": {"HF_HOME": "/models", "PATH": "/bin", "RANKING": "kept", "PYTHONBREAKPOINT": "0"},
    "batch job": {"SLURM_JOB_ID": "12"},
    "threads": {"OMP_NUM_THREADS": "4"},
}


@pytest.mark.parametrize("outer", [pytest.param(env, id=name) for name, env in REMOVED.items()])
def test_removed(outer):
    assert child_env(outer, {}) == {}


@pytest.mark.parametrize("outer", [pytest.param(env, id=name) for name, env in KEPT.items()])
def test_kept(outer):
    assert child_env(outer, {}) == outer


def test_what_the_server_is_given_wins():
    assert child_env({"RANK": "1", "HF_HOME": "/a"}, {"RANK": "0", "HF_HOME": "/b"}) == {"RANK": "0", "HF_HOME": "/b"}


def test_of_a_roost_worker_only_masks_network_and_the_users_own_stay():
    placement = Placement(1, 0, 0, 1, "NV_GPU", 0, 1, ["1"], True, [1], "cluster")
    worker = process_env(
        Address("rollout", 1),
        4,
        Process(placement, {"HF_HOME": "/m"}, None),
        NVIDIA,
        [(1, "5")],
        ("10.0.0.1", 29500),
        "eth0",
    )
    assert set(child_env(worker, {})) == {
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "HF_HOME")
    }
