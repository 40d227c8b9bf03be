"""Rank, number of nodes, head, CPUs and GPUs of this node, from the variables of the scheduler that started it.

Each scheduler has its own variable names. All that are set are read, and a disagreement is an error: a wrong rank
would put a job's processes on the wrong machines.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Environ = Mapping[str, str]

RANK = "ROOST_NODE_RANK"
NODES = "ROOST_NUM_NODES"
HEAD = "ROOST_HEAD_ADDRESS"
JOB = "ROOST_JOB_ID"
CHOSEN = (RANK, "RLINF_NODE_RANK")  # set by the user; other ranks come from a scheduler
MAX_DIGITS = 9
MAX_HOSTS = 1_000_000  # of a node list: a short range can stand for more than fits in memory


class AllocationError(ValueError):
    """The variables of this node contradict each other, or are incomplete."""


class Fact(NamedTuple):
    """A value and the variable that it comes from."""

    variable: str
    text: str

    def __str__(self) -> str:
        return f"{self.variable}={self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """This node according to the variables of one scheduler; None for what they do not say."""

    name: str
    rank: Fact | None = None
    nodes: Fact | None = None
    head: Fact | None = None
    hosts: tuple[str, ...] = ()  # in the order of ranks
    cpus: Fact | None = None
    gpus: Fact | None = None
    job: str = ""  # differs between jobs that run at the same time
    component: str = ""  # of a heterogeneous Slurm job
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """This node's part in a job. `cpus` and `gpus` are None if no variable has them."""

    rank: int
    nodes: int
    head: str | None = None  # host name or address of rank 0
    hosts: tuple[str, ...] = ()
    cpus: int | None = None
    gpus: Fact | None = None
    job: str = ""
    component: str = ""
    rack: str = ""
    sources: tuple[str, ...] = ()

    def name(self, rank: int) -> str:
        """The name of a node in messages.

        >>> Allocation(rank=0, nodes=2, hosts=("gpu-1", "gpu-2")).name(1), Allocation(rank=0, nodes=2).name(1)
        ('node 1 (gpu-2)', 'node 1')
        """
        return f"node {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"node {rank}"


def node_rank(environ: Environ) -> Fact | None:
    """Rank of this node, with the variable that has it; None if no variable has it.

    >>> node_rank({"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_NODES": "4"})
    Fact(variable='SKYPILOT_NODE_RANK', text='2')
    """
    return _agreed_rank(sources(environ))


def read_allocation(environ: Environ, nodes: int | None = None, domain: str = "") -> Allocation:
    """This node's part in a job of several nodes; `nodes` is their number where the user gave it.

    `domain` is the DNS domain of this host, which pods of an indexed Kubernetes job share. Without any variables the
    job has this machine alone. Raise AllocationError if variables disagree, or do not say the rank or number of nodes.
    """
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise AllocationError("Slurm started several tasks on this node: use `srun --ntasks-per-node=1`")
    given = None if nodes is None else Fact("--nodes", str(nodes))
    found = sources(environ, nodes, domain)
    count = _agreed_nodes(found, given)
    rank = _agreed_rank(found)
    if rank is None and count is None and not found:
        return Allocation(rank=0, nodes=1, job=environ.get(JOB, ""))
    if count is None:
        raise AllocationError(f"{rank} is set, but no variable has the number of nodes: add --nodes N")
    total = _number(count, "number of nodes")
    if rank is None and total == 1:
        rank = Fact(count.variable, "0")
    if rank is None:
        raise AllocationError(_no_rank(found, count))
    number = _number(rank, "node rank")
    if not 0 <= number < total:
        raise AllocationError(f"{rank}, but ranks of {count} go from 0 to {total - 1}")
    cpus = _first(source.cpus for source in found)
    return Allocation(
        rank=number,
        nodes=total,
        head=environ.get(HEAD) or next((source.head.text for source in found if source.head is not None), None),
        hosts=next((source.hosts for source in found if len(source.hosts) == total), ()),
        cpus=None if cpus is None else _number(cpus, "number of CPUs"),
        gpus=_first(source.gpus for source in found),
        job=environ.get(JOB) or next((source.job for source in found if source.job), ""),
        component=next((source.component for source in found if source.component), ""),
        rack=next((source.rack for source in found if source.rack), ""),
        sources=tuple(source.name for source in found),
    )


def sources(environ: Environ, nodes: int | None = None, domain: str = "") -> list[Source]:
    """All sources with a rank or a number of nodes; Roost's own variables come first."""
    read: list[Source | None] = [reader(environ) for reader in READERS]
    read.append(_kubernetes(environ, domain))
    known = _first(source.nodes for source in read if source is not None)
    read.append(_pai(environ, nodes if nodes is not None else _plain_number(known)))
    return [source for source in read if source is not None and (source.rank or source.nodes)]


def expand_hosts(text: str) -> tuple[str, ...]:
    """Hosts of a Slurm node list, as `scontrol show hostnames` prints them.

    >>> expand_hosts("n[1-2,7],r[01-02]c[8-9]-ib,login")
    ('n1', 'n2', 'n7', 'r01c8-ib', 'r01c9-ib', 'r02c8-ib', 'r02c9-ib', 'login')
    """
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        parts = [
            _range_words(part[1:-1]) if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\]]*\]|[^\[]+", word)
        ]
        found += ["".join(chosen) for chosen in itertools.islice(itertools.product(*parts), MAX_HOSTS)]
    return tuple(found)


def _range_words(text: str) -> list[str]:
    """The words that brackets in a node list stand for, with leading zeros."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            found.append(part)
            continue
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) >= MAX_HOSTS:
            raise AllocationError(f"{part!r} in a node list of Slurm is not a range of numbers")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


# One reader per scheduler --------------------------------------------------------------------------------------------


def _roost(environ: Environ) -> Source:
    return Source(name="Roost", rank=_fact(environ, RANK), nodes=_fact(environ, NODES))


def _rlinf(environ: Environ) -> Source:
    return Source(name="RLinf", rank=_fact(environ, "RLINF_NODE_RANK"))


def _slurm(environ: Environ) -> Source | None:
    """Slurm. In a heterogeneous job, ranks go on from one component to the next."""
    if "SLURM_JOB_ID" not in environ:
        return None
    lists, variable = _slurm_lists(environ)
    hosts = tuple(itertools.chain.from_iterable(lists))
    # The name on this node, because SLURM_NODEID counts within a step or a component.
    here = _fact(environ, "SLURMD_NODENAME")
    if here is not None and here.text in hosts:
        rank: Fact | None = Fact("SLURMD_NODENAME", str(hosts.index(here.text)))
    else:
        rank = _fact(environ, "SLURM_NODEID")
    components = [str(number) for number, names in enumerate(lists) if here is not None and here.text in names]
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return Source(
        name="Slurm",
        rank=rank,
        nodes=Fact(variable, str(len(hosts))) if hosts else _fact(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        head=Fact(variable, hosts[0]) if hosts else None,
        hosts=hosts,
        cpus=_fact(environ, "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"),
        gpus=_slurm_gpus(environ),
        job=f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}-{restarts}",
        component=components[0] if components and len(lists) > 1 else "",
        rack=environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
    )


def _slurm_lists(environ: Environ) -> tuple[list[tuple[str, ...]], str]:
    """Hosts of each component of a Slurm job, or of this step of it, and the variable that has them."""
    size, step = environ.get("SLURM_HET_SIZE", ""), expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))
    if size.isdecimal() and int(size) > 1:
        # PACK is the older name, which srun still sets.
        kind = "PACK" if "SLURM_JOB_NODELIST_PACK_GROUP_0" in environ else "HET"
        name = f"SLURM_JOB_NODELIST_{kind}_GROUP_"
        lists = [expand_hosts(environ.get(f"{name}{number}", "")) for number in range(int(size))]
        # A step may run on some components; its own list is sorted by name, not by component.
        return [tuple(host for host in hosts if not step or host in step) for hosts in lists], f"{name}*"
    variable = "SLURM_STEP_NODELIST" if step else "SLURM_JOB_NODELIST"
    return [expand_hosts(environ.get(variable, ""))], variable


def _slurm_gpus(environ: Environ) -> Fact | None:
    """GPUs on this node; `a100:2,h100:2` counts 4."""
    found = _fact(environ, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
    if found is None:
        return None
    counts = [part.rpartition(":")[2] for part in found.text.split(",")]
    return Fact(found.variable, str(sum(map(int, counts)))) if all(map(str.isdecimal, counts)) else None


def _skypilot(environ: Environ) -> Source:
    hosts = tuple(environ.get("SKYPILOT_NODE_IPS", "").split())
    return Source(
        name="SkyPilot",
        rank=_fact(environ, "SKYPILOT_NODE_RANK"),
        nodes=_fact(environ, "SKYPILOT_NUM_NODES") or _counted("SKYPILOT_NODE_IPS", hosts),
        head=Fact("SKYPILOT_NODE_IPS", hosts[0]) if hosts else None,
        hosts=hosts,
        gpus=_fact(environ, "SKYPILOT_NUM_GPUS_PER_NODE"),
        job=environ.get("SKYPILOT_TASK_ID", ""),
    )


def _dstack(environ: Environ) -> Source:
    hosts = tuple(environ.get("DSTACK_NODES_IPS", "").split())
    return Source(
        name="dstack",
        rank=_fact(environ, "DSTACK_NODE_RANK"),
        nodes=_fact(environ, "DSTACK_NODES_NUM") or _counted("DSTACK_NODES_IPS", hosts),
        head=_fact(environ, "DSTACK_MASTER_NODE_IP"),
        hosts=hosts,
        gpus=_fact(environ, "DSTACK_GPUS_PER_NODE"),
        job=environ.get("DSTACK_RUN_ID") or environ.get("DSTACK_RUN_NAME", ""),
    )


def _lepton(environ: Environ) -> Source:
    job = environ.get("LEPTON_JOB_NAME", "")
    prefix = environ.get("LEPTON_JOB_SERVICE_PREFIX") or job
    domain = environ.get("LEPTON_SUBDOMAIN") or f"{job}-job-svc"
    return Source(
        name="Lepton",
        rank=_fact(environ, "LEPTON_JOB_WORKER_INDEX"),
        nodes=_fact(environ, "LEPTON_JOB_TOTAL_WORKERS"),
        head=Fact("LEPTON_JOB_SERVICE_PREFIX", f"{prefix}-0.{domain}") if prefix else None,
        gpus=_fact(environ, "LEPTON_RESOURCE_ACCELERATOR_NUM"),
        job=job,
    )


def _volcano(environ: Environ) -> Source | None:
    """Volcano and ModelArts; None for jobs with other tasks than `worker`, whose indices count within a task."""
    tasks = [name for name in environ if name.startswith("VC_") and name.endswith("_HOSTS")]
    if tasks != ["VC_WORKER_HOSTS"]:
        return None
    hosts = tuple(filter(None, re.split(r"[,\s]+", environ["VC_WORKER_HOSTS"])))
    return Source(
        name="Volcano",
        rank=_fact(environ, "VC_TASK_INDEX"),
        nodes=_fact(environ, "VC_WORKER_NUM", "MA_NUM_HOSTS") or _counted("VC_WORKER_HOSTS", hosts),
        head=Fact("VC_WORKER_HOSTS", hosts[0]) if hosts else None,
        hosts=hosts,
        gpus=_fact(environ, "MA_NUM_GPUS"),
        job=hosts[0] if hosts else "",
    )


def _torchrun(environ: Environ) -> Source:
    """Variables that users export for torchrun, and those that torchrun itself reads (PET_)."""
    nodes = _fact(environ, "NNODES", "PET_NNODES")
    if nodes is not None and ":" in nodes.text:  # minimum and maximum of an elastic job
        lowest, _, highest = nodes.text.partition(":")
        nodes = Fact(nodes.variable, highest) if lowest == highest else None
    head = _fact(environ, "MASTER_ADDR", "PET_MASTER_ADDR")
    port = environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT", "")
    return Source(
        name="torchrun",
        rank=_fact(environ, "NODE_RANK", "PET_NODE_RANK"),
        nodes=nodes,
        head=head,
        job=f"{head.text}:{port}" if head is not None and port else "",
    )


READERS: Sequence[Callable[[Environ], Source | None]] = (
    _roost,
    _rlinf,
    _slurm,
    _skypilot,
    _dstack,
    _lepton,
    _volcano,
    _torchrun,
)


def _kubernetes(environ: Environ, domain: str) -> Source | None:
    """An indexed job: pods are NAME-0, NAME-1, ... and find each other through a headless service."""
    index, host = _fact(environ, "JOB_COMPLETION_INDEX"), environ.get("HOSTNAME", "")
    if index is None:
        return None
    name = host.removesuffix(f"-{index.text}") if host.endswith(f"-{index.text}") else ""
    head = environ.get("MASTER_ADDR") or (f"{name}-0" + (f".{domain}" if domain else "") if name else "")
    return Source(name="Kubernetes", rank=index, head=Fact("HOSTNAME", head) if head else None, job=name)


def _pai(environ: Environ, nodes: int | None) -> Source | None:
    """RANK and WORLD_SIZE if they count nodes, as on PAI; under torchrun they count processes."""
    rank, world = _fact(environ, "RANK"), _fact(environ, "WORLD_SIZE")
    if rank is None or world is None or "LOCAL_RANK" in environ:
        return None
    per_node = _fact(environ, "NPROC_PER_NODE")
    if _plain_number(world) != nodes and (nodes is not None or per_node is None):
        return None
    head, port = _fact(environ, "MASTER_ADDR"), environ.get("MASTER_PORT", "")
    return Source(
        name="PAI",
        rank=rank,
        nodes=world,
        head=head,
        gpus=per_node,
        job=f"{head.text}:{port}" if head is not None else "",
    )


# Agreement -----------------------------------------------------------------------------------------------------------


def _agreed_rank(found: Iterable[Source]) -> Fact | None:
    """The rank that all sources agree on.

    A source with one node (such as a Slurm step on one node of a larger job) counts only if there is no other.
    """
    ranked = [(source.rank, _plain_number(source.nodes)) for source in found if source.rank is not None]
    facts = [rank for rank, nodes in ranked if nodes != 1] or [rank for rank, _ in ranked]
    return _same(facts, "node rank")


def _agreed_nodes(found: Iterable[Source], given: Fact | None) -> Fact | None:
    facts = [fact for fact in (given, *(source.nodes for source in found)) if fact is not None]
    return _same([fact for fact in facts if _plain_number(fact) != 1] or facts, "number of nodes")


def _same(facts: Sequence[Fact], what: str) -> Fact | None:
    if not facts:
        return None
    other = next((fact for fact in facts if _comparable(fact) != _comparable(facts[0])), None)
    if other is not None:
        raise AllocationError(f"{facts[0]} and {other} disagree about the {what}: unset the wrong one")
    return facts[0]


def _comparable(fact: Fact) -> int | str:
    number = _plain_number(fact)
    return fact.text if number is None else number


def _no_rank(found: Sequence[Source], count: Fact) -> str:
    if any(source.name == "Slurm" for source in found):
        return f"{count}, but Slurm gives no rank here: start it with `srun --ntasks-per-node=1 roost up -- COMMAND`"
    return f"{count}, but no variable has this node's rank: export {RANK}=0 on the first node, 1 on the next, ..."


def _fact(environ: Environ, *names: str) -> Fact | None:
    """The first of these variables that is not empty."""
    return next((Fact(name, environ[name].strip()) for name in names if environ.get(name, "").strip()), None)


def _first(facts: Iterable[Fact | None]) -> Fact | None:
    return next((fact for fact in facts if fact is not None), None)


def _counted(variable: str, hosts: Sequence[str]) -> Fact | None:
    return Fact(variable, str(len(hosts))) if hosts else None


def _plain_number(fact: Fact | None) -> int | None:
    is_number = fact is not None and fact.text.isascii() and fact.text.isdecimal() and len(fact.text) <= MAX_DIGITS
    return int(fact.text) if fact is not None and is_number else None


def _number(fact: Fact, what: str) -> int:
    number = _plain_number(fact)
    if number is None:
        raise AllocationError(f"{fact} is not a {what}")
    return number
