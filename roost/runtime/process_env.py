"""The environment of a worker's process: its place among the others, and the accelerators it may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roost.cluster.hardware.accelerator import Accelerator
from roost.cluster.hardware.registry import BUILT_IN
from roost.placement.component_plan import Process
from roost.runtime.address import Address

# What the plan says of visible devices is in its own numbers, and perhaps for another vendor: only the live node knows.
MASKS = {
    name
    for accelerator in BUILT_IN.accelerators
    for name in (accelerator.visible_devices_variable, *accelerator.mirrored_variables)
}


def process_env(
    address: Address,
    world_size: int,
    process: Process,
    vendor: Accelerator | None,
    visible: Sequence[tuple[int, str]],
    master: tuple[str, int],
    interface: str = "",
) -> dict[str, str]:
    """All variables of one worker.

    `visible` are the accelerators it may see, as planned and as the vendor calls them. A worker that sees only its own
    is alone as far as its libraries can tell, so its local rank is 0 of 1; one that sees those of others too finds its
    first one by its local rank. Unless a user says otherwise, gloo uses the interface of the address that Ray uses: by
    itself it looks up the host's name, which is loopback on many machines.
    """
    placement = process.placement
    seen = [planned for planned, _ in visible]
    is_alone = placement.isolate_accelerator or not seen
    own = next((seen.index(device) for device in placement.local_hardware_ranks if device in seen), 0)
    place = {
        "RANK": address.rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": 0 if is_alone else own,
        "LOCAL_WORLD_SIZE": 1 if is_alone else placement.local_world_size,
        "NODE_RANK": placement.placement_node_rank,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "GROUP_NAME": address.group,
        "WORKER_NAME": str(address),
        "CLUSTER_NODE_RANK": placement.cluster_node_rank,
        "NODE_LOCAL_RANK": placement.local_rank,
        "NODE_LOCAL_WORLD_SIZE": placement.local_world_size,
        "NODE_GROUP_LABEL": placement.node_group_label,
        "LOCAL_HARDWARE_RANKS": ",".join(map(str, placement.local_hardware_ranks)),
        "ACCELERATOR_TYPE": placement.accelerator_type,
    }
    masks = vendor.visibility([name for _, name in visible]) if vendor is not None else {}
    given = {name: value for name, value in process.env.items() if name not in MASKS}
    network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {**network, **given, **{name: str(value) for name, value in place.items()}, **masks}


def visible_devices(
    process: Process, node: int, held: Mapping[tuple[int, int], int], physical_ids: Sequence[str]
) -> list[tuple[int, str]]:
    """The accelerators a process may see, of those that its job holds on the node: as planned, with the vendor's name.

    >>> from roost.placement.placement import Placement
    >>> place = Placement(0, 0, 0, 1, "NV_GPU", 0, 1, ["1", "2"], True, [1, 2], "cluster")
    >>> visible_devices(Process(place, {}, None), 0, {(0, 1): 5, (0, 2): 6}, list("abcdefgh"))
    [(1, 'f'), (2, 'g')]
    """
    planned = sorted(int(device) for device in process.placement.visible_accelerators)
    return [(device, physical_ids[held[node, device]]) for device in planned if (node, device) in held]
