"""Whether a run takes place on this machine alone, and the accelerators it has here: known before Ray starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roost.cluster.hardware.registry import BUILT_IN
from roost.cluster.inventory import Inventory
from roost.config.job import Job
from roost.runtime.ray_address import running_here

RAY_ADDRESS = "RAY_ADDRESS"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """The accelerators of a machine."""

    accelerators: int = 0
    model: str = ""
    memory_gb: float | None = None

    @property
    def inventory(self) -> Inventory:
        node: dict[str, object] = {"accelerators": self.accelerators}
        if self.model:
            node["accelerator_model"] = self.model
        if self.memory_gb is not None:
            node["memory_gb"] = self.memory_gb
        return Inventory.from_dict({"nodes": [node]})


def accelerators_to_simulate(job: Job, address: str | None, environ: Mapping[str, str]) -> int:
    """How many accelerators this machine must simulate, so that a job for one machine can be tried on it.

    None where it has some, where a cluster is named, or where the job needs several machines.
    """
    asked = job.accelerators_per_node if job.accelerators_per_node is not None else job.last_device + 1
    if not asked or _is_elsewhere(job, address, environ) or BUILT_IN.detect(environ) is not None:
        return 0
    return asked


def machine_of_run(job: Job, address: str | None, environ: Mapping[str, str]) -> ThisMachine | None:
    """This machine, where the run is on it alone; None where it is on a Ray cluster, whose machines must be asked."""
    if _is_elsewhere(job, address, environ):
        return None
    simulated = accelerators_to_simulate(job, address, environ)
    if simulated:
        return ThisMachine(simulated)
    if address is None and _joins_running_ray():
        return None
    found = BUILT_IN.detect(environ)
    return ThisMachine() if found is None else ThisMachine(found[1].count, found[1].model, found[1].memory_gb)


def _is_elsewhere(job: Job, address: str | None, environ: Mapping[str, str]) -> bool:
    is_named = (address or environ.get(RAY_ADDRESS) or LOCAL) != LOCAL
    return is_named or (job.num_nodes or 1) > 1


def _joins_running_ray() -> bool:
    try:
        return running_here(lambda _: None) is not None  # what is odd about it is said when Ray is joined
    except ImportError:  # without Ray there is none; its absence is reported when it is needed
        return False
