"""A group on its way: its processes start while it is still being found out which accelerators they get."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from roost.placement.component_plan import ComponentPlan
from roost.runtime import launcher
from roost.runtime.agents import Agents
from roost.runtime.group import GroupSpec, LaunchOptions


@dataclass(frozen=True, slots=True)
class Request:
    """A group that is to be launched."""

    name: str
    spec: GroupSpec
    component: ComponentPlan
    options: LaunchOptions
    packed: Any  # the class and the arguments of its workers, ready to be sent


class Launching:
    """Starts a group's processes; they wait at their agents until `assign` says what each of them is."""

    def __init__(self, asked: Request, live_nodes: Sequence[int], site: launcher.Site, agents: Agents) -> None:
        self._asked, self._live_nodes, self._site, self._agents = asked, live_nodes, site, agents
        self.places = launcher.places(asked.name, asked.component, asked.options, live_nodes)
        self.meeting_node = self.places[0].node
        self.port: int = agents.ask(self.meeting_node, "lease_port")
        self.hosts: list[Any] = []
        try:
            self.hosts = launcher.start_hosts(asked.spec, asked.packed, self.places, site, asked.options)
        except BaseException:
            self.abandon()
            raise

    def assign(self, held: Mapping[tuple[int, int], int]) -> None:
        """Tell every process its place, and the job of the group. `held` are the accelerators that the job has."""
        nodes = [place.node for place in self.places]
        master = launcher.master_address(nodes, self._site.reports), self.port
        setups = launcher.process_setups(
            self.places, self._asked.component, self._asked.options, self._live_nodes, self._site, held, master
        )
        self._agents.directory("add_group", launcher.group_entry(self._asked.name, setups))
        self._agents.assign(setups)

    def abandon(self) -> None:
        """Leave nothing of it, however far it got; a node may be lost meanwhile."""
        addresses = [tuple(place.address) for place in self.places]
        with contextlib.suppress(ray.exceptions.RayError):
            self._agents.tell_all("expect_end", addresses)
            for host in self.hosts:
                ray.kill(host)
            self._agents.directory("remove_group", self._asked.name)
            self._agents.tell_all("forget", addresses)
            self._agents.ask(self.meeting_node, "release_port", self.port)
