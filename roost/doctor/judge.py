"""Check probed nodes: what is wrong, on which node, and how to fix it."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from roost.cluster.inventory import Bandwidth
from roost.config.findings import counted

OPEN_FILES = 4_096  # descriptors that a node with hundreds of workers needs
MOST_CLOCK_SKEW_S = 1.0
FREE_DISK_GB = 10.0
LEAST_DISK_GB = 0.05  # with less, not even logs and the checkpoint of a tiny model fit: the check fails
SHARED_MEMORY_GB = 1.0  # Docker's default is 64 MB
BUSY_FRACTION = 0.05  # of a GPU's memory
SLOW_LINK = 0.25  # of the median
MAX_NAMED = 8
ON_EVERY_NODE = ("roost", "python", "ray", "torch")  # other packages may be missing on nodes without GPUs
HOW_TO_INSTALL = {"python": "use Python {} there", "CUDA driver": "install the driver {} there"}


class Level(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table: a check, its result, what was found, and the fix."""

    name: str
    level: Level
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver describes it."""

    index: int
    name: str
    total_gb: float | None = None
    used_gb: float | None = None
    uncorrected_errors: int | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """Free space at a folder, and why files cannot be written there, if so."""

    path: str
    free_gb: float
    file_system: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PathState:
    """A model or data path on a node; the digest is of names, sizes and samples of the content."""

    path: str
    digest: str | None = None  # None: not there


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """The result of probing one node."""

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    clock_offset_s: float = 0.0  # against the driver
    disks: tuple[Disk, ...] = ()
    shared_memory_gb: float | None = None  # free; None: there is no /dev/shm
    open_files: tuple[int, int] = (OPEN_FILES, OPEN_FILES)  # soft and hard limit
    paths: tuple[PathState, ...] = ()
    sees_runs: bool | None = None  # the driver's runs folder; None: not asked


@dataclass(frozen=True, slots=True)
class Link:
    """Measured GB/s from one participant to another."""

    source: str
    target: str
    within_node: bool
    gb_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Bandwidth over all participants, or the reason why it could not be measured."""

    backend: str
    participants: int = 0
    all_reduce_gb_s: float | None = None
    links: tuple[Link, ...] = ()
    problem: str = ""

    @property
    def bandwidth(self) -> Bandwidth:
        """The figures for an inventory: all-reduce, and the slowest pairs."""
        within = [round(link.gb_s, 3) for link in self.links if link.within_node]
        between = [round(link.gb_s, 3) for link in self.links if not link.within_node]
        together = None if self.all_reduce_gb_s is None else round(self.all_reduce_gb_s, 3)
        return Bandwidth(together, min(within, default=None), min(between, default=None))


def judge_job(needed: int, nodes: Sequence[NodeHealth], is_cluster: bool = False) -> Check:
    """Compare the accelerators that a job uses with those of the nodes. Too few only warn: it may run elsewhere.

    >>> judge_job(8, [NodeHealth("here")]).level
    <Level.WARNING: 'warning'>
    >>> judge_job(8, [NodeHealth("n0"), NodeHealth("n1")], is_cluster=True).found
    'uses 8 accelerators, none in the cluster'
    """
    found = sum(len(node.gpus) for node in nodes)
    text = f"uses {counted(needed, 'accelerator')}, {found or 'none'} {'in the cluster' if is_cluster else 'here'}"
    if needed <= found:
        return Check("job", Level.OK, text)
    is_simulated = not found and not is_cluster
    fix = "roost train simulates them on the CPU" if is_simulated else "roost plan shows where each process runs"
    return Check("job", Level.WARNING, text, f"run it where there are {needed}; here, {fix}")


def judge_machine(node: NodeHealth) -> tuple[Check, ...]:
    """The quick checks: limits, shared memory and disks."""
    return (_open_files([node]), _shared_memory([node]), *_disks([node]))


def judge(nodes: Sequence[NodeHealth]) -> tuple[Check, ...]:
    """All checks of one or several nodes; the first is the driver's."""
    return (
        *_versions(nodes),
        _gpus(nodes),
        *([_clocks(nodes)] if len(nodes) > 1 else []),
        _open_files(nodes),
        _shared_memory(nodes),
        *_disks(nodes),
        *_paths(nodes),
        *_runs_folder(nodes),
    )


def failures(checks: Iterable[Check]) -> tuple[Check, ...]:
    return tuple(check for check in checks if check.level is Level.FAILED)


def judge_bandwidth(measured: Measured) -> tuple[Check, ...]:
    """Rows for all-reduce and for pairs; a pair far below the median is named."""
    name = f"bandwidth ({measured.backend})"
    if measured.problem:
        fix = "open the ports between the nodes, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to their interface"
        return (Check(name, Level.FAILED, measured.problem, fix),)
    checks = []
    if measured.all_reduce_gb_s is not None:
        found = f"all-reduce over {measured.participants}: {measured.all_reduce_gb_s:.2f} GB/s"
        checks.append(Check(name, Level.OK, found))
    for kind, is_within in (("within a node", True), ("between nodes", False)):
        links = [link for link in measured.links if link.within_node is is_within]
        if not links:
            continue
        middle = statistics.median(link.gb_s for link in links)
        slow = [link for link in links if link.gb_s < SLOW_LINK * middle]
        found = f"{kind}: {min(link.gb_s for link in links):.2f} to {max(link.gb_s for link in links):.2f} GB/s"
        if slow:
            pairs = ", ".join(f"{link.source} to {link.target} {link.gb_s:.2f}" for link in slow[:MAX_NAMED])
            fix = "look at the cable, switch port or interface of that node, or leave it out"
            checks.append(Check(name, Level.WARNING, f"{found}; slow: {pairs} (median {middle:.2f})", fix))
        else:
            checks.append(Check(name, Level.OK, found))
    return tuple(checks)


def _versions(nodes: Sequence[NodeHealth]) -> Iterator[Check]:
    with_gpus = [node for node in nodes if node.gpus] or nodes
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        compared = nodes if name in ON_EVERY_NODE else [node for node in with_gpus if name in node.versions]
        found: dict[str, list[str]] = defaultdict(list)
        for node in compared:
            found[node.versions.get(name, "")].append(node.name)
        wanted = next((version for version in found if version), None)
        if wanted is None:
            continue  # nodes without GPUs alone have it
        if len(found) == 1:
            yield Check(name, Level.OK, wanted)
            continue
        others = {version: where for version, where in found.items() if version != wanted}
        what = "; ".join(f"{version or 'missing'} on {_named(where)}" for version, where in others.items())
        fix = HOW_TO_INSTALL.get(name, f"pip install {name}=={{}} there").format(wanted)
        yield Check(name, Level.FAILED, f"{wanted} on {found[wanted][0]}, but {what}", fix)


def _gpus(nodes: Sequence[NodeHealth]) -> Check:
    problems, warnings, fixes = [], [], dict[str, None]()
    for node in nodes:
        if node.gpu_problem:
            problems.append(f"{node.name}: {node.gpu_problem}")
            fixes["run nvidia-smi there, and reload the driver or restart the node"] = None
        for gpu in node.gpus:
            if gpu.uncorrected_errors:
                problems.append(f"{node.name} GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected ECC errors")
                fixes["reset it (nvidia-smi --gpu-reset) or leave the node out"] = None
            if gpu.total_gb and gpu.used_gb is not None and gpu.used_gb > BUSY_FRACTION * gpu.total_gb:
                warnings.append(f"{node.name} GPU {gpu.index}: {gpu.used_gb:.1f} of {gpu.total_gb:.1f} GB in use")
                fixes["end what uses them (nvidia-smi shows the processes), or wait for it"] = None
    kinds = Counter((len(node.gpus), node.gpus[0].name if node.gpus else "") for node in nodes)
    there = ", ".join(
        f"{count} x {name}" + (f" on {many} nodes" if len(nodes) > 1 else "") if count else "none"
        for (count, name), many in kinds.items()
    )
    level = Level.FAILED if problems else Level.WARNING if warnings else Level.OK
    return Check("GPUs", level, "; ".join([*problems, *warnings][:MAX_NAMED]) or there, "; ".join(fixes))


def _clocks(nodes: Sequence[NodeHealth]) -> Check:
    off = [node for node in nodes if abs(node.clock_offset_s) > MOST_CLOCK_SKEW_S]
    if not off:
        most = max(abs(node.clock_offset_s) for node in nodes)
        return Check("clocks", Level.OK, f"within {most:.3f} s of the driver's")
    what = ", ".join(f"{node.name} {node.clock_offset_s:+.1f} s" for node in off[:MAX_NAMED])
    return Check("clocks", Level.FAILED, f"off the driver's: {what}", "synchronize them (chrony or systemd-timesyncd)")


def _open_files(nodes: Sequence[NodeHealth]) -> Check:
    low = [node for node in nodes if node.open_files[0] < OPEN_FILES]
    if not low:
        return Check("open files", Level.OK, f"at least {min(node.open_files[0] for node in nodes):,}")
    what = ", ".join(f"{node.open_files[0]:,} on {node.name}" for node in low[:MAX_NAMED])
    can_raise = all(node.open_files[1] >= OPEN_FILES for node in low)
    fix = (
        f"ulimit -n {min(node.open_files[1] for node in low)} before Ray starts there"
        if can_raise
        else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65535"
    )
    # A soft limit below the hard one is raised by Ray and Roost's own processes.
    return Check("open files", Level.WARNING if can_raise else Level.FAILED, f"{what}; {OPEN_FILES:,} are needed", fix)


def _shared_memory(nodes: Sequence[NodeHealth]) -> Check:
    fix = "docker run --shm-size=16g, an emptyDir of medium Memory, or mount -o remount,size=50% /dev/shm"
    small = [node for node in nodes if (node.shared_memory_gb or 0.0) < SHARED_MEMORY_GB]
    if not small:
        return Check("/dev/shm", Level.OK, f"at least {min(node.shared_memory_gb or 0 for node in nodes):.1f} GB free")
    what = ", ".join(
        f"{'none' if node.shared_memory_gb is None else f'{node.shared_memory_gb:.2f} GB free'} on {node.name}"
        for node in small[:MAX_NAMED]
    )
    # Ray falls back to a disk, and weights then travel more slowly.
    return Check("/dev/shm", Level.WARNING, f"{what}; {SHARED_MEMORY_GB:g} GB is the least", fix)


def _disks(nodes: Sequence[NodeHealth]) -> Iterator[Check]:
    for path in dict.fromkeys(disk.path for node in nodes for disk in node.disks):
        there = [(node, disk) for node in nodes for disk in node.disks if disk.path == path]
        broken = [f"{node.name}: {disk.problem}" for node, disk in there if disk.problem]
        low = [
            f"{disk.free_gb:.2f} GB free on {node.name}{f' ({disk.file_system})' if disk.file_system else ''}"
            for node, disk in there
            if disk.free_gb < FREE_DISK_GB and not disk.problem
        ]
        least = min(disk.free_gb for _, disk in there)
        if broken:
            fix = "make it writable there, or choose another folder (--runs, TMPDIR)"
            yield Check(f"disk {path}", Level.FAILED, "; ".join(broken[:MAX_NAMED]), fix)
        elif low:
            level = Level.FAILED if least < LEAST_DISK_GB else Level.WARNING
            fix = "free some space, or choose another folder (--runs, TMPDIR)"
            yield Check(f"disk {path}", level, ", ".join(low[:MAX_NAMED]), fix)
        else:
            yield Check(f"disk {path}", Level.OK, f"at least {least:.1f} GB free")


def _paths(nodes: Sequence[NodeHealth]) -> Iterator[Check]:
    for path in dict.fromkeys(state.path for node in nodes for state in node.paths):
        found = [(node.name, state.digest) for node in nodes for state in node.paths if state.path == path]
        missing = [name for name, digest in found if digest is None]
        other = [name for name, digest in found if digest != found[0][1]]
        if missing:
            fix = "copy it there, or keep it on a disk that all nodes share"
            yield Check(path, Level.FAILED, f"missing on {_named(missing)}", fix)
        elif other:
            fix = "copy it again from one node to the others"
            yield Check(path, Level.FAILED, f"differs on {_named(other)} from {found[0][0]}", fix)
        else:
            where = f"the same on {len(found)} nodes" if len(found) > 1 else "present"
            yield Check(path, Level.OK, where)


def _runs_folder(nodes: Sequence[NodeHealth]) -> Iterator[Check]:
    asked = [node for node in nodes if node.sees_runs is not None]
    blind = [node.name for node in asked if not node.sees_runs]
    if blind:
        fix = "keep runs on a disk that all machines share (--runs)"
        yield Check("runs folder", Level.FAILED, f"not seen by {_named(blind)}", fix)
    elif len(asked) > 1:
        yield Check("runs folder", Level.OK, "shared by all nodes")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
