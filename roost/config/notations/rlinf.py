"""The RLinf notation: a `cluster` section with `component_placement` and `node_groups`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from roost.config.data import is_teacher
from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, did_you_mean, shown
from roost.config.job import (
    DEFAULT_ADAPTER_RANK,
    EXPERT_TENSOR,
    OFFLOADED_PARTS,
    Component,
    Job,
    Layout,
    ModelParallelSettings,
    ModelUse,
    Notation,
    ParallelSizes,
    RankMap,
    Role,
    Sharding,
    bytes_of,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
    role_by_name,
    teacher_model,
)
from roost.config.node_groups import CLUSTER_GROUP, read_node_groups
from roost.config.notations.algorithm import algorithm_of, completion_of
from roost.config.ranks import RankSyntaxError, Segment, parse_placement
from roost.config.source import NEAR_MISS, Section

if TYPE_CHECKING:
    from roost.config.train import TrainSettings

CLUSTER_KEYS = (
    "num_nodes",
    "num_gpus_per_node",
    "component_placement",
    "node_groups",
    # Settings of RLinf's scheduler that do not affect where processes run.
    "auto_scheduler",
    "use_pre_process_policy",
    "use_wait_before_last_iter_policy",
    "recreate_nccl_groups",
    "net_emulation",
    "tracer",
    "profiling",
)
PROFILERS = ("nsight", "rocprof_sys")
MEGATRON, REFERENCE = "megatron", "reference"
EXPERTS = ("num_experts", "num_local_experts")  # in the config.json of a mixture
SIZES = tuple(f"{each}_parallel_size" for each in ("tensor_model", "pipeline_model", "context", "expert_model"))
USUAL_COMPONENTS = ("actor", "rollout", "env", "reward", "inference", "critic", "agent", "reference", "teacher")
MODEL_PARALLEL_COMPONENTS = ("actor", "rollout", "inference", "actor_inference", "critic", "critic_inference")
MODEL_PARALLEL_TASKS = ("reasoning", "reasoning_eval", "coding_online_rl")


def read_rlinf(root: Section, layout: Layout | None = None, needs_components: bool = True) -> Job:
    """Read the config into a job; mistakes go to the section's findings.

    The layout is what the config implies unless it is given: see `implied_layout`. A config that only describes
    machines needs no component.
    """
    cluster = root.mapping("cluster")
    if cluster is None:
        if root.get("cluster") is None:
            root.error(
                "RST-N009",
                "cluster",
                "is missing",
                fix="write a cluster section with num_nodes and component_placement",
            )
        cluster = root.below("cluster")
    _refuse_misplaced_components(cluster)
    _check_profiler(cluster)
    components = _read_components(cluster, root, needs_components)
    return Job(
        notation=Notation.RLINF,
        source=root.source,
        components=components,
        node_groups=read_node_groups(cluster),
        num_nodes=cluster.whole_number("num_nodes", minimum=1, maximum=MAX_NODES),
        accelerators_per_node=cluster.whole_number("num_gpus_per_node", minimum=0, maximum=MAX_ACCELERATORS_PER_NODE),
        layout=layout or implied_layout(root, components),
        model_parallel=ModelParallelSettings(
            recompute_logprobs=root.below("algorithm").get("recompute_logprobs") is True,
            auto_scheduler=cluster.flag("auto_scheduler"),
            use_pre_process_policy=cluster.flag("use_pre_process_policy"),
        ),
        settings=_settings(root),
    )


def with_reference(job: Job, training: TrainSettings, root: Section) -> Job:
    """The job with a reference component, if its KL needs one; RLinf's inference or actor computes the KL itself.

    It is placed with that component, and equals it except for what a section `reference` sets.
    """
    placed = {component.name: component for component in job.components}
    beside = placed.get("inference") or placed.get("actor")
    has_own = "reference" in placed or training.learner.adapter is not None
    if beside is None or has_own or not training.uses_reference:
        return job
    reference = replace(beside, name=REFERENCE, role=role_by_name(REFERENCE))
    own = root.below(REFERENCE)
    if own.values:
        model = _model(root, REFERENCE)
        if not any(key in own for key in ("training_backend", "fsdp_config")):
            model = replace(model, sharding=beside.model.sharding, strategy=beside.model.strategy)
        model = replace(model, offloads=model.offloads or beside.model.offloads)
        # The expert size beside it is that of a mixture, which a model of its own need not be.
        is_dense = model.config is not None and not any(model.config.get(key) for key in EXPERTS)
        sizes = replace(beside.parallel, expert=1) if is_dense else beside.parallel
        reference = replace(reference, model=model, parallel=sizes)
    if any(key in own.below("model") for key in SIZES) or _has_fsdp_size(root, REFERENCE):
        reference = replace(reference, written_name=REFERENCE, parallel=_parallel_sizes(root, REFERENCE))
    return replace(job, components=(*job.components, reference))


def implied_layout(root: Section, components: tuple[Component, ...]) -> Layout:
    """Model-parallel if the config trains a language model with engines, else as written.

    In RLinf the training script decides. A config shows its script by the task type, or by parallel sizes that only
    model-parallel scripts read.
    """
    names = {component.name for component in components}
    if "rollout" not in names:
        return Layout.AS_WRITTEN
    task = root.below("runner").values.get("task_type")
    if isinstance(task, str):
        return Layout.MODEL_PARALLEL if task in MODEL_PARALLEL_TASKS else Layout.AS_WRITTEN
    if "actor" not in names:
        return Layout.AS_WRITTEN
    sized = "tensor_model_parallel_size" in root.below("actor", "model") or "tensor_parallel_size" in root.below(
        "rollout"
    )
    return Layout.MODEL_PARALLEL if sized else Layout.AS_WRITTEN


def _refuse_misplaced_components(cluster: Section) -> None:
    """Refuse unknown keys, with a message of its own for a component directly under `cluster`."""
    misplaced = [
        key for key in cluster.values
        if isinstance(key, str) and {name.strip() for name in key.split(",")} & set(USUAL_COMPONENTS)
    ]  # fmt: skip
    for key in misplaced:
        fix = f"move it into cluster.component_placement: {{{key}: ...}}"
        cluster.error("RST-N011", key, "is a component, but stands outside component_placement", fix=fix)
    cluster.refuse_unknown_keys([*CLUSTER_KEYS, *misplaced], fix=f"known keys: {', '.join(CLUSTER_KEYS)}")


def _check_profiler(cluster: Section) -> None:
    """Refuse an unknown profiler, as RLinf does; Roost starts none."""
    profiling = cluster.mapping("profiling")
    if profiling is None or profiling.values.get("enabled") is False:
        return
    backend = profiling.text("backend")
    if backend is not None and backend not in PROFILERS:
        what, hint = f"{backend} is not a profiler of RLinf", did_you_mean(backend, PROFILERS)
        profiling.error("RST-C036", "backend", what, hint, f"use {' or '.join(PROFILERS)}")


def _read_components(cluster: Section, root: Section, is_needed: bool) -> tuple[Component, ...]:
    for section, keys in _optional_keys(root):
        section.warn_near_misses(keys)
    placements = cluster.mapping("component_placement")
    if placements is None:
        if is_needed and cluster.get("component_placement") is None:
            cluster.error(
                "RST-N010", "component_placement", "is missing", fix="write component_placement: {actor: all}"
            )
        return ()
    components: dict[str, Component] = {}
    for key in placements.values:
        requested = _read_rank_map(placements, key)
        for name in str(key).split(","):
            name = name.strip()
            where = placements.where(str(key))
            if not name:
                placements.error(
                    "RST-N008", str(key), "names a component with an empty name", fix="remove the extra comma"
                )
            elif name in components:
                placements.error(
                    "RST-N012",
                    str(key),
                    f"places {name} a second time",
                    f"the first is at {components[name].where}",
                    "keep one placement for each component",
                )
            elif requested is not None:
                _warn_misspelt(placements, str(key), name)
                components[name] = Component(
                    name,
                    name,
                    where,
                    requested,
                    _parallel_sizes(root, name),
                    role=role_by_name(name),
                    model=_model(root, name),
                )
    return tuple(components.values())


def _optional_keys(root: Section) -> list[tuple[Section, tuple[str, ...]]]:
    """Sections that belong to the other program, with the keys whose misspellings are warned of."""
    sizes = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", EXPERT_TENSOR,
    )  # fmt: skip
    learners = [(root.below(name, "model"), sizes) for name in ("actor", "critic")]
    engine = (root.below("rollout"), ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"))
    return [
        *learners,
        engine,
        (root.below("algorithm"), ("recompute_logprobs",)),
        (root.below("runner"), ("task_type",)),
    ]


def _warn_misspelt(placements: Section, key: str, name: str) -> None:
    """Warn of a component name that is nearly a usual one; any name is allowed."""
    hint = did_you_mean(name, USUAL_COMPONENTS, NEAR_MISS)
    if name not in USUAL_COMPONENTS and hint and not is_teacher(name):
        placements.findings.warn(
            "RST-N013", placements.where(key), f"{name} is not a usual component", hint, "correct the name"
        )


def _read_rank_map(placements: Section, key: object) -> RankMap | None:
    """One entry of component_placement: a string or number, or a mapping with `placement` and `node_group`."""
    name = str(key)
    value = placements.values[key]
    if not isinstance(value, Mapping):
        segments = _read_segments(placements, key, name)
        here = placements.where(name)
        return None if segments is None else RankMap(segments, (CLUSTER_GROUP,), here, here)
    entry = Section(value, (*placements.path, name), placements.source, placements.findings)
    entry.refuse_unknown_keys(("node_group", "placement"))
    groups = _read_group_labels(entry)
    if "placement" not in entry:
        placements.error("RST-N014", name, "has no placement", fix="write placement: all, or ranks such as 0-3")
        return None
    segments = _read_segments(entry, "placement", "placement")
    if segments is None or groups is None:
        return None
    return RankMap(segments, groups, entry.where("placement"), entry.where("node_group"))


def _read_segments(section: Section, key: object, shown_key: str) -> tuple[Segment, ...] | None:
    value = section.get(key)  # type: ignore[arg-type]  # a YAML key may be a number; it is only looked up
    if value is None and section.values.get(key) is not None:
        return None  # reported as unresolved
    if isinstance(value, bool) or not isinstance(value, int | str):
        section.error(
            "RST-N015",
            shown_key,
            f"is {shown(value)}; it must be ranks",
            fix="write all, a rank such as 0, or ranges such as 0-3 or 0-1:0-3,4-7",
        )
        return None
    try:
        return parse_placement(str(value) if isinstance(value, str) or value.bit_length() < 64 else "9" * 11)
    except RankSyntaxError as error:
        section.error(error.code, shown_key, error.what, fix=error.fix)
        return None


def _read_group_labels(entry: Section) -> tuple[str, ...] | None:
    if "node_group" not in entry:
        return (CLUSTER_GROUP,)
    value = entry.get("node_group")
    parts = value if isinstance(value, list | tuple) else str(value).split(",") if isinstance(value, str) else [value]
    labels = [str(part).strip() for part in parts if isinstance(part, str | int | float) and not isinstance(part, bool)]
    if len(labels) != len(parts) or not all(labels) or not labels:
        entry.error(
            "RST-N016",
            "node_group",
            f"is {shown(value)}; it must be a label or a list of labels",
            fix='write node_group: a800, or node_group: "a800,4090"',
        )
        return None
    return tuple(labels)


def _parallel_sizes(root: Section, component: str) -> ParallelSizes:
    """Parallel sizes of a component; engines and learners have different keys for them."""
    if component == "rollout" or component.startswith("rollout_"):
        own = root.below(component)
        rollout = own if "tensor_parallel_size" in own else root.below("rollout")
        return ParallelSizes(
            tensor=rollout.whole_number("tensor_parallel_size", 1, 1) or 1,
            pipeline=rollout.whole_number("pipeline_parallel_size", 1, 1) or 1,
        )
    if component == REFERENCE:  # RLinf has no such component, so only its own section counts
        return _learner_sizes(root.below(component, "model"), ParallelSizes(shard=_fsdp_size(root.below(component))))
    if component not in MODEL_PARALLEL_COMPONENTS:
        return ParallelSizes()
    inferring = component in ("inference", "actor_inference", "critic_inference")
    owner = "critic" if component.startswith("critic") else "actor"
    learner = _learner_sizes(root.below(owner, "model"), ParallelSizes(shard=_fsdp_size(root.below(owner))))
    own = root.below(component, "model")
    if inferring and not own.values and _has_fsdp_size(root, component):
        return replace(learner, shard=_fsdp_size(root.below(component)))
    if not inferring or not own.values:
        return learner
    # Sizes of an inference component are its own; only its pipeline size defaults to the learner's.
    return _learner_sizes(own, ParallelSizes(pipeline=learner.pipeline, shard=_fsdp_size(root.below(component))))


def _learner_sizes(model: Section, default: ParallelSizes) -> ParallelSizes:
    return ParallelSizes(
        tensor=model.whole_number("tensor_model_parallel_size", 1, default.tensor) or 1,
        pipeline=model.whole_number("pipeline_model_parallel_size", 1, default.pipeline) or 1,
        context=model.whole_number("context_parallel_size", 1, default.context) or 1,
        expert=model.whole_number("expert_model_parallel_size", 1, 1) or 1,
        shard=default.shard,
        expert_tensor=model.whole_number(EXPERT_TENSOR, 1),
    )


def _has_fsdp_size(root: Section, component: str) -> bool:
    return "fsdp_size" in root.below(component, "fsdp_config")


def _fsdp_size(component: Section) -> int | None:
    """Processes that FSDP shards over; None for all, as for -1."""
    size = component.below("fsdp_config").whole_number("fsdp_size", -1)
    return size if size is not None and size > 0 else None


def _model(root: Section, component: str) -> ModelUse:
    """The component's model; a scorer, critic or engine that names none has the actor's."""
    own, actor = root.below(component), root.below("actor")
    path = first_text((own.below("model"), "model_path"), (actor.below("model"), "model_path"))
    if role_by_name(component) is Role.HELPER or is_teacher(component):
        path = teacher_model(root, component) or first_text((own.below("model"), "model_path"))
    is_engine = role_by_name(component) is Role.ENGINE
    precisions = [(own.below("model"), "precision"), *([] if is_engine else [(actor.below("model"), "precision")])]
    precision = first_text(*precisions)
    length = first_number((root.below("runner"), "seq_length"), (actor.below("model"), "seq_length"))
    batch = first_number((own, "micro_batch_size"), (actor, "micro_batch_size")) or 1
    return ModelUse(
        path=path,
        config=read_model_config(path),
        weight_bytes=bytes_of(precision),
        memory_fraction=fraction_of_device(own, "gpu_memory_utilization"),
        tokens=int(length * batch) if length else None,
        sequence=int(length) if length else None,
        lora_rank=_adapter_rank(own.below("model")),
        sharding=_sharding(own),
        strategy=_strategy(root, component),
        offloads=_offloads(own),
        recomputes=recomputes_of(own) is not False,
        recomputes_by_default=recomputes_of(own) is None,
        can_sleep=own.values.get("enable_sleep_mode") is not False,
        unused_because="critic.use_critic_model is false"
        if component == "critic" and own.values.get("use_critic_model") is False
        else "",
    )


def recomputes_of(own: Section) -> bool | None:
    """Whether a learner recomputes the activations of its layers; None where its backend's key is not written."""
    word, flag = own.below("model").get("recompute_granularity"), own.below("fsdp_config").get("gradient_checkpointing")
    is_megatron = own.values.get("training_backend") == MEGATRON
    if not is_megatron and isinstance(flag, bool):
        return flag
    # Without a backend, either key counts.
    if "recompute_granularity" in own.below("model") and (is_megatron or "training_backend" not in own.values):
        # selective: those of attention alone, which flash attention does not keep
        return bool(word == "full")
    return None


def _adapter_rank(model: Section) -> int | None:
    if model.values.get("is_lora") is not True:
        return None
    return int(first_number((model, "lora_rank")) or DEFAULT_ADAPTER_RANK)


def adapter_rank(root: Section, rank: int | None) -> int | None:
    """The adapter rank of a job that trains; report a `lora_rank` that is not enabled by `is_lora`."""
    model, train = root.below("actor", "model"), root.below("train")
    written, own = first_number((model, "lora_rank")), train.values.get("lora_rank")
    if rank is not None or written is None:
        return rank
    if own is not None and (own != written or "is_lora" in model):
        says = f"lora_rank is {written:g}" if own != written else f"is_lora is {shown(model.values.get('is_lora'))}"
        fix = f"write actor.model.is_lora: true and lora_rank: {shown(own)}, or keep one of the two"
        train.error("RST-T008", "lora_rank", f"is {shown(own)}, but in actor.model {says}", fix=fix)
    elif own is None and "is_lora" not in model:
        why = "is_lora switches the adapter on, and is not written: all weights are trained"
        fix = "write is_lora: true beside it, or remove it"
        model.findings.warn("RST-T014", model.where("lora_rank"), "has no effect", why, fix)
    return None


def _sharding(own: Section) -> Sharding:
    """The sharding: Megatron's if the job names that backend, else FSDP's, which Roost's learner uses."""
    if own.values.get("training_backend") == MEGATRON:
        return Sharding.OPTIMIZER
    fsdp = own.below("fsdp_config")
    word = fsdp.values.get("sharding_strategy")
    if word == "hybrid_shard" and _fsdp_size(own) is None and fsdp.values.get("strategy") != "fsdp2":
        fsdp.findings.warn(
            "RST-N068",
            fsdp.where("sharding_strategy"),
            "is hybrid_shard, which needs an fsdp_size",
            "without one RLinf makes a mesh of one dimension, and torch ends with an error; planned is full_shard",
            "write fsdp_size with the processes that share one copy, or full_shard",
        )
    return Sharding.NONE if word == "no_shard" else Sharding.FULL


def _strategy(root: Section, component: str) -> str | None:
    """The engine or the training backend; embodied policies run in Hugging Face transformers."""
    own = root.below(component)
    if role_by_name(component) is not Role.ENGINE:
        return first_text((own, "training_backend"))
    named = first_text((own, "rollout_backend"), (own, "generation_backend"))
    is_embodied = root.below("runner").values.get("task_type") == "embodied"
    return named or ("huggingface" if is_embodied else None)


def _offloads(own: Section) -> tuple[str, ...]:
    if own.values.get("enable_offload") is True:
        return OFFLOADED_PARTS
    return tuple(part for part in OFFLOADED_PARTS if own.values.get(f"offload_{part}") is True)


def _settings(root: Section) -> dict[str, object]:
    """Settings of the plan: the learner's offloads, which decide what is resident, and the algorithm."""
    actor, algorithm = root.below("actor"), root.below("algorithm")
    offloads = {
        key: actor.values[key]
        for key in ("offload_weight", "offload_grad", "offload_optimizer")
        if isinstance(actor.values.get(key), bool)
    }
    in_loss, in_reward = (algorithm.values.get(key) or None for key in ("kl_beta", "reinpp_kl_beta"))
    prompt = first_number((root.below("data"), "max_prompt_length"))
    word, switch = algorithm.values.get("adv_type"), algorithm.values.get("normalize_advantages")
    if word == "reinpp" and algorithm.values.get("use_reinpp_baseline") is True:
        word = "reinpp with use_reinpp_baseline"
    whitens = switch is True or (switch is None and word == "gae") or None
    found = algorithm_of(Notation.RLINF, word, in_loss, in_reward, prompt, whitens)
    length = first_number((root.below("runner"), "seq_length"), (actor.below("model"), "seq_length"))
    response = first_number((algorithm.below("sampling_params"), "max_new_tokens"))
    return offloads | found | completion_of(prompt, response, length)
