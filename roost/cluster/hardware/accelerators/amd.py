"""AMD GPUs, found in the kernel's compute topology; amd-smi or rocm-smi adds their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from roost.cluster.hardware.accelerator import (
    Accelerator,
    AcceleratorType,
    DetectedAccelerators,
    Device,
    allowed_ids,
    detected,
    gib,
    numbered_files,
    read_file,
    run_tool,
)

TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"

# The topology, and HIP, also list graphics integrated in a processor. The smallest card that ROCm supports has 8 GB, a
# little of it reserved; smaller devices keep their ids but are not used.
SMALLEST_MEMORY_GB = 7.0

NAME_QUERIES = (
    ("amd-smi", "static", "--asic", "--vram", "--json"),
    ("rocm-smi", "--showproductname", "--json"),
)


def parse_node(properties: str, banks: Sequence[str]) -> tuple[str, str, float] | None:
    """Read one node of the topology: its instruction set, UUID and memory. None for a CPU.

    >>> gpu = "simd_count 1216\\ngfx_target_version 90402\\nunique_id 171\\n"
    >>> parse_node(gpu, ["heap_type 1\\nsize_in_bytes 206141652992\\n"])
    ('gfx942', 'GPU-00000000000000ab', 192.0)
    """
    node = _numbers(properties)
    if not node.get("simd_count"):
        return None
    # Heaps 1 and 2 are the device's own memory, with and without access from the host.
    heaps = [bank.get("size_in_bytes", 0) for bank in map(_numbers, banks) if bank.get("heap_type") in (1, 2)]
    version = node.get("gfx_target_version", 0)
    isa = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return isa, f"GPU-{node.get('unique_id', 0):016x}", gib(sum(heaps), 1024**3)


def _numbers(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def parse_names(text: str) -> list[str]:
    """Read the product names from the JSON of amd-smi or rocm-smi, in device order; empty if it is something else.

    >>> parse_names('[{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}}]')
    ['AMD Instinct MI300X']
    >>> parse_names('{"card0": {"Card Series": "AMD Instinct MI250X"}}')
    ['AMD Instinct MI250X']
    """
    import json

    try:
        answer = json.loads(text)
        if isinstance(answer, dict) and "gpu_data" not in answer:
            cards = sorted((card for card in answer if card.startswith("card")), key=lambda card: int(card[4:]))
            return [str(answer[card].get("Card Series") or answer[card]["Card series"]) for card in cards]
        rows = answer["gpu_data"] if isinstance(answer, dict) else answer
        return [str(row["asic"]["market_name"]) for row in sorted(rows, key=lambda row: int(row["gpu"]))]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def read_topology(root: str) -> list[tuple[str, str, float]]:
    """Return instruction set, UUID and memory of each GPU, in the kernel's order."""
    found = []
    for number in numbered_files(root, ""):
        node = f"{root}/{number}"
        banks = [f"{node}/mem_banks/{bank}/properties" for bank in numbered_files(f"{node}/mem_banks", "")]
        gpu = parse_node(read_file(f"{node}/properties") or "", [read_file(bank) or "" for bank in banks])
        if gpu is not None:
            found.append(gpu)
    return found


def masked(devices: Sequence[Device], environ: Mapping[str, str]) -> DetectedAccelerators | None:
    """Apply the masks of both layers of AMD's software.

    >>> four = [Device(str(i), "MI300X", 192.0) for i in range(4)]
    >>> masked(four, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}).physical_ids
    ('1',)
    """
    # ROCR_VISIBLE_DEVICES, which batch systems set, acts below HIP, which counts the remaining devices from 0.
    lower = allowed_ids(environ.get("ROCR_VISIBLE_DEVICES"), devices)
    left = [device for id in lower for device in devices if device.id == id]
    seen = [replace(device, id=str(i)) for i, device in enumerate(left)]
    masks = (environ.get(name) for name in (AMD.visible_devices_variable, *AMD.mirrored_variables))
    ids = allowed_ids(next((mask for mask in masks if mask is not None), None), seen)
    large = [device for device in seen if _is_large(device.memory_gb)]
    return detected(large or devices, [id for id in ids if id in {device.id for device in large}])


def _is_large(memory_gb: float | None) -> bool:
    return memory_gb is not None and memory_gb >= SMALLEST_MEMORY_GB


def detect(environ: Mapping[str, str], topology: str = TOPOLOGY) -> DetectedAccelerators | None:
    """Return the AMD GPUs of this machine, or None."""
    gpus = read_topology(topology)
    if not any(_is_large(memory) for _, _, memory in gpus):
        return None
    answers = (run_tool(query, environ) for query in NAME_QUERIES)
    names = next((names for answer in answers if answer and (names := parse_names(answer))), [])
    if len(names) != len(gpus):
        names = [f"AMD GPU {isa}" for isa, _, _ in gpus]
    return masked([Device(str(i), names[i], memory, uuid) for i, (_, uuid, memory) in enumerate(gpus)], environ)


AMD = Accelerator(
    type=AcceleratorType.AMD_GPU,
    vendor="AMD",
    visible_devices_variable="HIP_VISIBLE_DEVICES",
    communication_backend="nccl",
    socket_interface_variable="NCCL_SOCKET_IFNAME",
    ray_resource="GPU",
    detect=detect,
    extra_environment=(
        ("RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES", "1"),
        ("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES", "1"),
    ),
    # HIP reads both names, and Ray refuses to start a worker that inherits a different value in the second.
    mirrored_variables=("CUDA_VISIBLE_DEVICES",),
    # HIP takes an empty value for an unset one and shows every device; an index that does not exist hides all.
    hidden_value="-1",
)
