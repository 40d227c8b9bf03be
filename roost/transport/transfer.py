"""Send objects between workers by group and rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from roost.transport.current import Current
from roost.transport.directory import GroupEntry
from roost.transport.failure import Address
from roost.transport.host_tensors import DeviceRoute
from roost.transport.shared_memory import Packet
from roost.transport.waits import Pending

LIMIT_VARIABLE = "ROOST_TRANSFER_TIMEOUT"
DEFAULT_LIMIT = 1800.0  # seconds
MESSAGE, BROADCAST = "message", "broadcast"

Groups = Sequence[tuple[str, int | Sequence[int] | None]]


def transfer_limit(timeout: float | None) -> float:
    """Time limit of a transfer: `timeout`, else ROOST_TRANSFER_TIMEOUT, else half an hour."""
    if timeout is not None:
        return timeout
    return float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT))


class Transfer:
    """Sends and receives of one worker. Messages of a pair arrive in order."""

    def __init__(self, place: Current) -> None:
        self._place = place

    @property
    def _me(self) -> Address:
        return self._place.link.who

    def group(self, name: str) -> GroupEntry:
        return GroupEntry(*self._place.link.ask("group", name))

    def send(self, obj: Any, to: Sequence[Address], kind: str, timeout: float | None) -> Pending[None]:
        """Send an object; done when the receivers' nodes have it, after which its memory may be changed."""
        link = self._place.link
        parcel = link.pack(obj, self._device_route(to))
        return Pending(
            link.send("send", kind, [tuple(who) for who in to], transfer_limit(timeout), parcel=parcel),
            lambda _: None,
        )

    def receive(self, sender: Address, kind: str, timeout: float | None) -> Pending[Any]:
        link = self._place.link
        future = link.request("receive", kind, tuple(sender), transfer_limit(timeout))

        def finish(answer: tuple[Any, list[Packet]]) -> Any:
            return link.unpack(answer[1][0], self._device())

        return Pending(future, finish)

    def broadcast(self, obj: Any, groups: Groups, src: Address | None, timeout: float | None) -> Pending[Any]:
        """Broadcast one member's object. All members call it with the same groups; the first is the default source."""
        members = self.members(groups)
        source = src or members[0]
        if self._me not in members:
            raise ValueError(f"{self._me} takes part in a broadcast among {', '.join(map(str, members))}")
        if source not in members:
            raise ValueError(f"the source {source} is not among {', '.join(map(str, members))}")
        if self._me != source:
            return self.receive(source, BROADCAST, timeout)
        others = [who for who in members if who != source]
        if not others:
            return Pending(_done(), lambda _: obj)
        sent = self.send(obj, others, BROADCAST, timeout)
        return Pending(sent._future, lambda _: obj)

    def members(self, groups: Groups) -> list[Address]:
        """Workers named by groups: `("actor", 0)`, `("rollout", [0, 1])`, or `("env", None)` for all ranks."""
        found: list[Address] = []
        for name, ranks in groups:
            if ranks is None:
                ranks = range(len(self.group(name).nodes))
            elif isinstance(ranks, int):
                ranks = [ranks]
            elif isinstance(ranks, str) or not all(isinstance(rank, int) for rank in ranks):
                raise TypeError(f"ranks of {name} are {ranks!r}; give a rank, a list of ranks, or None for all")
            found += [Address(name, rank) for rank in ranks]
        if len(set(found)) < len(found):
            raise ValueError(f"a worker is named twice among {', '.join(map(str, found))}")
        if not found:
            raise ValueError("a broadcast needs at least one worker")
        return found

    def _device_route(self, to: Sequence[Address]) -> DeviceRoute:
        """Use IPC if the only receiver shares the device, otherwise stage tensors in host memory."""
        setup = self._place.setup
        torch = sys.modules.get("torch")
        if setup is None or torch is None or len(to) != 1 or not setup.physical_ids or not torch.cuda.is_initialized():
            return "stage"
        entry = self.group(to[0].group)
        same_node = entry.nodes[to[0].rank] == setup.daemon.node
        shares = bool(set(entry.devices[to[0].rank]) & set(setup.physical_ids)) if entry.devices else False
        return "ipc" if same_node and shares and len(setup.physical_ids) == 1 else "stage"

    def _device(self) -> Any:
        """Target device of received device tensors: this worker's own, if torch can use it."""
        setup = self._place.setup
        torch = sys.modules.get("torch")
        if setup is None or torch is None or not setup.physical_ids or not torch.cuda.is_available():
            return None
        return torch.device("cuda", torch.cuda.current_device())


def _done() -> Any:
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future
