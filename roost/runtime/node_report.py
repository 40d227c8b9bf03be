"""What one live node says of itself: a value, so that everything decided from it can be tried without a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from roost.cluster.inventory import NO_ACCELERATOR, Node

RANK_VARIABLES = ("ROOST_NODE_RANK", "RLINF_NODE_RANK")  # whichever is set; the first is the one to write


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node as it is seen from a process on it, and as Ray counts it.

    What Roost finds (`physical_ids`, `memory_gb`) and what Ray counts (`ray_accelerators`, `cpus`, `ray_memory_gb`) are
    kept apart, because they can contradict each other. A version that is empty is not known.

    >>> NodeReport(node_id="f00d", address="10.0.0.2", hostname="beta").name
    '10.0.0.2 (beta)'
    """

    node_id: str
    address: str  # as Ray knows it
    hostname: str
    interface: str = ""  # of the network that the address belongs to
    rank_text: str | None = None  # as written, so that a mistake can be quoted
    rank_variable: str | None = None
    accelerator_type: str = NO_ACCELERATOR
    accelerator_model: str = ""
    memory_gb: float | None = None  # of each accelerator
    physical_ids: tuple[str, ...] = ()
    host_memory_gb: float | None = None
    cpus: float = 0.0
    ray_accelerators: int = 0
    ray_resource: str = "GPU"  # what Ray calls these accelerators
    ray_memory_gb: float = 0.0
    python_version: str = ""
    ray_version: str = ""
    roost_version: str = ""
    detection_problem: str = ""
    is_driver: bool = False
    is_head: bool = False
    clock_offset_ns: int = 0

    @property
    def name(self) -> str:
        """The node as messages call it."""
        return self.address if self.hostname in ("", self.address) else f"{self.address} ({self.hostname})"


def to_node(report: NodeReport) -> Node:
    """The node of an inventory that a report describes.

    >>> to_node(NodeReport(node_id="f00d", address="10.0.0.2", hostname="beta", physical_ids=("4", "5"),
    ...                    accelerator_type="NV_GPU", memory_gb=79.6)).accelerators
    2
    """
    return Node(
        accelerators=len(report.physical_ids),
        accelerator_type=report.accelerator_type,
        accelerator_model=report.accelerator_model,
        memory_gb=report.memory_gb,
        host_memory_gb=report.host_memory_gb,
        host=report.hostname,
    )
