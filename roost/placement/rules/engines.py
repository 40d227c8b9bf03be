"""Rules about engines and model files: mistakes that would otherwise show up when an engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.config.engine_options import FORMS, is_count
from roost.config.findings import Findings, Where, did_you_mean, shown, spell_path
from roost.config.job import (
    COMMAND_LINE,
    Component,
    ModelLocation,
    is_in_hub_cache,
    model_location,
    read_model_config,
    resolve_model,
)
from roost.config.train import AdvantageEstimator, Objective, TrainSettings
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.shape import model_positions
from roost.placement.rules.placing import At, spelled

ROLLOUT = "rollout"
_MODEL_KEYS = ("model_path", "model_name_or_path")
# Options of engines that users may set; the plan or other settings decide the rest.
OPTIONS = (
    "served_name",
    "max_context",
    "memory_fraction",
    "weight_transfer",
    "host",
    "api_key",
    "python",
    "env",
    "args",
)
# Variables with which servers accept a longer context than the model was trained for.
LONGER_CONTEXT = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")


def check_engines(
    settings: TrainSettings, components: Sequence[ComponentPlan], at: At, findings: Findings, trains: bool = False
) -> None:
    """Check the engine, its options and the models against the plan.

    `trains`: also report models that would have to come from the hub.
    """
    rollout = next((part for part in components if part.name == ROLLOUT), None)
    if rollout is not None and settings.engine == "torch" and rollout.parallel.model > 1:
        findings.error(
            "RST-E001",
            at("engine"),
            "is torch, which runs on one device, but rollout is split over several",
            f"{rollout.parallel.model} devices for each engine",
            f"write {spelled(at('engine'), 'engine', 'vllm')} or sglang, or give each engine one device",
        )
    _check_options(settings.engine_options, at("engine_options"), findings)
    own = rollout.model.path if rollout is not None else None
    model = own or settings.learner.model
    _check_context(settings, model, at("engine_options"), findings)
    _check_room(settings, model, at, findings)
    for where, model in models_of(settings, components, at):
        _check_model(model, where, findings)
        if trains and model_location(model) is ModelLocation.HUB and not is_in_hub_cache(model):
            _report_not_here(model, where, findings)


def models_of(
    settings: TrainSettings, components: Sequence[Component] | Sequence[ComponentPlan], at: At
) -> list[tuple[Where, str]]:
    """Every model that a run loads, once, with the position of the key that names it."""
    found = {settings.learner.model: at("model")}
    loaded = {
        ROLLOUT: True,
        "critic": settings.advantage.advantage_estimator is AdvantageEstimator.GAE,
        "reference": settings.uses_reference,
        **{teacher.name: True for teacher in settings.teachers},
    }
    for part in components:
        if part.model.path is not None and loaded.get(part.name):
            found.setdefault(part.model.path, _model_place(at(part.name), part.written_name))
    return [(where, model) for model, where in found.items()]


def _model_place(place: Where, section: str) -> Where:
    """The key in a component's section that names its model; the component's own place if none does.

    >>> at = {("cluster",): ("job.yaml", 3, 1), ("rollout", "model", "model_path"): ("job.yaml", 9, 5)}
    >>> print(_model_place(Where("job.yaml", 3, 1, ("cluster",), at), "rollout"))
    job.yaml:9:5 rollout.model.model_path
    """
    found = [
        path
        for path in place.positions
        if path
        and (path[-1] in _MODEL_KEYS or path[-2:] == ("model", "path"))
        and spell_path(path).startswith(f"{section}.")
    ]
    if not found:
        return place
    path = min(found, key=len)
    return Where(*place.positions[path], path, place.positions)


def _check_options(options: Mapping[str, Any], where: Where, findings: Findings) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            findings.error(
                "RST-E006",
                where.under(name),
                "is not an option of engines",
                did_you_mean(name, OPTIONS),
                f"options: {', '.join(OPTIONS)}",
            )
            continue
        is_right, form = FORMS[name]
        if value is not None and not is_right(value):
            findings.error("RST-E007", where.under(name), f"is {shown(value)}; it must be {form}", fix=f"write {form}")


def _check_context(settings: TrainSettings, model: str, options: Where, findings: Findings) -> None:
    """Report a context longer than the model's positions, unless the model is not here or scales its positions."""
    context, env = settings.engine_options.get("max_context"), settings.engine_options.get("env")
    positions, scales = model_positions(read_model_config(model))
    if not isinstance(context, int) or positions is None or context <= positions:
        return
    is_allowed = isinstance(env, Mapping) and any(name in env for name in LONGER_CONTEXT)
    if settings.engine == "torch" or not (scales or is_allowed):
        findings.error(
            "RST-E002",
            options.under("max_context"),
            f"is {context}, but the model has {positions} positions",
            f"max_position_embeddings in the config.json of {shown(model)}",
            f"write max_context: {positions} or less",
        )


def _check_room(settings: TrainSettings, model: str, at: At, findings: Findings) -> None:
    """Warn if the context, or the model's positions, have no room for a prompt and the longest completion."""
    options, longest = at("engine_options"), settings.sampling.max_new_tokens
    context = settings.engine_options.get("max_context")
    if not is_count(context) and settings.objective is not Objective.SFT:
        positions, scales = model_positions(read_model_config(model))
        if positions is not None and positions <= longest and (settings.engine == "torch" or not scales):
            findings.warn(
                "RST-E012",
                at("max_new_tokens"),
                f"is {longest}, but the model has {positions} positions",
                "they hold the prompt and the completion, so that no completion can have that many tokens",
                f"write max_new_tokens less than {positions}",
            )
    if not is_count(context) or context > longest:
        return
    prompt = settings.data.get("max_prompt_tokens")
    raised = (
        f"max_context: {longest + prompt}" if is_count(prompt) else "a max_context that holds the longest prompt too"
    )
    findings.warn(
        "RST-E012",
        options.under("max_context"),
        f"is {context}, but max_new_tokens is {longest}",
        "it counts the prompt and the completion, so that no completion can have that many tokens",
        f"write {raised}, or lower max_new_tokens",
    )


def _check_model(model: str, where: Where, findings: Findings) -> None:
    """Warn about a path that does not exist here: the machines of the job may have it. Hub names are not checked."""
    place = model_location(model)
    if place is ModelLocation.MISSING:
        findings.warn(
            "RST-E003",
            where,
            f"{shown(model)} does not exist on this machine",
            "it is a path, not a name on the Hugging Face hub",
            script_for_model(where, model)
            or "correct the path, or ignore this if the machines that run the job have it",
        )
    elif place is ModelLocation.FOLDER and not (Path(resolve_model(model)) / "config.json").exists():
        findings.error("RST-E004", where, f"{shown(model)} has no config.json", fix="name a folder with a checkpoint")


def _report_not_here(model: str, where: Where, findings: Findings) -> None:
    """Report a model that only the hub can have: a warning if it looks like a path."""
    around, script = Path(model).parent, script_for_model(where, model)
    if script or around == Path() or around.is_dir():
        here = f"{shown(model)} does not exist on this machine"
        why = "without a folder it is taken for a name on the Hugging Face hub, and the hub's cache does not have it"
        fix = "correct the path, or leave it if the hub has a model of this name"
        findings.warn("RST-E003", where, here, why, script or fix)
    else:
        what = f"{shown(model)} is neither a folder here nor in the hub's cache"
        why = "it is taken for a name on the Hugging Face hub, and downloaded when the job starts"
        findings.note("RST-E009", where, what, why, "correct it if it is a path, or leave it if the hub has the model")


def script_for_model(where: Where, model: str) -> str:
    """A fix that names the script beside the config that makes the model, and `roost sft` if it makes the rest."""
    if not where.file or where.file == COMMAND_LINE:
        return ""
    script, warm_start = (Path(where.file).parent / name for name in ("make_model.py", "sft.yaml"))
    if not script.is_file():
        return ""
    is_policy = Path(model).name == "policy" and warm_start.is_file()
    return f"make it first: python {script}" + (f", then roost sft {warm_start}" if is_policy else "")
