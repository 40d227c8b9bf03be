"""Probe this node: versions, GPUs, limits, disks and paths."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import roost
from roost.cluster.hardware.accelerator import run_tool
from roost.doctor.judge import Disk, Gpu, NodeHealth, PathState
from roost.procs.files import SHARED_MEMORY, FileSystem

GB, MIB = 10**9, 2**20
SAMPLE = 1 << 20  # bytes of the start and the end of a file that its digest covers
MOST_FILES = 10_000
PACKAGES = ("torch", "ray", "vllm", "sglang", "transformers")
NCCL = re.compile(r"nvidia-nccl-cu\d+")
TORCH_CUDA = re.compile(r"^cuda\b.*?=\s*'([\d.]+)'", re.MULTILINE)
QUERY = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"


def probe_machine(folders: Iterable[Path]) -> NodeHealth:
    """Probe limits, shared memory and disks of this machine, which is quick."""
    return NodeHealth(
        "this machine",
        disks=tuple(_disk(folder) for folder in dict.fromkeys(folders)),
        shared_memory_gb=_shared_memory(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
    )


def probe_node(
    name: str, folders: Sequence[Path], paths: Sequence[str], marker: Path | None, environ: Mapping[str, str]
) -> NodeHealth:
    """Probe all of this node; `marker` is a file that the driver wrote into its runs folder."""
    quick = probe_machine(folders)
    gpus, problem = _gpus(environ)
    return NodeHealth(
        name,
        versions=versions(environ),
        gpus=gpus,
        gpu_problem=problem,
        disks=quick.disks,
        shared_memory_gb=quick.shared_memory_gb,
        open_files=quick.open_files,
        paths=tuple(PathState(path, digest_of(Path(path))) for path in paths),
        sees_runs=None if marker is None else marker.exists(),
    )


def versions(environ: Mapping[str, str]) -> dict[str, str]:
    """Versions of Python, Roost and the packages that all nodes must agree on, without importing them."""
    found = {"roost": roost.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    nccl = next((each for each in metadata.distributions() if NCCL.fullmatch(each.metadata["Name"] or "")), None)
    if nccl is not None:
        found["nccl"] = nccl.version
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        cuda = TORCH_CUDA.search((Path(torch.origin).parent / "version.py").read_text(encoding="utf-8"))
        if cuda is not None:
            found["CUDA of torch"] = cuda[1]
    driver = run_tool(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), environ)
    if driver and driver.strip():
        found["CUDA driver"] = driver.split()[0]
    return found


def _gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    text = run_tool(("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"), environ)
    if text is None:
        has_driver = Path("/proc/driver/nvidia/version").exists()
        return (), "nvidia-smi fails, though the driver is loaded" if has_driver else ""
    return parse_gpus(text), ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read the answer of nvidia-smi to QUERY, which is in MiB.

    >>> h100, gb10 = parse_gpus("0, NVIDIA H100, 81559, 12, 0\\n1, NVIDIA GB10, [N/A], [N/A], [N/A]\\n")
    >>> f"{h100.total_gb:.1f} GB, {h100.used_gb:.3f} GB"
    '85.5 GB, 0.013 GB'
    >>> gb10
    Gpu(index=1, name='NVIDIA GB10', total_gb=None, used_gb=None, uncorrected_errors=None)
    """
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[0].isdigit():
            total, used = (int(value) * MIB / GB if value.isdigit() else None for value in fields[2:4])
            errors = int(fields[4]) if fields[4].isdigit() else None
            found.append(Gpu(int(fields[0]), fields[1], total, used, errors))
    return tuple(found)


def _shared_memory() -> float | None:
    return FileSystem.of(SHARED_MEMORY).free / GB if SHARED_MEMORY.exists() else None


def _disk(folder: Path) -> Disk:
    """Free space where a folder is or will be, and whether a file can be written there."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    system = FileSystem.of(there)
    problem = ""
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"roost")
            file.flush()
    except OSError as error:
        problem = f"a file cannot be written: {error.strerror}"
    return Disk(str(folder), system.free / GB, system.kind, problem)


def digest_of(path: Path) -> str | None:
    """Digest of names, sizes, and the first and last MiB of files; None if the path does not exist.

    It shows that a copy is incomplete or of another model, without reading all of it.
    """
    if not path.exists():
        return None
    total = hashlib.sha256()
    for number, file in enumerate(_files(path)):
        if number >= MOST_FILES:
            break
        size = file.stat().st_size
        total.update(f"{file.relative_to(path) if file != path else path.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            total.update(opened.read(SAMPLE))
            if size > SAMPLE:
                opened.seek(max(SAMPLE, size - SAMPLE))
                total.update(opened.read(SAMPLE))
    return total.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, names, files in os.walk(path):
        names.sort()
        yield from (Path(folder) / file for file in sorted(files) if (Path(folder) / file).is_file())
