"""The driver's handles to the node daemons of a job. A node may be lost at any time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import cloudpickle

from roost.runtime.nodes import LiveNode
from roost.runtime.ray_errors import cause_of
from roost.transport.current import ProcessSetup
from roost.transport.failure import DaemonContact

LIMIT = 60.0  # seconds for a daemon to answer
CLOSING_LIMIT = 5.0


class NodeDaemons:
    """The daemons of a job in node order, followed by the driver's own if its node is not one of them."""

    def __init__(self, nodes: Sequence[LiveNode], started: Mapping[str, Any]) -> None:
        here = ray.get_runtime_context().get_node_id()
        members = {node.report.node_id: node.daemon for node in nodes}
        members.setdefault(here, started[here])  # joins even if no worker runs there
        dismiss([daemon for node, daemon in started.items() if node not in members])
        self.handles = list(members.values())
        lead = list(members).index(here)
        self.lead = self.handles[lead]
        joined = [daemon.ask.remote("join", rank, self.handles, lead) for rank, daemon in enumerate(self.handles)]
        self.contacts: list[DaemonContact] = [
            replace(contact, handle=daemon)
            for contact, daemon in zip(ray.get(joined, timeout=LIMIT), self.handles, strict=True)
        ]
        self.driver = self.contacts[lead]
        self.log_dirs: list[str] = ray.get([daemon.ask.remote("log_dir") for daemon in self.handles], timeout=LIMIT)

    def ask(self, node: int, method: str, *args: Any) -> Any:
        """Call a method of one daemon."""
        return ray.get(self.handles[node].ask.remote(method, *args), timeout=LIMIT)

    def ask_all(self, method: str, *args: Any, nodes: Sequence[int] | None = None) -> Iterator[tuple[int, Any]]:
        """Call a method of all daemons, or of some nodes'; yield nodes and answers, skipping lost daemons."""
        chosen = range(len(self.handles)) if nodes is None else nodes
        calls = [(node, self.handles[node].ask.remote(method, *args)) for node in chosen]
        for node, answer in calls:
            with contextlib.suppress(ray.exceptions.RayError):
                yield node, ray.get(answer, timeout=LIMIT)

    def tell_all(self, method: str, *args: Any) -> None:
        """Call a method of all daemons and discard the answers."""
        for _ in self.ask_all(method, *args):
            pass

    def assign(self, setups: Sequence[ProcessSetup]) -> None:
        """Send the daemons the setups that their workers wait for."""
        of_node: dict[int, list[tuple[Any, ...]]] = {}
        for setup in setups:
            packed = cloudpickle.dumps(setup)  # type: ignore[no-untyped-call]
            entry = (tuple(setup.address), setup.devices, setup.log_path, setup.max_restarts, packed)
            of_node.setdefault(setup.daemon.node, []).append(entry)
        assigned = [self.handles[node].ask.remote("assign", entries) for node, entries in of_node.items()]
        ray.get(assigned, timeout=LIMIT)

    def directory(self, method: str, *args: Any) -> Any:
        """Call a method of the job's directory."""
        try:
            return ray.get(self.lead.ask.remote("directory", method, *args), timeout=LIMIT)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None


def dismiss(daemons: Sequence[Any]) -> None:
    """Stop daemons after they have cleaned up."""
    closing = [daemon.ask.remote("close") for daemon in daemons]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=CLOSING_LIMIT)
    for daemon in daemons:
        ray.kill(daemon)
