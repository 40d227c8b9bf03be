"""The environment of a server: its owner's, without the owner's rank and launcher variables.

Else a server that a worker of a distributed job starts would take the worker's rank for its own, and wait for
processes that never join.
"""

from __future__ import annotations

from collections.abc import Mapping

RANKS = {
    # torchrun and compatible launchers
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    # Slurm's ranks of a task; the variables of its job stay
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    # Roost's workers
    *("GROUP_NAME", "WORKER_NAME", "CLUSTER_NODE_RANK", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE"),
    *("NODE_GROUP_LABEL", "LOCAL_HARDWARE_RANKS", "ACCELERATOR_TYPE", "ROOST_NODE_RANK", "RLINF_NODE_RANK"),
}
# Settings of a learner that are wrong for a server; sleep mode, for example, does not work with expandable segments.
LEARNING = {
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "NCCL_ASYNC_ERROR_HANDLING"),
}
LAUNCHERS = (
    *("TORCHELASTIC_", "PET_", "ACCELERATE_", "FSDP_", "MEGATRON_LM_", "TORCH_NCCL_"),
    *("OMPI_", "PMI_", "PMIX_", "MV2_", "RAY_"),
)
RAY_MODULE = "ray."  # Ray sets PYTHONBREAKPOINT to its debugger, which a server may not have


def child_env(outer: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Environment of a server: the user's variables, including the mask of visible devices, and the added ones.

    OMP_NUM_THREADS is kept: Ray sets it to the worker's cores, and the server should stay within them.

    >>> child_env({"HOME": "/home/ann", "CUDA_VISIBLE_DEVICES": "3", "RANK": "5", "RAY_JOB_ID": "01"}, {"SEED": "1"})
    {'HOME': '/home/ann', 'CUDA_VISIBLE_DEVICES': '3', 'SEED': '1'}
    """
    kept = {name: value for name, value in outer.items() if not _is_dropped(name, value)}
    return {**kept, **added}


def _is_dropped(name: str, value: str) -> bool:
    if name == "PYTHONBREAKPOINT":
        return value.startswith(RAY_MODULE)
    return name in RANKS or name in LEARNING or name.startswith(LAUNCHERS)
