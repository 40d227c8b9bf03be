"""Rules about the components that training needs, with fixes that place the missing ones in the job's notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roost.config.data import is_teacher
from roost.config.findings import Findings, Where
from roost.config.job import COMMAND_LINE, ModelUse, Notation
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.ranks import spell_ranks
from roost.config.train import SETTINGS, AdvantageEstimator, Objective, TrainSettings
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.shape import UnknownShape, shape_from_config

SUPERVISED = ("actor", "sft_train")  # the learner's component in supervised training
ROLL_NAMES = {"actor": "actor_train", "rollout": "actor_infer"}
At = Callable[[str], Where]  # position of a setting, a parallel size or a component
LOOP_GPUS = {"actor": "learning_gpus", "rollout": "inference_gpus"}


def spelled(where: Where, name: str, value: str) -> str:
    """A setting with a value: an override where verl's key for it is the place, else YAML.

    >>> spelled(Where(path=("actor_rollout_ref", "rollout", "name")), "engine", "vllm")
    'actor_rollout_ref.rollout.name=vllm'
    """
    return f"{where.key_path}={value}" if where.path[:1] == ("actor_rollout_ref",) else f"{name}: {value}"


@dataclass(frozen=True, slots=True)
class Placing:
    """Fixes that place a missing component, in the notation of the config."""

    notation: Notation
    parts: Mapping[str, ComponentPlan]

    def fix(self, name: str) -> str:
        """A fix that places a component, on the learner's devices if there is one; empty if the notation has none."""
        if self.notation is Notation.LOOP:
            return f"write rl.gpu_allocation.{LOOP_GPUS[name]}: [0]" if name in LOOP_GPUS else ""
        beside = next((self.parts[each] for each in (*SUPERVISED, *self.parts) if each in self.parts), None)
        if beside is None or beside.table.labels != (CLUSTER_GROUP,):
            return f"place {name}"
        devices = sorted(set(beside.hardware_ranks.tolist()))
        if self.notation is Notation.RLINF:
            return f"write {name}: {spell_ranks(devices)} in cluster.component_placement"
        return f"write {_role(name, devices)}" if self.notation is Notation.ROLL else f"place {name}"


def _role(name: str, devices: list[int]) -> str:
    """A role of ROLL. The expression is quoted, because its comma would end it inside braces."""
    is_run = len(devices) == devices[-1] - devices[0] + 1
    spelled = f'"list(range({devices[0]},{devices[-1] + 1}))"' if is_run else str(devices)
    outer, _, inner = ROLL_NAMES.get(name, name).partition(".")
    role = f"{{device_mapping: {spelled}}}"
    return f"{outer}: {{{inner}: {role}}}" if inner else f"{outer}: {role}"


def either(*fixes: str) -> str:
    """Fixes of which one is enough; those that are empty are left out.

    >>> either("", "write lora_rank: 16", "write kl_coef: 0")
    'write lora_rank: 16, or kl_coef: 0'
    """
    joined = ", or ".join(fix for fix in fixes if fix)
    return joined.replace(", or write", ", or") if joined.startswith("write") else joined


def check_components(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], placing: Placing, at: At, findings: Findings
) -> None:
    """Check that every component that the settings need is placed; warn about placed ones that they do not use."""
    for name, role in (("actor", "a learner"), ("rollout", "an engine")):
        if name not in parts:
            findings.error("RST-T023", at("task"), f"needs {name}, {role}, which is not placed", fix=placing.fix(name))
    if settings.advantage.advantage_estimator is AdvantageEstimator.GAE and "critic" not in parts:
        findings.error(
            "RST-T024",
            at("advantage_estimator"),
            "is gae, but there is no critic",
            "values come from a model of their own",
            either(placing.fix("critic"), "write another advantage_estimator, such as grpo"),
        )
    if settings.uses_reference and settings.learner.adapter is None and "reference" not in parts:
        key = "kl_coef" if settings.learner.loss.kl_coef else "kl_penalty_coef"
        findings.error(
            "RST-T025",
            at(key),
            "needs a reference, which is not placed",
            "without an adapter the policy cannot be its own reference",
            either(placing.fix("reference"), "write train.lora_rank: 16", f"write {key}: 0"),
        )
    if settings.reference_sync_steps and not settings.uses_reference:
        why, fix = "kl_coef and kl_penalty_coef are 0: there is no reference", "write kl_coef, or remove it"
        findings.warn("RST-T094", at("reference_sync_steps"), "has no effect", why, fix)
    elif settings.reference_sync_steps and "reference" not in parts and settings.learner.adapter is not None:
        why = "the reference is the policy without its adapter, which stays as it is"
        fix = either(placing.fix("reference"), "remove it")
        findings.error("RST-T110", at("reference_sync_steps"), "needs a reference of its own", why, fix)
    elif settings.moves_reference and "actor" in parts and "reference" in parts:
        _check_moved(parts["actor"].model, parts["reference"].model, at, findings)
    check_teachers(settings, parts, placing, at, findings)
    _check_scorers(settings, parts, placing.notation, at, findings)


def _check_moved(policy: ModelUse, reference: ModelUse, at: At, findings: Findings) -> None:
    """Check that the policy's weights fit into the reference, if the config.json of both is on this machine."""
    try:
        shapes = [shape_from_config(model.config or {}) for model in (policy, reference)]
    except UnknownShape:
        return
    if shapes[0] != shapes[1]:
        findings.error(
            "RST-T110",
            at("reference_sync_steps"),
            "needs a reference of the policy's shape",
            f"the policy is {policy.path}, the reference {reference.path}",
            "give both the same model, or remove it",
        )


def check_teachers(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], placing: Placing, at: At, findings: Findings
) -> None:
    """Check that every teacher is placed and has a model, and that advantages by teacher have a teacher."""
    teachers = settings.teachers
    for teacher in teachers:
        component = parts.get(teacher.name)
        if component is None:
            what = f"needs {teacher.name}, which is not placed"
            learnt = "is learnt" if settings.objective is Objective.SFT else "the policy generates"
            fix = placing.fix(teacher.name) or "write one teacher without a name: {model: MODEL, coef: 1}"
            findings.error("RST-T072", at("teacher"), what, f"it scores what {learnt}", fix)
        elif component.model.path is None:
            what, fix = f"{teacher.name} has no model", "write model: the folder or hub name of the teacher"
            findings.error("RST-T073", at("teacher"), what, fix=fix)
    if settings.advantage.advantage_estimator is AdvantageEstimator.TEACHER and not any(each.coef for each in teachers):
        findings.error(
            "RST-T074",
            at("advantage_estimator"),
            "is teacher, but there is none" if not teachers else "is teacher, but its coef is 0",
            "no token would have an advantage",
            "write teacher: {model: MODEL, coef: 1}, or another advantage_estimator",
        )


def _check_scorers(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], notation: Notation, at: At, findings: Findings
) -> None:
    """Warn about placed models that the settings do not use."""
    estimator, scores = settings.advantage.advantage_estimator, settings.learner.loss.scores_policy
    idle = {
        "critic": ("advantage_estimator", f"it is {estimator.value}", "gae", estimator is not AdvantageEstimator.GAE),
        "reference": ("kl_coef", "kl_coef is 0", "0.001", not settings.uses_reference),
        "inference": ("old_logprobs", "old_logprobs is rollout", "recompute", not scores),
    }
    taught = {teacher.name for teacher in settings.teachers}
    idle |= {
        name: ("teacher", "there is no teacher in train", "{coef: 1}", name not in taught)
        for name in parts
        if is_teacher(name)
    }
    for name, (key, why, instead, is_idle) in idle.items():
        if is_idle and name in parts:
            place = at(key)
            is_own = key in SETTINGS and place.path in SETTINGS[key].native(notation)
            where = at(name) if place.line is None and place.file != COMMAND_LINE else place
            fix = f"write {place.key_path if is_own else f'train.{key}'}: {instead}"
            written = [place, at("kl_penalty_coef")] if name == "reference" else [place]
            off = next((note for note in findings.notes if note.code == "RST-T094" and note.where in written), None)
            if off is not None:  # the key is written, and another one is missing
                where, why, fix = off.where, off.why, off.fix.removesuffix(", or remove it")
            what = f"{name} is placed, but has nothing to do"
            findings.warn("RST-P025", where, what, why, f"{fix}, or remove {name}")
