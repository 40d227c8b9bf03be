"""The rendered job files that tests compare with.

python -m tests.schedulers.golden_files    writes them again
"""

import json
from pathlib import Path

import roost
from roost.schedulers.job_files import Container, JobOptions, Scheduler, render
from roost.schedulers.node_requests import requests_of

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "golden"
EXAMPLE = ROOT / "examples" / "heterogeneous"
COMMON = {"workdir": "/shared/team", "time": "1-00:00:00", "env": {"HF_HOME": "/shared/hf home", "HF_TOKEN": None}}
TWO_NODES = {
    "num_gpus_per_node": 8,
    "actor_train": {"device_mapping": "list(range(0,16))"},
    "actor_infer": {"device_mapping": "list(range(0,16))", "strategy_args": {"strategy_name": "vllm"}},
}
H100 = {"nodes": [{"count": 2, "accelerators": 8, "accelerator_model": "NVIDIA H100 80GB HBM3", "memory_gb": 80}]}


def heterogeneous():
    """The 18 machines of the example, three node groups."""
    plan = roost.plan(EXAMPLE / "cluster.yaml", EXAMPLE / "machines.yaml")
    return requests_of(plan, num_nodes=18)


def uniform():
    return requests_of(roost.plan(TWO_NODES, H100))


def options(**more):
    return JobOptions(**{"config": "job.yaml", "name": "math", **COMMON, **more})


def cases():
    """Scheduler, allocation and options of each golden file, by its name."""
    lab = {"scheduler_options": ("partition=gpu", "franka:partition=lab"), "setup": ("module load cuda",)}
    pods = {"image": "registry.example/roost:cuda", "mounts": ("shared:/shared",)}
    return {
        "heterogeneous.sbatch": (Scheduler.SLURM, heterogeneous(), options(**lab)),
        "pyxis.sbatch": (
            Scheduler.SLURM, uniform(), options(image="/shared/roost.sqsh", mounts=("/shared:/shared", "/data:/data"))
        ),
        "apptainer.sbatch": (
            Scheduler.SLURM, uniform(),
            options(image="/shared/roost.sif", mounts=("/shared:/shared",), container=Container.APPTAINER),
        ),
        "heterogeneous.rayjob.yaml": (Scheduler.KUBERAY, heterogeneous(), options(**pods)),
        "job.sky.yaml": (
            Scheduler.SKYPILOT, uniform(),
            options(image="roost:cuda", setup=("nvidia-smi",), train_args=("train.max_steps=5",),
                    mounts=("s3://team-bucket:/data",)),
        ),
        "job.dstack.yml": (Scheduler.DSTACK, uniform(), options(image="roost:cuda", mounts=("team-volume:/data",))),
        "job.ssh.sh": (Scheduler.SSH, uniform(), options(hosts=("ann@alpha", "beta"), setup=('echo "$HOME"',))),
        "command.sbatch": (Scheduler.SLURM, uniform(), options(command="cd mine && python mine.py")),
    }  # fmt: skip


def rendered(name):
    scheduler, allocation, chosen = cases()[name]
    return render(scheduler, allocation, chosen)


if __name__ == "__main__":
    for name in cases():
        (FOLDER / name).write_text(rendered(name), encoding="utf-8")
    print(json.dumps(sorted(cases())))
