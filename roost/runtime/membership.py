"""Node reports of a cluster: rank order, missing nodes, and checks of versions and device counts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address

from roost.cluster.allocation import CHOSEN
from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.accelerators.simulated import COUNT_VARIABLE
from roost.cluster.inventory import NO_ACCELERATOR, Node
from roost.config.findings import Findings, Where, counted, shown
from roost.config.ranks import spell_ranks

CLUSTER = Where("Ray cluster")
MAX_NAMED = 16  # nodes in one message
MAX_DIGITS = 9  # of a node rank
RANK_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")


def order_nodes(
    reports: Iterable[NodeReport], findings: Findings, num_nodes: int | None = None
) -> tuple[NodeReport, ...] | None:
    """The first `num_nodes` nodes by rank; None if there are errors.

    Ranks set on every node are used. If none is set, the driver's node is first and the others follow by address, so
    that a restarted cluster has the same ranks regardless of the order in which nodes joined. Ranks that a scheduler
    set are used for their order only: Ray may run on some of the scheduler's nodes, or on those of several of its jobs.
    Nodes with the same range of ranks (8-15) share it in the order of their addresses.

    >>> nodes = [NodeReport(node_id=host, address=f"10.0.0.{last}", hostname=host, is_driver=host == "c")
    ...          for host, last in (("a", 10), ("b", 2), ("c", 7))]
    >>> [node.hostname for node in order_nodes(nodes, Findings())]
    ['c', 'b', 'a']
    """
    errors = findings.num_errors
    by_address = _with_single_ranks(sorted(reports, key=_address_order))
    wanted = 1 if num_nodes is None else num_nodes  # a cluster without nodes is no cluster
    if len(by_address) < wanted:
        findings.error("RST-R001", CLUSTER, missing_nodes(wanted, by_address), fix=how_to_join(by_address))
    _report_contradictions(by_address, findings)
    is_chosen = any(_written(report) and _variable(report) in CHOSEN for report in by_address)
    ordered = _by_rank(by_address, num_nodes, findings) if is_chosen else _by_scheduler(by_address, findings)
    if findings.num_errors > errors:
        return None
    if not any(_written(report) for report in by_address):
        _warn_of_shared_addresses(ordered, len(ordered) if num_nodes is None else num_nodes, findings)
    if num_nodes is not None and num_nodes < len(ordered):
        findings.warn(
            "RST-R002",
            CLUSTER,
            f"{len(ordered) - num_nodes} of {len(ordered)} nodes are not used: {_names(ordered[num_nodes:])}",
            f"num_nodes is {num_nodes}",
            f"raise num_nodes to use them, or choose the nodes with {CHOSEN[0]}",
        )
    return tuple(ordered[:num_nodes])


def _address_order(report: NodeReport) -> tuple[bool, int, int, str, str]:
    """Sort key by numeric address, because as text 10.0.0.10 sorts before 10.0.0.2; other addresses come last."""
    try:
        address = ip_address(report.address)
    except ValueError:
        return not report.is_driver, 99, 0, report.address, report.node_id
    return not report.is_driver, address.version, int(address), report.address, report.node_id


def _written(report: NodeReport) -> str:
    """The rank as written; an empty variable counts as unset."""
    return (report.rank_text or "").strip()


def _rank(report: NodeReport) -> int | None:
    text = _written(report)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def _report_contradictions(reports: Sequence[NodeReport], findings: Findings) -> None:
    for report in reports:
        if report.rank_problem:
            findings.error(
                "RST-R023",
                CLUSTER,
                f"variables of {report.name} contradict each other",
                report.rank_problem,
                f"unset the wrong one before `ray start` on {report.address}",
            )


def _by_scheduler(reports: list[NodeReport], findings: Findings) -> list[NodeReport]:
    """Nodes in the order of the ranks that a scheduler gave them; by address if these do not order all of them."""
    ranks = [_rank(report) for report in reports]
    if None not in ranks and len(set(ranks)) == len(ranks):
        return sorted(reports, key=lambda report: _rank(report) or 0)
    written = [report for report in reports if _written(report)]
    if written and len(reports) > 1:
        found = ", ".join(f"{_variable(one)}={_written(one)} on {one.address}" for one in written[:MAX_NAMED])
        findings.warn(
            "RST-R024",
            CLUSTER,
            "ranks of the scheduler do not order the nodes, so they are ordered by address",
            f"a rank is missing, repeated or no number: {found}",
            f"export {CHOSEN[0]}, 0 to {len(reports) - 1}, before `ray start` of every node if the order matters",
        )
    return reports


def _with_single_ranks(reports: list[NodeReport]) -> list[NodeReport]:
    """Give nodes with a range of ranks, such as 8-15, its next free rank: pods of a group share one environment."""
    taken = {_rank(report) for report in reports}
    given = []
    for report in reports:
        bounds = RANK_RANGE.fullmatch(_written(report))
        ranks = range(int(bounds[1]), int(bounds[2]) + 1) if bounds else range(0)
        rank = next((rank for rank in ranks if rank not in taken), None)
        taken.add(rank)
        given.append(report if rank is None else replace(report, rank_text=str(rank)))
    return given


def _by_rank(reports: list[NodeReport], num_nodes: int | None, findings: Findings) -> list[NodeReport]:
    """Nodes in the order of their written ranks; invalid ranks become findings."""
    total = max(len(reports), num_nodes or 0)
    ranked: dict[int, list[NodeReport]] = defaultdict(list)
    for report in reports:
        if (rank := _rank(report)) is not None:
            ranked[rank].append(report)
    free = (rank for rank in range(total) if rank not in ranked)
    errors = findings.num_errors
    _report_nodes_without_rank(reports, free, findings)
    for report in reports:
        if _written(report) and _rank(report) is None:
            findings.error(
                "RST-R004",
                CLUSTER,
                f"{report.name} has {_variable(report)}={shown(_written(report))}, which is not a node rank",
                f"ranks of {counted(total, 'node')} are whole numbers from 0 to {total - 1}",
                _export(zip([report], free, strict=False)),
            )
    for rank, nodes in sorted(ranked.items()):
        if len(nodes) > 1:
            findings.error(
                "RST-R005",
                CLUSTER,
                f"{len(nodes)} nodes have the rank {rank}: {_names(nodes)}",
                f"{_variable(nodes[0])}={rank} is set on each of them",
                _export(zip(nodes[1:], free, strict=False)),
            )
    if findings.num_errors == errors and len(reports) >= (num_nodes or 1):
        _report_gaps({rank: nodes[0] for rank, nodes in ranked.items()}, num_nodes or total, findings)
    return [node for _, nodes in sorted(ranked.items()) for node in nodes]


def _report_nodes_without_rank(reports: Sequence[NodeReport], free: Iterator[int], findings: Findings) -> None:
    without = [report for report in reports if not _written(report)]
    if without:
        findings.error(
            "RST-R003",
            CLUSTER,
            f"{len(without)} of {len(reports)} nodes have no rank: {_names(without)}",
            f"{_variable(next(report for report in reports if _written(report)))} must be set on all nodes or on none",
            _export(zip(without, free, strict=False)),
        )


def _report_gaps(ranked: dict[int, NodeReport], count: int, findings: Findings) -> None:
    missing = [rank for rank in range(count) if rank not in ranked]
    if missing:
        beyond = [ranked[rank] for rank in sorted(ranked) if rank >= count]
        findings.error(
            "RST-R006",
            CLUSTER,
            f"no node has the rank {spell_ranks(missing)}",
            f"the ranks of {counted(count, 'node')} are 0 to {count - 1}; written are {spell_ranks(sorted(ranked))}",
            _export(zip(beyond, missing, strict=False)),
        )


def _variable(report: NodeReport) -> str:
    return report.rank_variable or CHOSEN[0]


def _export(ranks: Iterable[tuple[NodeReport, int]]) -> str:
    """Fix text that gives nodes their ranks; names at most three nodes."""
    given = list(ranks)
    first = [f"export {_variable(node)}={rank} before `ray start` on {node.address}" for node, rank in given[:3]]
    more = [f"the next ranks on {counted(len(given) - 3, 'more node')}"] if len(given) > 3 else []
    return ", ".join([*first, *more, "or unset it everywhere"])


def _warn_of_shared_addresses(ordered: Sequence[NodeReport], used: int, findings: Findings) -> None:
    """Warn of nodes that share an address, as in a test cluster: no persistent property orders them."""
    sharing: dict[str, list[int]] = defaultdict(list)
    for rank, report in enumerate(ordered):
        if not report.is_driver:
            sharing[report.address].append(rank)
    for address, ranks in sharing.items():
        if len(ranks) > 1 and ranks[0] < used:
            findings.warn(
                "RST-R007",
                CLUSTER,
                f"{len(ranks)} nodes share the address {address}; they are ordered by their Ray ids",
                "the ids are new whenever Ray starts, so after a restart the order is arbitrary",
                f"export {CHOSEN[0]}, 0 to {len(ordered) - 1}, before `ray start` of every node",
            )


def _names(nodes: Sequence[NodeReport | str]) -> str:
    named = [node if isinstance(node, str) else node.name for node in nodes[:MAX_NAMED]]
    more = [f"and {len(nodes) - MAX_NAMED:,} more"] if len(nodes) > MAX_NAMED else []
    return ", ".join([*named, *more])


def missing_nodes(num_nodes: int, joined: Sequence[NodeReport | str]) -> str:
    """Describe the nodes that joined and, if ranks are set, the missing ranks; a node may be just its address.

    >>> missing_nodes(4, ["10.0.0.1", "10.0.0.2"])
    'expected 4 nodes, 2 joined: 10.0.0.1, 10.0.0.2'
    """
    present = f"{len(joined)} joined: {_names(joined)}" if joined else "none joined"
    text = f"expected {counted(num_nodes, 'node')}, {present}"
    ranks = {_rank(node) if isinstance(node, NodeReport) else None for node in joined}
    absent = [rank for rank in range(num_nodes) if rank not in ranks]
    if ranks and None not in ranks and absent:
        text += f"; missing {'is rank' if len(absent) == 1 else 'are ranks'} {spell_ranks(absent)}"
    return text


def how_to_join(joined: Sequence[NodeReport | str]) -> str:
    """Fix text with the command to run on missing nodes.

    >>> how_to_join([NodeReport(node_id="f00d", address="10.0.0.1", hostname="alpha", is_head=True)])
    'run `ray start --address=10.0.0.1:PORT` on the others, with the port of the head'
    """
    heads = [node.address for node in joined if isinstance(node, NodeReport) and node.is_head]
    head = next((f"[{address}]" if ":" in address else address for address in heads), "HEAD")
    others = f"run `ray start --address={head}:PORT` on the others, with the port of the head"
    return others if joined else f"run `ray start --head` on one node; {others}"


def check_versions(reports: Sequence[NodeReport], findings: Findings) -> None:
    """Report nodes whose Python or Ray differs from the driver's; they could not unpickle each other's objects.

    >>> findings = Findings()
    >>> check_versions([NodeReport(node_id=host, address=host, hostname=host, ray_version=version)
    ...                 for host, version in (("alpha", "2.60.0"), ("beta", "2.59.0"))], findings)
    >>> findings.errors[0].what
    'Ray is 2.59.0 on beta, but 2.60.0 on alpha'
    """
    if not reports:
        return
    leading = min(reports, key=lambda report: (not report.is_driver, not report.is_head))
    for word, version_of, fix in (
        ("Python", _python_minor, "start Ray there in an environment with Python {}"),
        ("Ray", lambda report: report.ray_version, "install ray=={} there and start Ray again"),
    ):
        for what in _other_versions(word, reports, leading, version_of):
            findings.error(
                "RST-R008",
                CLUSTER,
                what,
                "workers on these nodes could not communicate with the driver",
                fix.format(version_of(leading)),
            )
    for what in _other_versions("Roost", reports, leading, lambda report: report.roost_version):
        findings.warn(
            "RST-R008",
            CLUSTER,
            what,
            "these nodes may read a plan differently",
            f"install roost=={leading.roost_version} there",
        )


def _python_minor(report: NodeReport) -> str:
    return ".".join(report.python_version.split(".")[:2])


def _other_versions(
    word: str, reports: Sequence[NodeReport], leading: NodeReport, version_of: Callable[[NodeReport], str]
) -> Iterator[str]:
    """Message for each version that differs from the leading node's; unknown versions are skipped."""
    nodes: dict[str, list[NodeReport]] = defaultdict(list)
    for report in reports:
        nodes[version_of(report)].append(report)
    for version in sorted(nodes.keys() - {"", version_of(leading)}):
        if version_of(leading):
            yield f"{word} is {version} on {_names(nodes[version])}, but {version_of(leading)} on {leading.name}"


def check_device_counts(reports: Iterable[NodeReport], findings: Findings) -> None:
    """Report nodes where Ray and Roost count accelerators differently, so that a rank would mean two devices.

    >>> findings = Findings()
    >>> check_device_counts([NodeReport(node_id="f00d", address="10.0.0.2", hostname="beta",
    ...                                 physical_ids=("0", "1"), ray_accelerators=1)], findings)
    >>> findings.errors[0].what
    'Ray counts 1 GPU on 10.0.0.2 (beta), where Roost finds 2 accelerators'
    """
    for report in reports:
        if report.detection_problem:
            findings.error(
                "RST-R009",
                CLUSTER,
                f"the accelerators of {report.name} cannot be counted: {' '.join(report.detection_problem.split())}",
                fix=f"fix this on {report.address}, then start Ray there again",
            )
        elif len(report.physical_ids) != report.ray_accelerators:
            found = counted(len(report.physical_ids), "accelerator") if report.physical_ids else "no accelerators"
            why, fix = _remedy(report)
            findings.error(
                "RST-R010",
                CLUSTER,
                f"Ray counts {report.ray_accelerators} {report.ray_resource} on {report.name}, "
                f"where Roost finds {found}",
                why,
                fix,
            )


def _remedy(report: NodeReport) -> tuple[str, str]:
    """Reason why Ray's count differs from Roost's, and the fix."""
    count = len(report.physical_ids)
    if report.ray_resource == "GPU":
        start, without = f"`ray start --num-gpus {count}`", "--num-gpus"
    else:
        start, without = f"`ray start --resources '{{\"{report.ray_resource}\": {count}}}'`", "--resources"
    if report.accelerator_type == AcceleratorType.SIMULATED:
        why = "Ray does not detect simulated accelerators; it has to be started with them"
        return why, f"start Ray there with {COUNT_VARIABLE}={count} and {start}"
    if count == 0:
        why = "Ray was started with accelerators that the node does not have, or that its driver does not show"
        fix = f"start Ray there without {without}, or set {COUNT_VARIABLE}={report.ray_accelerators} to simulate them"
        return why, fix
    return "every accelerator has a rank, and Ray reserves them by number", f"start Ray there with {start}"


def report_interpreter(rank: int, node: str, wrong: str, findings: Findings) -> None:
    """Report an interpreter that failed the check on its node."""
    findings.error(
        "RST-R021",
        Where(CLUSTER.file, path=("node", rank)),
        f"workers cannot run under the interpreter that is configured for {node}",
        wrong,
        "install Roost and the cluster's Ray there, or correct python_interpreter_path",
    )


def report_device(rank: int, kind: str, problem: str, findings: Findings) -> None:
    """Report a declared device whose config conflicts with its node's variables or lacks required fields."""
    findings.error(
        "RST-R022",
        Where(CLUSTER.file, path=("node", rank)),
        f"a {kind} on this node is described incompletely",
        problem,
        "correct the variables of that node, or write the fields in node_groups",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node as detected by a process on it, and as Ray counts it.

    Roost's values (`physical_ids`, `memory_gb`) and Ray's (`ray_accelerators`, `cpus`) are separate,
    because they can contradict each other. An empty version is unknown.

    >>> NodeReport(node_id="f00d", address="10.0.0.2", hostname="beta").name
    '10.0.0.2 (beta)'
    """

    node_id: str
    address: str  # as Ray knows it
    hostname: str
    interface: str = ""  # of the network that the address belongs to
    rank_text: str | None = None  # as written, so that a mistake can be quoted
    rank_variable: str | None = None
    rank_problem: str = ""  # two variables that disagree
    accelerator_type: str = NO_ACCELERATOR
    accelerator_model: str = ""
    memory_gb: float | None = None  # of each accelerator
    physical_ids: tuple[str, ...] = ()
    host_memory_gb: float | None = None
    cpus: float = 0.0
    ray_accelerators: int = 0
    ray_resource: str = "GPU"  # what Ray calls these accelerators
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
    """Inventory node described by a report.

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
