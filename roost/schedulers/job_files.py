"""Render the job file of a scheduler from the node requests of a plan."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import yaml

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.config.findings import counted, did_you_mean
from roost.config.ranks import spell_ranks
from roost.procs.signals import REQUEUE_CODE
from roost.schedulers.node_requests import NodeRequest, NodeRequests

GRACE_S = 300  # between the signal of a time limit or a preemption and the end
KUBERNETES_RESOURCES = {
    AcceleratorType.NV_GPU: "nvidia.com/gpu",
    AcceleratorType.AMD_GPU: "amd.com/gpu",
    AcceleratorType.NPU: "huawei.com/Ascend910",
    AcceleratorType.INTEL_GPU: "gpu.intel.com/i915",
}
# Names of cards in clouds. A name that is part of another, such as L4 of L40S, comes after it.
GPU_NAMES = (
    *("GB300", "GB200", "B300", "B200", "GH200", "H200", "H100", "H800", "H20", "A800", "A100", "MI355X", "MI325X"),
    *("MI300X", "L40S", "L40", "A40", "A10G", "A10", "A6000", "V100", "T4", "RTX5090", "RTX4090", "RTX3090", "L4"),
)
LARGE_A100_GB = 70  # SkyPilot has another name for the A100 of 80 GB
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{2}))?(?::(\d{2}))?")
MOUNT = re.compile(r"(.+):(/(?!/).*)")
LONGEST_NAME = 40  # KubeRay appends to it, and Kubernetes allows 63
JOB_NAME = re.compile(r"[^a-z0-9]+")


class Scheduler(StrEnum):
    """Schedulers that start the nodes of a job."""

    SLURM = "slurm"
    KUBERAY = "kuberay"
    SKYPILOT = "skypilot"
    DSTACK = "dstack"
    SSH = "ssh"


class Container(StrEnum):
    """Container runtime of a Slurm job."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


SUFFIXES = {  # of job files
    Scheduler.SLURM: ".sbatch",
    Scheduler.KUBERAY: ".rayjob.yaml",
    Scheduler.SKYPILOT: ".sky.yaml",
    Scheduler.DSTACK: ".dstack.yml",
    Scheduler.SSH: ".ssh.sh",
}
WITHOUT_SHARED_HOME = (Scheduler.SKYPILOT, Scheduler.DSTACK)  # nodes get Ray's token as a secret
TOKEN = "RAY_AUTH_TOKEN"
SKY_CARD, DSTACK_CARD = "resources.accelerators=", "resources.gpu.name="  # options that name the card of all nodes
SKY_VOLUME = "volumes."  # option that mounts a volume of SkyPilot: volumes./shared=NAME
AS_YAML = (Scheduler.KUBERAY, Scheduler.SKYPILOT, Scheduler.DSTACK)
ONE_KIND = {Scheduler.SKYPILOT: "SkyPilot", Scheduler.DSTACK: "dstack"}  # give all nodes the same resources


class CannotRender(ValueError):
    """The scheduler cannot provide what the plan needs, or an option is wrong."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a job file that a plan does not have."""

    config: str
    name: str
    workdir: str
    runs: str = "runs"
    scratch: str | None = None  # of the live run, if `runs` is a URL
    train_args: tuple[str, ...] = ()  # more arguments of `roost train`
    command: str | None = None  # instead of `roost train`
    time: str | None = None  # as Slurm writes it: 1-12:00:00
    image: str | None = None
    container: Container = Container.PYXIS
    mounts: tuple[str, ...] = ()  # SOURCE:PATH
    env: Mapping[str, str | None] = field(default_factory=dict)  # None: secret, from the environment of the caller
    setup: tuple[str, ...] = ()  # shell lines before the job
    scheduler_options: tuple[str, ...] = ()  # KEY=VALUE, for Slurm also GROUP:KEY=VALUE
    hosts: tuple[str, ...] = ()  # for ssh, in rank order

    @property
    def is_remote(self) -> bool:
        """Return True if runs are kept at a URL."""
        return "://" in self.runs

    @property
    def live_runs(self) -> str:
        """The folder of runs while they train."""
        return self.scratch or "runs" if self.is_remote else self.runs


def render(scheduler: Scheduler, allocation: NodeRequests, options: JobOptions, template: str | None = None) -> str:
    """The job file as text, from Roost's template or the user's own."""
    import jinja2  # not above: only this command needs it

    _check(scheduler, allocation, options)
    if scheduler in WITHOUT_SHARED_HOME and allocation.nodes > 1:
        options = replace(options, env={TOKEN: None, **options.env})
    if scheduler is Scheduler.SKYPILOT:
        count = allocation.requests[0].requested_accelerators
        options = replace(
            options, scheduler_options=tuple(_with_count(option, count) for option in options.scheduler_options)
        )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "quote": shlex.quote,
        "in_double_quotes": in_double_quotes,
        "sbatch_quote": sbatch_quote,
        "job_name": job_name,
        "tojson": lambda value: json.dumps(value, ensure_ascii=False),  # jinja's own escapes for HTML
    }
    text = template if template is not None else template_of(scheduler)
    try:
        rendered = environment.from_string(text).render(values_of(allocation, options))
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise CannotRender(f"the template fails{f' in line {line}' if line else ''}: {error}") from None
    return _with_options(rendered, options.scheduler_options) if scheduler in AS_YAML else rendered


def template_of(scheduler: Scheduler) -> str:
    """Roost's template of a scheduler."""
    return (files("roost.schedulers") / "templates" / f"{scheduler}.j2").read_text(encoding="utf-8")


def values_of(allocation: NodeRequests, options: JobOptions) -> dict[str, Any]:
    """The variables and functions of templates."""
    run = f"{options.live_runs.rstrip('/')}/{options.name}"
    words = ["roost", "train", options.config, *options.train_args, "--name", options.name, "--runs", options.runs]
    words += ["--scratch", options.scratch] if options.scratch is not None else []
    words.append("--auto-resume")  # the scheduler may start the job again
    # bash replaces itself by a simple command, so that the command gets the signals.
    train = shlex.join(words if options.command is None else ["bash", "-c", options.command])
    secrets = [name for name, value in options.env.items() if value is None]
    first = allocation.requests[0]
    return {
        "config": options.config,
        "name": job_name(options.name),
        "nodes": allocation.nodes,
        "requests": allocation.requests,
        "workdir": options.workdir,
        "runs": options.runs,
        "run": run,
        "train": train,
        "grace_s": GRACE_S,
        "requeue_code": REQUEUE_CODE,
        "time": options.time,
        "seconds": None if options.time is None else seconds_of(options.time),
        "image": options.image,
        "container": options.container.value if options.image else None,
        "mounts": options.mounts,
        "claims": [split_mount(mount) for mount in options.mounts],
        "env": dict(options.env),
        "literal_env": {name: value for name, value in options.env.items() if value is not None},
        "secrets": secrets,
        "setup": options.setup,
        "hosts": options.hosts,
        "options_of": lambda label: slurm_options(options.scheduler_options, label),
        "gpu_name": partial(
            gpu_name, is_given=any(one.startswith((SKY_CARD, DSTACK_CARD)) for one in options.scheduler_options)
        ),
        "apptainer_gpus": apptainer_gpus,
        "resource_name": resource_name,
        "pods_without_head": lambda request: request.nodes - (request is first),
        "ranks_without_head": lambda request: spell_ranks(request.node_ranks[int(request is first) :]),
    }


def job_name(name: str) -> str:
    """A name that every scheduler accepts: lower-case letters, digits and dashes.

    >>> job_name("Math_8B (v2)")
    'math-8b-v2'
    """
    return JOB_NAME.sub("-", name.lower())[:LONGEST_NAME].strip("-") or "roost"


def seconds_of(time: str) -> int:
    """Seconds of a time limit as Slurm writes it: MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS:MINUTES:SECONDS.

    >>> seconds_of("90"), seconds_of("24:00:00"), seconds_of("1-12")
    (5400, 86400, 129600)
    """
    found = TIME.fullmatch(time)
    if found is None:
        raise CannotRender(f"--time {time!r} is not a time limit; write 24:00:00, 1-12:00:00 (days-hours), or minutes")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first or 0, second or 0, third
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


SLURM_OPTION = re.compile(r"(?:([^:=\s]+):)?(?:--)?([a-z][a-z0-9-]*)(=.*)?")
# Long options of sbatch; a site's plugins may add others.
SBATCH_LONG = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue
nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue
reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey wrap
"""
SBATCH = frozenset(SBATCH_LONG.split())


def check_slurm_options(written: Sequence[str], labels: Sequence[str]) -> None:
    """Raise CannotRender for an option that is not `[GROUP:]KEY[=VALUE]`, or that names an unknown node group."""
    for option in written:
        found = SLURM_OPTION.fullmatch(option)
        if found is None:
            raise CannotRender(
                f"--option {option!r} is not KEY=VALUE or KEY, such as partition=gpu, or GROUP:partition=gpu"
            )
        if found[1] is not None and found[1] not in labels:
            hint = did_you_mean(found[1], labels) or f"there are {', '.join(labels)}"
            raise CannotRender(f"--option {option!r}: the plan has no node group {found[1]}; {hint}")


def unknown_slurm_options(written: Sequence[str]) -> list[str]:
    """Notes on options that sbatch does not have.

    >>> unknown_slurm_options(["partition=gpu", "lab:cust=a"])
    ['--option lab:cust=a: sbatch has no such option, unless a plugin of the site adds it']
    """
    notes = []
    for option in written:
        found = SLURM_OPTION.fullmatch(option)
        if found is not None and found[2] not in SBATCH:
            hint = did_you_mean(found[2], sorted(SBATCH))
            what = f"--option {option}: sbatch has no such option, unless a plugin of the site adds it"
            notes.append(f"{what}; {hint}" if hint else what)
    return notes


def slurm_options(written: Sequence[str], label: str) -> list[str]:
    """Options of one node group: those for all groups, then its own, which replace them.

    >>> slurm_options(["partition=gpu", "franka:partition=lab", "exclusive"], "franka")
    ['exclusive', 'partition=lab']
    """
    own, everywhere = [], []
    for option in written:
        group, colon, rest = option.partition(":")
        if colon and "=" not in group:
            own += [rest.removeprefix("--")] if group == label else []
        else:
            everywhere.append(option.removeprefix("--"))
    replaced = {option.partition("=")[0] for option in own}
    return [*(option for option in everywhere if option.partition("=")[0] not in replaced), *own]


def gpu_name(request: NodeRequest, is_given: bool = False) -> str:
    """The name of a card in clouds. It may be unknown with `is_given`, as an option then replaces it.

    >>> gpu_name(NodeRequest("a", range(1), 8, "NV_GPU", "NVIDIA A100-SXM4-80GB", 79.6, 1, 1))
    'A100-80GB'
    """
    model = request.accelerator_model.upper().replace(" ", "").replace("-", "")
    found = next((name for name in GPU_NAMES if name in model), None)
    if found is None and is_given:
        return "given"
    if found is None:
        what = f"{request.accelerator_model!r} is not a known card" if model else "the plan does not say which card"
        raise CannotRender(
            f"{what}; name it by --option {SKY_CARD}H100 (SkyPilot) or {DSTACK_CARD}H100 (dstack), or give --inventory "
            f"with accelerator_model: one of {', '.join(GPU_NAMES)}"
        )
    return "A100-80GB" if found == "A100" and (request.accelerator_memory_gb or 0) > LARGE_A100_GB else found


def _with_count(option: str, count: int) -> str:
    """An option that names SkyPilot's card, with the number that the plan needs; other options unchanged.

    >>> _with_count("resources.accelerators=H100", 8), _with_count("resources.infra=aws", 8)
    ('resources.accelerators=H100:8', 'resources.infra=aws')
    """
    if not option.startswith(SKY_CARD) or not count:
        return option
    name, colon, number = option.removeprefix(SKY_CARD).partition(":")
    if not re.fullmatch(r"[\w.-]+", name):
        return option  # a mapping or list of SkyPilot's
    if colon and number.strip() != str(count):
        raise CannotRender(f"--option {option!r}: the plan needs {count} accelerators on a node; write {name}:{count}")
    return f"{SKY_CARD}{name}:{count}"


def resource_name(request: NodeRequest) -> str:
    """The Kubernetes resource of the accelerators."""
    known = {str(kind): name for kind, name in KUBERNETES_RESOURCES.items()}
    if request.accelerator_type not in known:
        raise CannotRender(f"no Kubernetes resource is known for {request.accelerator_type}; give a --template")
    return known[request.accelerator_type]


def apptainer_gpus(requests: Sequence[NodeRequest]) -> str:
    """Options of Apptainer that let a container use the GPUs of its node, each with a space after it."""
    flags = {str(AcceleratorType.NV_GPU): "--nv ", str(AcceleratorType.AMD_GPU): "--rocm "}
    used = {request.accelerator_type for request in requests if request.requested_accelerators}
    return "".join(flag for kind, flag in flags.items() if kind in used)


def split_mount(mount: str) -> tuple[str, str]:
    """Source and path of a mount.

    >>> split_mount("s3://bucket/data:/data")
    ('s3://bucket/data', '/data')
    """
    found = MOUNT.fullmatch(mount)
    if found is None:
        raise CannotRender(f"--mount {mount!r} is not SOURCE:/PATH")
    return found[1], found[2]


def in_double_quotes(text: str) -> str:
    """Escape text for use inside double quotes of a shell."""
    return re.sub(r'(["$`\\])', r"\\\1", text)


def sbatch_quote(text: str) -> str:
    """A value of an #SBATCH line, in double quotes if needed. sbatch expands no variables there.

    >>> sbatch_quote("/shared/my team/%j.out")
    '"/shared/my team/%j.out"'
    """
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _check(scheduler: Scheduler, allocation: NodeRequests, options: JobOptions) -> None:
    if options.scratch is not None and not options.is_remote:
        raise CannotRender(f"--scratch is for runs at a URL, and --runs is {options.runs}; leave it out")
    kinds = len(allocation.requests)
    if scheduler in ONE_KIND and kinds > 1:
        groups = ", ".join(f"{request.label} (nodes {request.ranks})" for request in allocation.requests)
        raise CannotRender(
            f"{ONE_KIND[scheduler]} gives all nodes of a job the same resources, and the plan has {kinds} kinds: "
            f"{groups}; launch it by slurm, kuberay or ssh"
        )
    if scheduler is Scheduler.SSH and len(options.hosts) != allocation.nodes:
        hosts = counted(len(options.hosts), "host") if options.hosts else "no hosts"
        raise CannotRender(
            f"the plan needs {counted(allocation.nodes, 'node')}, and there are {hosts}; give --hosts FILE with one "
            "name a line in rank order, or an inventory with host names"
        )
    if scheduler is Scheduler.SLURM:
        check_slurm_options(options.scheduler_options, [request.label for request in allocation.requests])
    if scheduler is Scheduler.SSH and options.scheduler_options:
        raise CannotRender(f"--option {options.scheduler_options[0]!r}: ssh takes no options; leave it out")
    if scheduler is Scheduler.KUBERAY and not options.image:
        raise CannotRender("pods need an image with Roost in it; give --image (docker/Dockerfile.cuda builds one)")
    if scheduler in (Scheduler.KUBERAY, Scheduler.SKYPILOT, Scheduler.DSTACK) or options.image:
        for mount in options.mounts:
            split_mount(mount)
    elif options.mounts:
        raise CannotRender("--mount needs --image: without a container a job sees the folders of its nodes")
    if scheduler is Scheduler.KUBERAY and not _is_mounted(options.workdir, options.mounts):
        raise CannotRender(
            f"pods do not see {options.workdir}: give --workdir below a --mount, such as --mount CLAIM:/shared "
            "--workdir /shared/team"
        )


def notes_of(scheduler: Scheduler, options: JobOptions, nodes: int = 1) -> list[str]:
    """Notes on a job file: checkpoints lost with the machines, Roost not installed, time limits not used."""
    notes = unknown_slurm_options(options.scheduler_options) if scheduler is Scheduler.SLURM else []
    if scheduler in (Scheduler.SKYPILOT, Scheduler.DSTACK) and not options.image and not options.setup:
        notes.append("new machines have no Roost: give --image with it, or --setup 'pip install ...'")
    if options.time is not None and scheduler in (Scheduler.SKYPILOT, Scheduler.SSH):
        notes.append(f"{scheduler} has no time limit for a job: --time {options.time} is not used")
    if scheduler not in AS_YAML or (options.is_remote and nodes == 1):
        return notes  # machines stay, or runs are on object storage
    live = options.live_runs
    if scheduler is Scheduler.KUBERAY and not live.startswith("/"):
        return notes  # below the working folder, which is mounted
    # SkyPilot copies a mount that is a local path: what a job writes there is lost.
    kept = [mount for mount in options.mounts if scheduler is not Scheduler.SKYPILOT or "://" in mount]
    if options.is_remote:
        volumes = [option for option in options.scheduler_options if option.startswith(SKY_VOLUME)]
        kept += [f"volume:{option.removeprefix(SKY_VOLUME).partition('=')[0]}" for option in volumes]
        if not _is_mounted(live, kept):
            mount = (
                f"--option {SKY_VOLUME}/shared=VOLUME" if scheduler is Scheduler.SKYPILOT else "--mount VOLUME:/shared"
            )
            notes.append(
                f"the live run is in {live}, which is below no mount, and all {nodes} nodes must see it: give {mount} "
                "with a volume that nodes can share, and --scratch /shared/runs"
            )
    elif not _is_mounted(options.runs, kept):
        source = "s3://BUCKET" if scheduler is Scheduler.SKYPILOT else "VOLUME"
        notes.append(
            f"--runs {options.runs} is below no mount: checkpoints are lost with the machines, and a restarted job "
            f"begins at step 0; give --runs s3://BUCKET/runs, or --mount {source}:/shared --runs /shared/runs"
        )
    return notes


def _is_mounted(folder: str, mounts: Sequence[str]) -> bool:
    return any(PurePosixPath(folder).is_relative_to(split_mount(mount)[1]) for mount in mounts)


def _with_options(text: str, options: Sequence[str]) -> str:
    """Set keys of a rendered YAML file, such as resources.infra=aws."""
    if not options:
        return text
    data = yaml.safe_load(text)
    for option in options:
        path, equals, value = option.partition("=")
        if not equals:
            raise CannotRender(f"--option {option!r} is not KEY=VALUE, such as resources.infra=aws")
        inner = data
        *parents, last = path.split(".")
        for key in parents:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise CannotRender(f"--option {option!r}: {key} is not a mapping in the file")
        inner[last] = yaml.safe_load(value)
    first = text.partition("\n")[0]
    return f"{first}\n{yaml.safe_dump(data, sort_keys=False, width=10**6)}"
