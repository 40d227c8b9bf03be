"""Plans that are drawn in every view: the examples of the documents behind the notations (see tests/test_seeds.py)."""

from pathlib import Path

import roost

ROOT = Path(__file__).parents[2]


def roll(train, infer, per_engine=1, **roles):
    infer = {"device_mapping": infer, "num_gpus_per_worker": per_engine}
    return {"num_gpus_per_node": 8, "actor_train": {"device_mapping": train}, "actor_infer": infer, **roles}


def loop(memory):
    allocation = {"learning_gpus": list(range(8)), "inference_gpus": list(range(8))}
    figures = {"inference_requires_memory_gb": 75, "learning_requires_memory_gb": 75}
    return {"rl": {"gpu_allocation": allocation, **figures}}, {"nodes": [{"accelerators": 8, "memory_gb": memory}]}


PICTURES = {
    "collocated": lambda: roost.plan(
        {
            "cluster": {"num_nodes": 2, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}},
            "actor": {"offload_optimizer": True, "offload_weight": True, "offload_grad": True},
        }
    ),
    "disaggregated": lambda: roost.plan(roll("list(range(0,4))", "list(range(4,8))")),
    "hybrid": lambda: roost.plan(
        roll("list(range(0,16))", "list(range(0,12))", 2, rewards={"code_sandbox": {"world_size": 8}})
    ),
    "heterogeneous": lambda: roost.plan("examples/heterogeneous/cluster.yaml", "examples/heterogeneous/machines.yaml"),
    "taking-turns": lambda: roost.plan(*loop(79.15)),
}
