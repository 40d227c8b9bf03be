"""The ROLL notation: roles with `device_mapping` or `world_size`, and the model of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from roost.config.data import TEACHER, is_teacher
from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, MAX_PROCESSES, did_you_mean, remainder, shown
from roost.config.interpolation import ExpressionError, parse_devices
from roost.config.job import (
    DEFAULT_ADAPTER_RANK,
    EXPERT_TENSOR,
    OFFLOADED_PARTS,
    Component,
    CpuWorkers,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Sharding,
    bytes_of,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
    role_by_strategy,
    teacher_model,
)
from roost.config.node_groups import PROTECTED_FIX, PROTECTED_VARIABLES, PROTECTED_WHAT
from roost.config.notations.algorithm import (
    BASELINE,
    BY_TURN,
    NORMALISED,
    STD,
    STEPS,
    WHITEN,
    algorithm_of,
    completion_of,
)
from roost.config.source import NEAR_MISS, Section
from roost.config.train_choices import RewardScope

SCOPES = {
    None: RewardScope.NONE,
    "batch": RewardScope.BATCH,
    "group": RewardScope.GROUP,
    "traj_group_id": RewardScope.GROUP,
    "tags": RewardScope.TAG,
    "running": RewardScope.BATCH,  # of all steps in ROLL; Roost takes the statistics of the step
}
# Despite its name asym_clip is mean_std: ROLL clips nothing by it.
METHODS = {"mean": (True, False), "mean_std": (True, True), "asym_clip": (True, True)}
PROMPT_LENGTH = 1024  # where none is written
# Estimators of ROLL that normalise nothing themselves: keys for the rewards decide what is normalised.
PLAIN = ("reinforce", "grpo", "step_reinforce", "agentic_reinforce")


def sequence_of(root: Section) -> float:
    """Tokens of the longest sequence; 0 where nothing says it."""
    prompt, response = (first_number((root, key)) for key in ("prompt_length", "response_length"))
    longest = (prompt or PROMPT_LENGTH) + response if response else prompt
    return first_number((root, "sequence_length")) or longest or 0


def model_of_role(root: Section, section: Section, name: str, strategy: str | None) -> ModelUse:
    """The role's model: its own, or the job's; learners are always offloaded between their phases."""
    arguments = section.below("model_args")
    shared = "reward_pretrain" if name.startswith("reward") else "pretrain"
    path = first_text((arguments, "model_name_or_path"), (root, shared))
    if section.path == ("student",):
        path = first_text((arguments, "model_name_or_path"), (root, "student_pretrain"))
    if is_teacher(name):
        own = first_text((arguments, "model_name_or_path"), (root, "teacher_pretrain"))
        path = teacher_model(root, name) or own
    engine = section.below("strategy_args", "strategy_config")
    length = sequence_of(root)
    batch = first_number((section.below("training_args"), "per_device_train_batch_size")) or 1
    return ModelUse(
        path=path,
        config=read_model_config(path),
        weight_bytes=bytes_of(first_text((arguments, "dtype"))),
        memory_fraction=fraction_of_device(engine, "gpu_memory_utilization", "mem_fraction_static"),
        tokens=int(length * batch) or None,
        sequence=int(length) or None,
        lora_rank=_adapter_rank(arguments),
        strategy=strategy,
        sharding=_sharding(strategy),
        offloads=OFFLOADED_PARTS,
        recomputes=recomputes_of(section, strategy) is not False,
        recomputes_by_default=recomputes_of(section, strategy) is None,
        can_sleep=engine.values.get("enable_sleep_mode") is not False,
        unused_because=_why_unused(root, name),
    )


def recomputes_of(section: Section, strategy: str | None) -> bool | None:
    """Whether a learner recomputes the activations of its layers; None where its strategy's key is not written."""
    config = section.below("strategy_args", "strategy_config")
    word = config.get("recompute_granularity")
    disables = section.below("model_args").get("disable_gradient_checkpointing")
    if strategy is not None and strategy.startswith("megatron"):
        return word == "full" if "recompute_granularity" in config else None
    return not disables if isinstance(disables, bool) else None


def is_distilled_alone(root: Section) -> bool:
    """Return True for pure on-policy distillation. ROLL's launcher of these jobs sets `is_pure_opd` itself."""
    flag = root.values.get("is_pure_opd")
    return flag is True or (flag is None and "student_train" in root and root.values.get("use_opd") is not True)


def teacher_role(root: Section) -> str | None:
    """The role that holds the teachers of on-policy distillation: the reference, if it has no `teacher`."""
    if not is_distilled_alone(root) and root.values.get("use_opd") is not True:
        return None
    return "reference" if TEACHER not in root and "reference" in root else TEACHER


def _sharding(strategy: str | None) -> Sharding:
    if str(strategy).startswith("megatron"):
        return Sharding.OPTIMIZER
    return Sharding.NONE if strategy == "hf_infer" else Sharding.FULL


def _adapter_rank(arguments: Section) -> int | None:
    if not any(key in arguments for key in ("lora_rank", "lora_target")):
        return None
    return int(first_number((arguments, "lora_rank")) or DEFAULT_ADAPTER_RANK)


def _why_unused(root: Section, name: str) -> str:
    """Why ROLL would not create the role: a critic without GAE, or a reference without KL; empty if it would."""
    estimator = root.values.get("adv_estimator")
    if name == "critic" and isinstance(estimator, str) and estimator != "gae":
        return f"adv_estimator is {estimator}, and only gae uses a critic"
    if (
        name == "reference"
        and root.values.get("enable_reference") is False
        and root.values.get("use_kl_loss") is not True
    ):
        return "enable_reference is false"
    return ""


PLACEMENT_KEYS = ("device_mapping", "num_gpus_per_worker", "world_size", "strategy_args")
ROLE_KEYS = ("device_mapping", "world_size", "strategy_args")
NESTED_ROLES = ("rewards", "teachers", "teacher")
ENV_MANAGERS = ("train_env_manager", "val_env_manager")
CANONICAL_NAMES = {
    "actor_train": "actor",
    "actor_infer": "rollout",
    "student_train": "actor",
    "student_infer": "rollout",
    "student": "actor",
}
MAX_RATIO = 1_000
USUAL_ROLES = (
    "actor_train", "actor_infer", "reference", "critic", "reward", "rewards", "reward_model", "teacher",
    "student", "student_train", "student_infer", "sft_train", *ENV_MANAGERS,
)  # fmt: skip
STRATEGIES = ("vllm", "sglang", "hf_infer", "megatron_train", "megatron_infer", "fsdp2_train", "fsdp2_infer")
STRATEGY_SIZES = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", EXPERT_TENSOR, "gpu_memory_utilization", "mem_fraction_static", "fsdp_size",
)  # fmt: skip
# Strategies whose workers may have several devices; all others run one process per device.
MULTI_DEVICE_STRATEGIES = ("vllm", "sglang", "hf_infer")


def read_roll(root: Section, strict: bool = False, trains: bool = False) -> Job:
    """Read the config into a job. With `strict`, a written worker size that contradicts the engine's is an error.

    `trains`: Roost is to train it, also without a section `train`.
    """
    trains = trains or "train" in root
    root.warn_near_misses(
        ("student_pretrain", "num_gpus_per_node", "num_nodes", "async_generation_ratio", *USUAL_ROLES)
    )
    components: dict[str, Component] = {}
    for role, section in _roles(root):
        component = _read_role(root, role, section, strict, trains)
        if component is None:
            continue
        if component.name in components:
            section.findings.error(
                "RST-N012",
                section.where(),
                f"is {component.name} in Roost, and so is {components[component.name].written_name}",
                fix="keep one of the two",
            )
        components[component.name] = component
    return Job(
        notation=Notation.ROLL,
        source=root.source,
        components=tuple(components.values()),
        num_nodes=root.whole_number("num_nodes", minimum=1, maximum=MAX_NODES),
        accelerators_per_node=root.whole_number("num_gpus_per_node", minimum=0, maximum=MAX_ACCELERATORS_PER_NODE),
        settings=_settings(root),
    )


def holds_role(values: object) -> bool:
    """Return True if a mapping looks like a role: it has a key for its number of workers."""
    return isinstance(values, Mapping) and any(key in values for key in ROLE_KEYS)


def has_roles(values: Mapping[Any, Any]) -> bool:
    """Return True if a config has roles, at the top or where ROLL nests them."""
    nested = [values[key] for key in NESTED_ROLES if isinstance(values.get(key), Mapping)]
    groups = [values, *nested]
    return any(
        holds_role(value) or (key in USUAL_ROLES and _has_misspelt_key(value))
        for group in groups
        for key, value in group.items()
    )


def _has_misspelt_key(values: object) -> bool:
    """Return True if a role has no placement key, but a near miss of one."""
    return isinstance(values, Mapping) and any(did_you_mean(key, ROLE_KEYS, NEAR_MISS) for key in values)


def _roles(root: Section) -> Iterator[tuple[str, Section]]:
    """The roles with their names in the file: top-level ones, and those nested under `rewards` and its like."""
    for key, value in root.values.items():
        if not isinstance(key, str):
            continue
        if not isinstance(value, Mapping):
            if key in USUAL_ROLES:
                root.error(
                    "RST-C029",
                    key,
                    f"is {shown(value)}; it must be a mapping",
                    fix="write device_mapping or world_size below it",
                )
            continue
        section = Section(value, (key,), root.source, root.findings)
        if holds_role(value) or key in ENV_MANAGERS or (key in USUAL_ROLES and _has_misspelt_key(value)):
            yield key, section
        elif key in USUAL_ROLES and key not in NESTED_ROLES:
            root.findings.warn(
                "RST-N028",
                section.where(),
                "is not placed",
                "it has neither device_mapping nor world_size",
                "give it one, or remove it",
            )
        elif key in NESTED_ROLES:
            for name, inner in value.items():
                if isinstance(inner, Mapping) and (key == "rewards" or holds_role(inner)):
                    yield f"{key}.{name}", Section(inner, (key, str(name)), root.source, root.findings)
                elif key == "rewards":
                    section.error(
                        "RST-N029",
                        str(name),
                        f"is {shown(inner)}; it must be a role",
                        fix="write world_size: 8 below it",
                    )


def _read_role(root: Section, role: str, section: Section, strict: bool, trains: bool) -> Component | None:
    _refuse_misspelt_keys(section)
    parallel, strategy = _strategy(section)
    name = CANONICAL_NAMES.get(role, role)
    name = f"reward.{name.removeprefix('rewards.')}" if name.startswith("rewards.") else name
    name = TEACHER if role == "reference" and teacher_role(root) == role else name
    env = {**_variables(root), **_variables(section)}
    if role in ENV_MANAGERS and section.get("device_mapping") is not None:
        section.findings.warn(
            "RST-N040", section.where("device_mapping"), "is not used", "environments run on CPUs in ROLL", "remove it"
        )
    if section.values.get("device_mapping") is not None and role not in ENV_MANAGERS:
        requested: DeviceList | CpuWorkers | None = _read_devices(section, strategy, parallel, strict, trains)
    else:
        requested = _read_cpu_workers(role, section)
    if requested is None:
        return None
    kind = role_by_strategy(strategy, name)
    place = section.where("device_mapping") if isinstance(requested, DeviceList) else section.where()
    return Component(
        name, role, place, requested, parallel, tuple(env.items()), kind, model_of_role(root, section, name, strategy)
    )


def _read_devices(
    section: Section, strategy: str | None, parallel: ParallelSizes, strict: bool, trains: bool
) -> DeviceList | None:
    written_devices = section.get("device_mapping")
    if written_devices is None:
        return None  # an interpolation that is reported
    try:
        devices = parse_devices(written_devices)
    except ExpressionError as error:
        section.error(error.code, "device_mapping", error.what, fix=error.fix)
        return None
    if not devices:
        section.error(
            "RST-N031",
            "device_mapping",
            "names no device",
            fix="write list(range(0,8)), or leave it out and give world_size",
        )
        return None
    per_worker = _devices_per_worker(section, strategy, parallel, strict)
    if per_worker is None:
        return None
    if len(devices) % per_worker:
        whole = len(devices) // per_worker * per_worker
        section.error(
            "RST-N032",
            "device_mapping",
            f"names {len(devices)} devices, which {per_worker} per worker do not divide",
            remainder(len(devices), per_worker),
            f"name {whole} or {whole + per_worker} devices" if whole else f"name {per_worker} devices",
        )
        return None
    # Roost's learner has no pipeline stages, so that no number of devices would do (RST-T034).
    has_stages = trains and parallel.pipeline > 1
    if strategy == "megatron_train" and not has_stages and len(devices) % parallel.model:
        section.error(
            "RST-N033",
            "device_mapping",
            f"names {len(devices)} devices, which the model's {parallel.model} parts do not divide",
            f"tensor {parallel.tensor} * pipeline {parallel.pipeline} * context {parallel.context}",
            f"name a multiple of {parallel.model} devices",
        )
    _check_repeated(section, list(devices), per_worker)
    engine = section.below("strategy_args", "strategy_config")
    replicas = engine.whole_number("data_parallel_size", 1, 1) or 1
    if strategy == "vllm" and replicas not in (1, len(devices) // per_worker):
        engine.error(
            "RST-N036",
            "data_parallel_size",
            f"is {replicas}, but there are {len(devices) // per_worker} workers",
            fix="leave data_parallel_size out",
        )
    written = section.whole_number("world_size", minimum=0)
    if written is not None and written != len(devices) // per_worker:
        section.error(
            "RST-N036",
            "world_size",
            f"is {written}, but the devices make {len(devices) // per_worker} workers",
            f"{len(devices)} devices / {per_worker} per worker",
            "leave world_size out",
        )
    return DeviceList(devices, per_worker)


def _check_repeated(section: Section, devices: list[int], per_worker: int) -> None:
    if len(set(devices)) == len(devices):
        return
    for start in range(0, len(devices), per_worker):
        own = devices[start : start + per_worker]
        if len(set(own)) < len(own):
            section.error(
                "RST-N034",
                "device_mapping",
                f"gives worker {start // per_worker} the same device twice",
                f"devices {own}",
                "name each device once for a worker",
            )
            return
    repeated = Counter(devices).most_common(1)[0][0]
    section.findings.warn(
        "RST-N035",
        section.where("device_mapping"),
        f"puts several workers on device {repeated}",
        fix="name each device once unless the workers are meant to share it",
    )


def _devices_per_worker(section: Section, strategy: str | None, parallel: ParallelSizes, strict: bool) -> int | None:
    """Devices of a worker: tensor * pipeline size for vLLM, num_gpus_per_worker for SGLang and HF, else one."""
    written = section.whole_number("num_gpus_per_worker", minimum=1)
    if section.get("num_gpus_per_worker") is not None and written is None:
        return None
    if strategy == "vllm":
        derived, reason = (
            parallel.model,
            f"tensor_parallel_size {parallel.tensor} * pipeline_parallel_size {parallel.pipeline}",
        )
    elif strategy is not None and strategy not in MULTI_DEVICE_STRATEGIES:
        derived, reason = 1, f"{strategy} runs one process on each device"
    else:
        if strategy == "sglang" and parallel.model > (written or 1):
            section.findings.warn(
                "RST-N038",
                section.where("num_gpus_per_worker"),
                f"gives each worker {written or 1} of the {parallel.model} devices that its engine is split over",
                f"tensor {parallel.tensor} * pipeline {parallel.pipeline}",
                f"write num_gpus_per_worker: {parallel.model}",
            )
        return written or 1
    if written is not None and written != derived:
        report = section.findings.error if strict else section.findings.warn
        report(
            "RST-N037",
            section.where("num_gpus_per_worker"),
            f"is {written}, but {derived} is used",
            reason,
            f"write num_gpus_per_worker: {derived}, or leave it out",
        )
    return derived


def _strategy(section: Section) -> tuple[ParallelSizes, str | None]:
    """The parallel sizes and the name of the role's strategy."""
    arguments = section.mapping("strategy_args") or section.below("strategy_args")
    arguments.warn_near_misses(("strategy_name", "strategy_config"))
    name = arguments.text("strategy_name")
    hint = did_you_mean(name, STRATEGIES, NEAR_MISS - 0.1) if name is not None and name not in STRATEGIES else ""
    if hint:
        section.findings.warn(
            "RST-N030", arguments.where("strategy_name"), f"{name} is not a strategy Roost knows", hint, "correct it"
        )
    config = arguments.mapping("strategy_config") or arguments.below("strategy_config")
    config.warn_near_misses(STRATEGY_SIZES)
    if name in MULTI_DEVICE_STRATEGIES:
        return ParallelSizes(
            tensor=config.whole_number("tensor_parallel_size", 1, 1) or 1,
            pipeline=config.whole_number("pipeline_parallel_size", 1, 1) or 1,
        ), name
    shard = config.whole_number("fsdp_size", -1, 1) or 1
    is_sharded = name is not None and not name.startswith("megatron")
    return ParallelSizes(
        tensor=_model_size(config, "tensor"),
        pipeline=_model_size(config, "pipeline"),
        context=_context_size(section.below("model_args"), config),
        expert=config.whole_number("expert_model_parallel_size", 1, 1) or 1,
        shard=shard if is_sharded and shard > 1 else None,  # ROLL shards over all for 1
        expert_tensor=None if is_sharded else config.whole_number(EXPERT_TENSOR, 1),
    ), name


def _model_size(config: Section, dimension: str) -> int:
    """The tensor or pipeline size of a role; learners and engines have different keys for it."""
    learner_key, engine_key = f"{dimension}_model_parallel_size", f"{dimension}_parallel_size"
    return config.whole_number(learner_key if learner_key in config else engine_key, 1, 1) or 1


def _context_size(arguments: Section, config: Section) -> int:
    """The context size of a role; Megatron and FSDP have different keys for it."""
    ulysses = arguments.whole_number("ulysses_size", 1, 1) or 1
    context = config.whole_number("context_parallel_size", 1, 1) or 1
    if ulysses > 1 and context > 1 and ulysses != context:
        what, why = f"is {ulysses}, but context_parallel_size is {context}", "both are the size of context groups"
        arguments.error("RST-T120", "ulysses_size", what, why, "write one of the two")
    return max(ulysses, context)


def _read_cpu_workers(role: str, section: Section) -> CpuWorkers | None:
    if role in ENV_MANAGERS:
        return _read_env_manager(section)
    if section.get("num_gpus_per_worker") not in (None, 0):
        section.findings.warn(
            "RST-N039",
            section.where("num_gpus_per_worker"),
            "is not used",
            "a role without device_mapping has no devices",
            "remove it",
        )
    count = section.whole_number("world_size", minimum=1, maximum=MAX_PROCESSES)
    if count is None:
        if section.get("world_size") is None:
            section.findings.error(
                "RST-N028",
                section.where(),
                "has neither device_mapping nor world_size",
                fix="write device_mapping for accelerators, or world_size for workers on CPUs",
            )
        return None
    return CpuWorkers(count)


def _read_env_manager(section: Section) -> CpuWorkers | None:
    """The workers that all environments need, with `max_env_num_per_worker` environments in each."""
    groups = section.whole_number("num_env_groups", 1, 1) or 1
    size = section.whole_number("group_size", 1, 1) or 1
    spare = section.whole_number("group_size_redundancy", 0, 0) or 0
    environments = groups * (size + spare)
    per_worker = section.whole_number("max_env_num_per_worker", minimum=-1, default=0) or 0
    per_worker = per_worker if per_worker > 0 else environments
    count = math.ceil(environments / per_worker)
    written = section.whole_number("world_size", 1)
    if written is not None and "num_env_groups" in section and written != count:
        why = f"{environments} environments / {per_worker} per worker"
        section.error(
            "RST-N036", "world_size", f"is {written}, but the environments make {count} workers", why, "leave it out"
        )
    if written is not None and "num_env_groups" not in section:
        count = written
    if count > MAX_PROCESSES:
        what = f"makes {count:,} workers, more than the {MAX_PROCESSES:,} that Roost plans for"
        section.error(
            "RST-P010", "num_env_groups", what, f"{environments:,} environments / {per_worker} per worker", "use fewer"
        )
        return None
    return CpuWorkers(count)


def _variables(section: Section) -> dict[str, str]:
    variables = section.mapping("system_envs") or section.below("system_envs")
    found = {}
    for key in variables.values:
        value = variables.get(key)
        if key in PROTECTED_VARIABLES:
            variables.error("RST-H028", str(key), PROTECTED_WHAT, fix=PROTECTED_FIX)
        elif isinstance(value, Mapping | list):
            variables.error(
                "RST-H026",
                str(key),
                f"is {shown(value)}; an environment variable holds text",
                fix="write a single value",
            )
        elif value is not None or variables.values[key] is None:
            found[str(key)] = str(value)
    return found


def _refuse_misspelt_keys(section: Section) -> None:
    """Report misspelt placement keys: without device_mapping, a role would silently run on CPUs."""
    for key in section.values:
        hint = did_you_mean(key, PLACEMENT_KEYS, NEAR_MISS)
        if key not in PLACEMENT_KEYS and hint and key != "num_gpus_per_node":
            section.error(
                "RST-C023", str(key), "is not a key Roost knows", hint, f"placement keys: {', '.join(PLACEMENT_KEYS)}"
            )


def is_agentic(root: Section) -> bool:
    return "train_env_manager" in root


def scope_words(root: Section) -> tuple[Any, Any]:
    """ROLL's words for the scopes of the mean and the standard deviation of rewards; None: not computed.

    The agentic pipeline has a section for them, `reward_normalization`, which holds for every estimator.
    """
    keys = ("norm_mean_type", "norm_std_type")
    if not is_agentic(root):
        is_grpo = root.values.get("adv_estimator") == "grpo"
        mean, std = ("group" if is_grpo else root.values.get(key) for key in keys)
        return mean, std
    block = root.below("reward_normalization").values
    over = block.get("grouping") or "batch"
    needs = METHODS.get(str(block.get("method")), (False, False))
    written = [block.get(key) or (over if is_needed else None) for key, is_needed in zip(keys, needs, strict=True)]
    mean, std = (over if word == "group" else word for word in written)
    return mean, std


def normalisation(root: Section) -> tuple[object, dict[str, RewardScope]]:
    """The estimator in words that all notations share, and the scopes of reward statistics that it does not imply.

    Without environments each domain of rewards is normalised alone.
    """
    if is_distilled_alone(root):
        return TEACHER, {}
    words = (word if isinstance(word, str) else None for word in scope_words(root))
    found = [SCOPES.get(word, RewardScope.NONE) for word in words]
    if not is_agentic(root) and len(root.below("rewards").values) > 1:
        found = [RewardScope.TAG if scope is RewardScope.BATCH else scope for scope in found]
    written = root.values.get("adv_estimator")
    is_plain = written in PLAIN or (written == "gigpo" and not is_agentic(root))
    if is_plain and (found[0], found[1]) in NORMALISED:
        return NORMALISED[found[0], found[1]], {}
    named = zip((BASELINE, STD), found, strict=True)
    return "reinforce" if is_plain else written, {name: scope for name, scope in named if scope != RewardScope.NONE}


def _settings(root: Section) -> dict[str, object]:
    """Settings of the plan: the algorithm, and `async_generation_ratio`."""
    value = root.get("async_generation_ratio")
    in_loss = root.values.get("kl_loss_coef") if root.values.get("use_kl_loss") is True else None
    in_reward = root.values.get("init_kl_coef") if root.values.get("add_token_level_kl") is True else None
    prompt = first_number((root, "prompt_length"))
    estimator, scopes = normalisation(root)
    found = algorithm_of(Notation.ROLL, estimator, in_loss, in_reward, prompt)
    found |= completion_of(prompt, first_number((root, "response_length")), sequence_of(root))
    found |= {name: scope.value for name, scope in scopes.items()}
    found |= {WHITEN: True} if root.values.get("whiten_advantages") is True else {}
    if is_agentic(root):
        own = {"step_reinforce": STEPS, "agentic_reinforce": BY_TURN}.get(str(root.values.get("adv_estimator")))
        found |= {own: True} if own else {}
    if value is None:
        return found
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_RATIO:
        root.error(
            "RST-C026",
            "async_generation_ratio",
            f"is {shown(value)}; it must be a number that is not negative",
            fix="write 0 for synchronous, or 1",
        )
        return found
    return {"async_generation_ratio": value, **found}
