"""A draft of a changed plan: processes lose their devices and are placed again on free accelerators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from roost.cluster.inventory import ACCELERATOR, NODE, Ints, Inventory
from roost.config.job import Role
from roost.placement.component_plan import ComponentPlan, PlacementTable, offsets_of
from roost.placement.plan import Plan
from roost.placement.rules.mesh import most_ranks

MAX_UNITS = 64  # units that the search places; more are placed first fit
MAX_VISITS = 20_000  # states of the search; beyond, the best one found is taken


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal units to place: each takes `size` accelerators of one of the nodes."""

    count: int
    size: int
    nodes: frozenset[int]


def assign(demands: Sequence[Demand], free: Mapping[int, int]) -> list[list[int]]:
    """Nodes for the units of each demand, for as many units as possible; units without room are left out.

    `free` has the number of free accelerators of each node. Nodes of low rank are taken first.

    >>> assign([Demand(2, 1, frozenset({0, 1})), Demand(1, 1, frozenset({0}))], {0: 1, 1: 2})
    [[1, 1], [0]]
    >>> assign([Demand(3, 2, frozenset({0, 1}))], {0: 3, 1: 2})
    [[0, 1]]
    """
    first = _first_fit(demands, free)
    is_full = all(len(nodes) == demand.count for demand, nodes in zip(demands, first, strict=True))
    if is_full or len(demands) == 1 or sum(demand.count for demand in demands) > MAX_UNITS:
        return first
    return _Search(demands, free).best


def _first_fit(demands: Sequence[Demand], free: Mapping[int, int]) -> list[list[int]]:
    """Place each unit on the first node with room. For a single demand, this places as many as possible."""
    left, chosen = dict(free), []
    for demand in demands:
        nodes: list[int] = []
        for node in sorted(demand.nodes & left.keys()):
            count = min(left[node] // demand.size, demand.count - len(nodes))
            nodes += [node] * count
            left[node] -= count * demand.size
        chosen.append(nodes)
    return chosen


class _Search:
    """Depth-first search over the demands and, for each, over the nodes; ends when a bound is reached."""

    def __init__(self, demands: Sequence[Demand], free: Mapping[int, int]) -> None:
        self._demands = demands
        self._free = dict(free)
        self._nodes = sorted(free)
        self._kinds = {node: tuple(node in demand.nodes for demand in demands) for node in self._nodes}
        self._chosen: list[list[int]] = [[] for _ in demands]
        self.best: list[list[int]] = [[] for _ in demands]
        self._best_count = 0
        self._visits = 0
        self._limit = self._bound(0, 0)
        self._visit(0, 0)

    def _bound(self, index: int, first: int) -> int:
        """Upper bound of the units still to place: what each demand from `index` on could place if it were alone."""
        total = 0
        for number, demand in enumerate(self._demands[index:], index):
            start = first if number == index else 0
            room = sum(self._free[node] // demand.size for node in self._nodes[start:] if node in demand.nodes)
            total += min(demand.count - len(self._chosen[number]), room)
        return total

    def _visit(self, index: int, first: int) -> None:
        """Place the rest of demand `index` on the nodes from position `first`, then the next demands."""
        self._visits += 1
        count = sum(map(len, self._chosen))
        if count > self._best_count:
            self._best_count, self.best = count, [list(nodes) for nodes in self._chosen]
        if index == len(self._demands) or count + self._bound(index, first) <= self._best_count:
            return
        demand, tried = self._demands[index], set()
        if len(self._chosen[index]) < demand.count:
            for position in range(first, len(self._nodes)):
                node = self._nodes[position]
                alike = self._free[node], self._kinds[node]  # such nodes are interchangeable
                if node not in demand.nodes or self._free[node] < demand.size or alike in tried:
                    continue
                tried.add(alike)
                self._free[node] -= demand.size
                self._chosen[index].append(node)
                self._visit(index, position)
                self._chosen[index].pop()
                self._free[node] += demand.size
                if self._best_count == self._limit or self._visits > MAX_VISITS:
                    return
        self._visit(index + 1, 0)


Device = tuple[int, int]  # node, index on it
ProcessId = tuple[str, int]  # component, rank
GROUPED = (Role.LEARNER, Role.SCORER)  # their processes are one group that starts together


class Assignment(NamedTuple):
    """Node of one process, its group (index into the labels of its table) and its devices."""

    node: int
    group: int
    devices: tuple[Device, ...]


class Member(NamedTuple):
    """A process of a unit: its slot in the draft, and which of the unit's devices it holds."""

    name: str
    slot: int
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Processes that share accelerators and are placed together, on one node."""

    members: tuple[Member, ...]
    size: int  # accelerators
    nodes: frozenset[int]


class Draft:
    """A changed plan that is not finished.

    `assignments` has an entry for each process of a component: first those of the plan by rank, then new ones. It is
    None for a process that is not placed.
    """

    def __init__(self, plan: Plan, inventory: Inventory) -> None:
        self.plan, self.inventory = plan, inventory
        self.assignments: dict[str, list[Assignment | None]] = {
            part.name: list(assignments_of(part.table)) for part in plan.components
        }
        self._nodes: dict[str, dict[int, int]] = {}

    def copy(self) -> Draft:
        other = Draft(self.plan, self.inventory)
        other.assignments = {name: list(assignments) for name, assignments in self.assignments.items()}
        return other

    # Queries ------------------------------------------------------------------------------------------------------

    def kind(self, name: str, assignment: Assignment) -> str:
        return self.plan[name].table.kinds[assignment.group]

    def size(self, name: str) -> int:
        """Accelerators of one process."""
        table = self.plan[name].table
        return int(np.diff(table.offsets).max(initial=0)) if ACCELERATOR in table.kinds else 0

    def nodes_for(self, name: str) -> dict[int, int]:
        """Nodes that may run the component's processes, with the group that each belongs to."""
        if name in self._nodes:
            return self._nodes[name]
        table, found = self.plan[name].table, self._nodes.setdefault(name, {})
        types = {self.plan.inventory.nodes[node].accelerator_type for node in np.unique(table.nodes).tolist()}
        for group, (label, kind) in enumerate(zip(table.labels, table.kinds, strict=True)):
            for node in self.inventory.group(label).node_ranks.tolist():
                machine = self.inventory.nodes[node]
                is_fit = kind == NODE or (kind == ACCELERATOR and machine.accelerator_type in types)
                if is_fit and not machine.lost:
                    found.setdefault(node, group)
        return found

    def free(self) -> dict[int, list[int]]:
        """Accelerators that no process holds, by node."""
        held = {
            device
            for name, assignments in self.assignments.items()
            for assignment in assignments
            if assignment is not None and self.kind(name, assignment) == ACCELERATOR
            for device in assignment.devices
        }
        return {
            node: [index for index in range(machine.accelerators) if (node, index) not in held]
            for node, machine in enumerate(self.inventory.nodes)
            if not machine.lost
        }

    def is_grouped(self, unit: Unit) -> bool:
        return any(self.plan[member.name].role in GROUPED for member in unit.members)

    def is_assigned(self, unit: Unit) -> bool:
        return all(self.assignments[name][slot] is not None for name, slot, _ in unit.members)

    def missing(self) -> list[str]:
        """Components that have no process left."""
        return [
            name
            for name, assignments in self.assignments.items()
            if all(assignment is None for assignment in assignments)
        ]

    def cost(self) -> tuple[int, int, int]:
        """Learner and scorer processes removed, processes changed though their nodes are left, and others removed."""
        removed_grouped, changed, removed = 0, 0, 0
        for part in self.plan.components:
            now = self.assignments[part.name]
            for assignment, other in zip(assignments_of(part.table), now, strict=True):
                nodes = {assignment.node, *(node for node, _ in assignment.devices)}
                changed += assignment != other and not any(self.inventory.nodes[node].lost for node in nodes)
            missing = sum(assignment is None for assignment in now)
            if part.role in GROUPED:
                removed_grouped += missing
            else:
                removed += missing
        return removed_grouped, changed, removed

    # Changes ------------------------------------------------------------------------------------------------------

    def unit(self, slots: Sequence[ProcessId], devices: Sequence[Device] | None = None) -> Unit:
        """A unit of the processes in these slots, which hold `devices`; None for one process that shares nothing."""
        allowed = [frozenset(self.nodes_for(name)) for name, _ in dict(slots).items()]
        nodes = frozenset.intersection(*allowed)
        if devices is None:
            ((name, slot),) = slots
            size = self.size(name)
            return Unit((Member(name, slot, tuple(range(size))),), size, nodes)
        number = {device: index for index, device in enumerate(devices)}
        old = {(name, slot): self.assignments[name][slot] for name, slot in slots}
        members = (
            Member(name, slot, tuple(number[device] for device in assignment.devices))
            for (name, slot), assignment in old.items()
            if assignment is not None
        )
        return Unit(tuple(members), len(devices), nodes)

    def take_lost(self, apart: bool) -> tuple[list[Unit], list[Unit]]:
        """Unassign the processes of lost nodes. Return their units: those with learners or scorers, then the others.

        With `apart`, engines and workers that shared devices with a learner or scorer are units of their own.
        """
        lost = set(self.inventory.lost)
        gone = [
            (name, slot)
            for name, assignments in self.assignments.items()
            for slot, assignment in enumerate(assignments)
            if assignment is not None and lost & {assignment.node, *(node for node, _ in assignment.devices)}
        ]
        grouped = [process for process in gone if self.plan[process[0]].role in GROUPED]
        others = [process for process in gone if self.plan[process[0]].role not in GROUPED]
        units = [
            self.unit(*shared)
            for processes in ([grouped, others] if apart else [gone])
            for shared in self._sharing(processes)
        ]
        self.remove(gone)
        units = [unit for unit in units if unit.nodes]
        return [unit for unit in units if self.is_grouped(unit)], [unit for unit in units if not self.is_grouped(unit)]

    def _sharing(self, slots: Sequence[ProcessId]) -> list[tuple[list[ProcessId], list[Device]]]:
        """Group processes that share accelerators; each group comes with its accelerators."""
        found: list[tuple[list[ProcessId], list[Device]]] = []
        of_device: dict[Device, int] = {}
        for name, slot in slots:
            assignment = self.assignments[name][slot]
            if assignment is None or self.kind(name, assignment) not in (ACCELERATOR, NODE):
                continue  # declared devices do not move
            shared = sorted({of_device[device] for device in assignment.devices if device in of_device})
            first = shared[0] if shared else len(found)
            if not shared:
                found.append(([], []))
            for members, devices in (found[other] for other in shared[1:]):
                found[first][0].extend(members)
                found[first][1].extend(devices)
                members.clear()
            found[first][0].append((name, slot))
            found[first][1].extend(device for device in assignment.devices if device not in of_device)
            of_device |= dict.fromkeys(found[first][1], first)
        return [(members, sorted(devices)) for members, devices in found if members]

    def place(self, units: Sequence[Unit]) -> None:
        """Place as many units as there is room for."""
        alike: dict[tuple[int, frozenset[int]], list[Unit]] = {}
        for unit in (unit for unit in units if unit.size):
            alike.setdefault((unit.size, unit.nodes), []).append(unit)
        demands = [Demand(len(same), size, nodes) for (size, nodes), same in alike.items()]
        free = self.free()
        room = {node: len(devices) for node, devices in free.items()}
        for same, nodes in zip(alike.values(), assign(demands, room), strict=True):
            for unit, node in zip(same, nodes, strict=False):
                self._put(unit, node, free[node])
                del free[node][: unit.size]
        for unit in (unit for unit in units if not unit.size and unit.nodes):
            placed = [each for each in self.assignments[unit.members[0].name] if each is not None]
            on_node = Counter(assignment.node for assignment in placed)
            self._put(unit, min(unit.nodes, key=lambda node: (on_node[node], node)), [])

    def _put(self, unit: Unit, node: int, free: Sequence[int]) -> None:
        for name, slot, held in unit.members:
            devices = tuple((node, free[index]) for index in held)
            self.assignments[name][slot] = Assignment(node, self.nodes_for(name)[node], devices)

    def place_grouped(self, units: Sequence[Unit]) -> list[Unit] | None:
        """Place all units: on free accelerators, else also on those of engines, else on any; None if there is no way.

        Returns units of the processes that had to leave; there may be room for them elsewhere.
        """
        if self._place_all(units):
            return []
        for roles, spared in (((Role.ENGINE,), 1), ((Role.ENGINE, *GROUPED), 0)):
            trial = self.copy()
            leaving = trial._make_room_for_all(units, roles, spared)
            if leaving is None:
                continue
            self.remove(leaving)
            if not self._place_all(units):  # preferred to the trial, because it places units in the order of ranks
                trial.place([unit for unit in units if not unit.size])
                self.assignments = trial.assignments
            return [self.unit([process]) for process in leaving]
        return None

    def _make_room_for_all(self, units: Sequence[Unit], roles: Collection[Role], spared: int) -> list[ProcessId] | None:
        left: list[ProcessId] = []
        mine = {(member.name, member.slot) for unit in units for member in unit.members}
        for unit in sorted((unit for unit in units if unit.size), key=lambda unit: (-unit.size, len(unit.nodes))):
            leaving = self.make_room(unit, roles, spared)
            if leaving is None or mine & set(leaving):
                return None
            left += leaving
        return left

    def _place_all(self, units: Sequence[Unit]) -> bool:
        """Place all units on free accelerators, or none."""
        trial = self.copy()
        trial.place(units)
        if not all(trial.is_assigned(unit) for unit in units):
            return False
        self.assignments = trial.assignments
        return True

    def remove(self, processes: Sequence[ProcessId]) -> None:
        for name, slot in processes:
            self.assignments[name][slot] = None

    def make_room(self, unit: Unit, roles: Collection[Role], spared: int = 1) -> list[ProcessId] | None:
        """Place a unit where the fewest processes of these roles have to leave; None if that is not possible.

        Each component keeps at least `spared` processes, including those of the unit.
        """
        left = Counter(member.name for member in unit.members)
        on_nodes: dict[int, dict[ProcessId, list[Device]]] = {}
        for name, assignments in self.assignments.items():
            for slot, assignment in enumerate(assignments):
                left[name] += assignment is not None
                if assignment is not None and self.kind(name, assignment) == ACCELERATOR:
                    for device in assignment.devices:
                        on_nodes.setdefault(device[0], {}).setdefault((name, slot), []).append(device)
        free = self.free()
        choices = [
            (*self._to_evict(on_nodes.get(node, {}), unit.size - len(free[node]), left, roles, spared), node)
            for node in sorted(unit.nodes)
        ]
        fitting = [choice for choice in choices if choice[0] + len(free[choice[2]]) >= unit.size]
        if not fitting:
            return None
        _, leaving, node = min(fitting, key=lambda choice: (len(choice[1]), -choice[0] - len(free[choice[2]])))
        self.remove(leaving)
        self._put(unit, node, self.free()[node])
        return leaving

    def _to_evict(
        self,
        there: Mapping[ProcessId, Sequence[Device]],
        wanted: int,
        left: Mapping[str, int],
        roles: Collection[Role],
        spared: int,
    ) -> tuple[int, list[ProcessId]]:
        """Accelerators of a node that become free, and the processes to remove for that, as few as possible."""
        users = Counter(device for devices in there.values() for device in devices)
        able = {process: devices for process, devices in there.items() if self.plan[process[0]].role in roles}
        freed, chosen, still = 0, [], dict(left)

        def gain(process: ProcessId) -> tuple[int, float, int, str]:
            """Devices freed; of processes that share all their devices, those with the fewest others come first."""
            counts = [users[device] for device in able[process]]
            return counts.count(1), sum(1 / count for count in counts), process[1], process[0]

        while freed < wanted:
            best = max((process for process in able if still[process[0]] > spared), key=gain, default=None)
            if best is None:
                break
            freed, still[best[0]] = freed + gain(best)[0], still[best[0]] - 1
            users.subtract(able.pop(best))
            chosen.append(best)
        return freed, chosen

    def drop_uneven(self) -> None:
        """Remove processes of learners and scorers until their sizes divide the number that is left."""
        for part in (part for part in self.plan.components if part.role in GROUPED):
            assignments = self.assignments[part.name]
            left = [slot for slot, assignment in enumerate(assignments) if assignment is not None]
            if len(left) < part.world_size:
                for slot in left[most_ranks(part, len(left)) :]:
                    assignments[slot] = None

    def component(self, part: ComponentPlan) -> ComponentPlan:
        """The component with the assignments of the draft."""
        table = part.table
        assignments = [assignment for assignment in self.assignments[part.name] if assignment is not None]
        if tuple(assignments) == assignments_of(table):
            return replace(part, table=replace(table, inventory=self.inventory))
        devices = np.array([device for assignment in assignments for device in assignment.devices], np.int64).reshape(
            -1, 2
        )
        lengths = np.array([len(assignment.devices) for assignment in assignments], np.int64)
        new = PlacementTable(
            self.inventory,
            table.labels,
            table.kinds,
            nodes=np.array([assignment.node for assignment in assignments], np.int64),
            groups=np.array([assignment.group for assignment in assignments], np.int64),
            offsets=offsets_of(lengths),
            device_nodes=devices[:, 0],
            device_ranks=devices[:, 1],
            isolate=table.isolate,
        )
        return replace(part, hardware_ranks=_hardware_ranks(new), table=new)


def assignments_of(table: PlacementTable) -> tuple[Assignment, ...]:
    devices = list(zip(table.device_nodes.tolist(), table.device_ranks.tolist(), strict=True))
    bounds = table.offsets.tolist()
    columns = zip(table.nodes.tolist(), table.groups.tolist(), bounds[:-1], bounds[1:], strict=True)
    return tuple(Assignment(node, group, tuple(devices[low:high])) for node, group, low, high in columns)


def _hardware_ranks(table: PlacementTable) -> Ints:
    """Resource ranks that a table uses, in the order of its processes: nodes if it assigns no devices."""
    resources = table.inventory.resources(table.labels)
    if NODE in table.kinds:
        resources = resources.node_table()
    first = {
        (int(group), int(node)): int(start)
        for group, node, start in zip(resources.groups, resources.nodes, resources.starts[:-1], strict=True)
    }
    if NODE in table.kinds:
        pairs = zip(table.groups.tolist(), table.nodes.tolist(), strict=True)
        return np.array(list(dict.fromkeys(first[pair] for pair in pairs)), np.int64)
    groups = table.groups[table.owners].tolist()
    held = zip(groups, table.device_nodes.tolist(), table.device_ranks.tolist(), strict=True)
    return np.array(list(dict.fromkeys(first[group, node] + index for group, node, index in held)), np.int64)
