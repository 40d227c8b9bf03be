"""Where the other machines find this one."""

from __future__ import annotations


def node_address() -> str:
    """The address of this machine in the cluster."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]
