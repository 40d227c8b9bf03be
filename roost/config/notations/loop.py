"""The ml-loop notation: `rl.gpu_allocation` with learning and inference GPUs of one machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from roost.config.data import TEACHER
from roost.config.findings import counted
from roost.config.interpolation import ExpressionError, parse_devices
from roost.config.job import (
    DEFAULT_ADAPTER_RANK,
    OFFLOADED_PARTS,
    Component,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Role,
    first_number,
    first_text,
    read_model_config,
    teacher_model,
)
from roost.config.ranks import spell_ranks
from roost.config.source import Section

ALLOCATION_KEYS = ("learning_gpus", "inference_gpus")
MEMORY_KEYS = ("inference_requires_memory_gb", "learning_requires_memory_gb")


def read_loop(root: Section) -> Job:
    """Read the config into a job: one learner process per learning GPU, servers split from the inference GPUs."""
    rl = root.below("rl")
    allocation = rl.mapping("gpu_allocation") or rl.below("gpu_allocation")
    allocation.refuse_unknown_keys(ALLOCATION_KEYS)
    rl.warn_near_misses(("gpu_allocation", "async_rollouts", "recompute_rollout_probs", *MEMORY_KEYS))
    root.below("llm").warn_near_misses(("vllm_server", "max_gpu_mem_utilization"))
    root.below("llm", "vllm_server").warn_near_misses(("gpus_per_vllm_server", "enable_sleep_mode"))
    learning = _read_gpus(allocation, "learning_gpus")
    inference = _read_gpus(allocation, "inference_gpus")
    server = root.below("llm", "vllm_server")
    per_server = server.whole_number("gpus_per_vllm_server", minimum=1, default=1) or 1
    path = first_text((root.below("llm"), "base_model_path"))
    config = read_model_config(path)
    components = []
    if learning:
        components.append(
            Component(
                "actor",
                "learning_gpus",
                allocation.where("learning_gpus"),
                DeviceList(learning, 1),
                role=Role.LEARNER,
                model=ModelUse(
                    path,
                    config,
                    offloads=OFFLOADED_PARTS,
                    lora_rank=_adapter_rank(root),
                    recomputes_by_default=True,
                ),
            )
        )
    if learning and root.below("train").values.get(TEACHER) is not None:
        teacher = teacher_model(root, TEACHER)
        components.append(
            Component(
                TEACHER,
                "learning_gpus",
                allocation.where("learning_gpus"),
                DeviceList(learning, 1),
                role=Role.SCORER,
                model=ModelUse(teacher, read_model_config(teacher), offloads=OFFLOADED_PARTS),
            )
        )
    if inference:
        if len(inference) % per_server:
            server.findings.warn(
                "RST-N043",
                allocation.where("inference_gpus"),
                f"the last server gets {counted(len(inference) % per_server, 'GPU')} instead of {per_server}",
                f"{counted(len(inference), 'GPU')} / {per_server} per server",
                f"give a multiple of {per_server} GPUs, or write a gpus_per_vllm_server that divides {len(inference)}",
            )
        components.append(
            Component(
                "rollout",
                "inference_gpus",
                allocation.where("inference_gpus"),
                DeviceList(inference, per_server),
                ParallelSizes(tensor=min(per_server, len(inference))),
                role=Role.ENGINE,
                model=ModelUse(path, config, can_sleep=server.values.get("enable_sleep_mode") is not False),
            )
        )
    return Job(
        notation=Notation.LOOP,
        source=root.source,
        components=tuple(components),
        num_nodes=1,
        settings=_settings(root, rl),
        managers={"rollout": "actor"} if learning and inference else {},
    )


def _adapter_rank(root: Section) -> int | None:
    """Rank of the adapter. ml-loop always trains one; with a section train, Roost does only if lora_rank is given."""
    written = first_number((root.below("llm"), "lora_rank"))
    if written is None and "train" in root:
        return None
    return int(written or DEFAULT_ADAPTER_RANK)


def _read_gpus(allocation: Section, key: str) -> Sequence[int]:
    value = allocation.get(key)
    if value is None:
        if allocation.values.get(key) is None:
            allocation.error("RST-N041", key, "is missing", fix=f"write {key}: [0, 1, 2, 3]")
        return ()
    try:
        gpus = parse_devices(value)
    except ExpressionError as error:
        allocation.error(error.code, key, error.what, fix=error.fix)
        return ()
    if not gpus:
        allocation.error("RST-N031", key, "names no GPU", fix=f"write {key}: [0]")
    if len(set(gpus)) < len(gpus):
        repeated = sorted(gpu for gpu, times in Counter(gpus).items() if times > 1)
        allocation.error(
            "RST-N042", key, "names a GPU twice", f"repeated: {spell_ranks(repeated)}", "name each GPU once"
        )
        return ()
    return gpus


def _settings(root: Section, rl: Section) -> dict[str, object]:
    """Settings that decide what is resident: the asynchronous switch, and memory needed and allowed."""
    settings: dict[str, object] = {"async_rollouts": rl.flag("async_rollouts")}
    if settings["async_rollouts"] and rl.values.get("recompute_rollout_probs") is True:
        rl.error(
            "RST-T032",
            "recompute_rollout_probs",
            "cannot be done for rollouts of an older policy",
            "async_rollouts is true, so the learner no longer has the weights that generated them",
            "write recompute_rollout_probs: false, or async_rollouts: false",
        )
    for key in MEMORY_KEYS:
        settings[key] = rl.number(key)
    cap = root.below("llm").number("max_gpu_mem_utilization")
    if cap is not None and cap > 1:
        root.below("llm").error(
            "RST-M001",
            "max_gpu_mem_utilization",
            f"is {cap:g}; it must be a fraction above 0 and at most 1",
            fix="write 0.9",
        )
    settings["max_gpu_mem_utilization"] = cap
    return settings
