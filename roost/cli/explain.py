"""`roost explain`: why a process is where it is, and which key decides a training setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from roost.cli.options import (
    ConfigOrScript,
    GpusPerNode,
    InventoryFile,
    LayoutChoice,
    NotationChoice,
    Overrides,
    open_console,
    plan_with_options,
)
from roost.config.compose import load
from roost.config.findings import Findings, Where, did_you_mean, shown
from roost.config.frameworks.keys import TRAINED
from roost.config.job import Notation, ResolvedSetting, family
from roost.config.known_keys.tables import Effect, KeyUse
from roost.config.notations.notation import read_job
from roost.config.source import Source, Unresolved
from roost.placement.explain import explain_component, explain_process
from roost.placement.plan import Plan
from roost.view.text import explain_setting, print_findings, print_keys, print_settings, spell_value


def explain_command(
    config: ConfigOrScript,
    process: Annotated[
        str,
        typer.Argument(
            help="A component, one of its processes (rollout:3), all training settings (train), one of them "
            "(train.learning_rate), a key of the config (a flag of a script without its dashes), all keys that are not "
            "used (keys), or those of a section (data, keys.reward).",
            metavar="COMPONENT[:RANK]|train[.SETTING]|KEY|keys[.SECTION]",
        ),
    ],
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
) -> None:
    """Say which rule put a component or a process where it is, or which key or default decides a training setting."""
    findings = Findings()
    is_setting = process.partition(".")[0] == "train"
    plan = plan_with_options(config, findings, inventory, gpus_per_node, layout, overrides, notation, trains=is_setting)
    console = open_console()
    if plan is not None and is_setting:
        _explain_training(plan.training, plan.notation, plan.file, process, findings, console)
    elif is_setting:
        # Settings can be read even if the job cannot be planned; errors are printed below.
        unread = Findings()  # already reported by `plan_with_options`
        source = load(config, overrides or [], unread)
        job = None if source is None else read_job(source, unread, notation, trains=True)
        if job is not None and job.resolved:
            _explain_training(job.resolved, job.notation, job.source.file, process, findings, console)
    elif plan is not None and (keys := _keys_of(plan, process)) is not None:
        if plan.notation in TRAINED and not plan.training:
            keys = _of_training(keys, load(config, overrides or [], Findings()), notation)
        if keys:
            print_keys(keys, plan.file, console)
        else:
            below = process.partition(".")[2]
            _print_all([f"No key below {below} is unused." if below else "Every key is used."], console)
    elif plan is not None:
        sentences = _explain_key(plan, process, load(config, overrides or [], Findings()), notation)
        _print_all(sentences or _explain(plan, process, findings), console)
    print_findings(findings.errors, open_console(stderr=True))
    if findings.errors:
        raise typer.Exit(1)


def _print_all(sentences: list[str], console: Console) -> None:
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def _keys_of(plan: Plan, wanted: str) -> list[KeyUse] | None:
    """The unused keys that `wanted` names: `keys`, `keys.SECTION` or SECTION; None if it names a component."""
    first, _, rest = wanted.partition(".")
    if wanted == "keys":
        return list(plan.keys)
    path = rest if first == "keys" else wanted
    is_component = any(path in (part.name, part.written_name, family(part.name)) for part in plan.components)
    found = [use for use in plan.keys if use.where.key_path == path or use.where.key_path.startswith(f"{path}.")]
    return found if first == "keys" or (found and not is_component) else None


def _explain_key(plan: Plan, wanted: str, source: Source | None, notation: Notation | None) -> list[str]:
    """Sentences about a key that is written; none if `wanted` names a component, a section or nothing."""
    if source is None or wanted.partition(":")[0] in {part.name for part in plan.components}:
        return []
    job = read_job(source, Findings(), notation, trains=bool(plan.training))
    if job is None:
        return []
    # With its dashes, a flag of a script would be an option of this command.
    key = f"--{wanted}" if f"--{wanted}" in source.values else wanted
    # A subtree with one reason is one entry.
    uses = [use for use in job.keys if f"{key}.".startswith(f"{use.where.key_path}.")]
    path = (key,) if key.startswith("-") and key in source.values else tuple(key.split("."))
    value = _written(source.values, path)
    if not uses or value is None or isinstance(value, Mapping):
        return []
    known = uses[-1].known
    is_followed = uses[-1].places or known.effect is Effect.PLACING
    effect = "The plan follows it" if is_followed else f"{known.effect.value.capitalize()}: {known.reason}"
    spelt = shown(value.text) if isinstance(value, Unresolved) else spell_value(value)
    return [f"{key} is {spelt}, from {replace(source.where(path), path=())}.", f"{effect}."]


def _written(values: Mapping[Any, Any], path: Sequence[str]) -> Any:
    """The value at a path; None if there is none."""
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _of_training(keys: list[KeyUse], source: Source | None, notation: Notation | None) -> list[KeyUse]:
    """The keys as training uses them, if the job can be trained; planning alone does not read them."""
    job = None if source is None else read_job(source, Findings(), notation, trains=True)
    if job is None or job.training is None:
        return keys
    uses = {use.where.path: use for use in job.keys if use.is_set}
    return [uses[key.where.path] for key in keys if key.where.path in uses]


def _explain_training(
    settings: Sequence[ResolvedSetting],
    notation: Notation,
    file: str | None,
    wanted: str,
    findings: Findings,
    console: Console,
) -> None:
    """Print all training settings, or one of them."""
    place = Where("command line", path=(wanted,))
    name = wanted.partition(".")[2]
    if not name:
        print_settings(settings, notation, file, console)
        return
    setting = next((setting for setting in settings if setting.name == name), None)
    if setting is None:
        names = [setting.name for setting in settings]
        hint = did_you_mean(name, names)
        findings.error(
            "RST-T002", place, f"there is no setting {name}", hint, "roost explain CONFIG train lists all of them"
        )
        return
    _print_all(explain_setting(setting, notation), console)


def _explain(plan: Plan, wanted: str, findings: Findings) -> list[str]:
    name, colon, rank = wanted.partition(":")
    names = [part.name for part in plan.components]
    place = Where("command line", path=(wanted,))
    called = [part for part in plan.components if part.name == name]
    called = called or [part for part in plan.components if name in (part.written_name, family(part.name))]
    if not colon and called:
        return [sentence for part in called for sentence in explain_component(plan, part)]
    if not called:
        hint = did_you_mean(name, names)
        findings.error("RST-P001", place, f"there is no component {name}", hint, f"components: {', '.join(names)}")
        return []
    part = called[0]
    if len(called) > 1:
        each = " or ".join(f"{part.name}:{rank}" for part in called)
        findings.error("RST-P001", place, f"{name} is {len(called)} components", fix=f"use {each}")
        return []
    if not rank.isdecimal() or int(rank) >= part.world_size:
        findings.error(
            "RST-P002",
            place,
            f"{part.name} has no process {shown(rank)}" if rank else f"give a rank after {part.name}:",
            fix=f"use a rank from 0 to {part.world_size - 1}",
        )
        return []
    return explain_process(plan, part, int(rank))
