"""Run arm.yaml on one machine: a Ray cluster with a node for each of the job's machines, and simulated accelerators.

python examples/control/make_model.py arm
python examples/control/try_on_one_machine.py
python examples/control/try_on_one_machine.py runner.max_steps=20 --name longer    # overrides, as for roost train
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import ray
import typer
from ray.cluster_utils import Cluster

from roost.cli.train import train_command
from roost.cluster.inventory import inventory_from_file

HERE = Path(__file__).parent
SMALL = ("runner.max_steps=3", "data.rollout_batch_size=8", "train.eval_tasks=2")


@contextmanager
def simulated_machines(accelerators: Sequence[int]) -> Iterator[str]:
    """Start a Ray cluster with a node for each number of accelerators; yield its address."""
    cluster = Cluster()
    try:
        for rank, count in enumerate(accelerators):
            # A node is a child of this process and reads its rank and accelerators from the environment.
            os.environ.update(ROOST_NODE_RANK=str(rank), ROOST_FAKE_ACCELERATORS=str(count))
            cluster.add_node(num_cpus=2, num_gpus=count, include_dashboard=False)
        for variable in ("ROOST_NODE_RANK", "ROOST_FAKE_ACCELERATORS"):
            os.environ.pop(variable, None)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of arm.yaml: key=value.")] = None,
    name: str = "arm-on-one-machine",
    runs: str = "runs",
) -> None:
    """Train a few small steps, with each process on its planned node."""
    machines = inventory_from_file(HERE / "machines.yaml")
    with simulated_machines([int(count) for count in machines.accelerator_counts]) as address:
        train_command(HERE / "arm.yaml", [*SMALL, *(overrides or ())], name, runs, address=address)


if __name__ == "__main__":
    typer.run(main)
