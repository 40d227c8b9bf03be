"""The machines of a run: a cluster that is there, or this machine with simulated accelerators where it has none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.accelerators.simulated import COUNT_VARIABLE
from roost.config.job import Job
from roost.runtime.cluster import Cluster
from roost.runtime.ray_address import running_here
from roost.trainer.preflight import RAY_ADDRESS, accelerators_to_simulate


def joined_address(job: Job, address: str | None) -> str | None:
    """The address of the running cluster that a job joins; as given where it names one or starts its own.

    With the address, a run that loses this cluster comes back to it, and never starts a private Ray instead.
    """
    import ray

    is_known = address is not None or bool(os.environ.get(RAY_ADDRESS)) or ray.is_initialized()
    if is_known or accelerators_to_simulate(job, address, os.environ):
        return address
    return running_here(lambda _: None)  # what is odd about it is said when Ray is joined


@contextlib.contextmanager
def open_cluster(job: Job, address: str | None, log_dir: str, say: Callable[[str], None]) -> Iterator[Cluster]:
    """Join or start the cluster that a job runs on."""
    simulated = accelerators_to_simulate(job, address, os.environ)
    before = os.environ.get(COUNT_VARIABLE)
    if simulated:
        verb = "is" if simulated == 1 else "are"
        say(f"there is no accelerator here: {simulated} {verb} simulated, and everything runs on the CPU")
        os.environ[COUNT_VARIABLE] = str(simulated)  # for the processes that Ray is about to start
        address = "local"
    say("starting Ray on this machine" if address == "local" else "connecting to Ray")
    config = None if job.source.values.get("cluster") is None else dict(job.source.values)
    try:
        with Cluster(job.num_nodes, config, address, log_dir=log_dir, say=say) as cluster:
            yield cluster
    finally:
        if simulated:
            os.environ.pop(COUNT_VARIABLE)
            os.environ.update({} if before is None else {COUNT_VARIABLE: before})


def has_gpus(cluster: Cluster) -> bool:
    """Whether models run on accelerators that are really there."""
    kinds = {node.report.accelerator_type for node in cluster.nodes}
    return bool(kinds & {str(AcceleratorType.NV_GPU), str(AcceleratorType.AMD_GPU)})
