"""A plan and findings on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roost.cluster.inventory import Inventory
from roost.config.findings import Finding, Severity, Where, counted
from roost.config.job import Notation, Origin, ResolvedSetting, Role
from roost.config.known_keys.tables import Effect, KeyUse
from roost.config.notations.algorithm import ESTIMATOR, WHITEN, estimator_of_train, with_shared_estimator
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.explain import shown_mesh, shown_sizes
from roost.placement.memory.model import known_shape
from roost.placement.memory.traffic import Traffic, micro_batch_tokens, micro_batch_traffic
from roost.placement.plan import Plan
from roost.view.grid_model import FoldedRow, fold

MAX_ROWS = 40  # most rows of one component
ASSUMED = {"expert": "expert (even routing)"}  # dimensions whose bytes depend on the data


def print_plan(plan: Plan, console: Console, components: Sequence[str] = ()) -> None:
    """Print the plan as tables: nodes, components, and processes with equal rows folded."""
    shown = [part for part in plan.components if not components or part.name in components]
    header = Text.assemble((plan.file or "plan", "bold"), f": {plan.notation.value} notation, ")
    console.print(header.append(plan.mode.value, "bold"), soft_wrap=True)
    console.print(Text(machines_line(plan.inventory)))
    console.print()
    console.print(_component_table(shown))
    console.print()
    console.print(_process_table(shown))
    meshes = [f"{part.name} {mesh}" for part in shown if (mesh := shown_mesh(part))]
    if meshes:
        console.print()
        console.print(Text(f"mesh  {', '.join(meshes)}"))
    split = [part for part in shown if part.role in (Role.LEARNER, Role.SCORER) and part.sharded_mesh is None]
    sizes = [f"{part.name} {text}" for part in split if (text := shown_sizes(part))]
    if sizes:
        console.print()
        console.print(Text(f"sizes  {'; '.join(sizes)}"))
    recomputed = [text for part in shown if (text := _recomputed(part))]
    if recomputed:
        console.print()
        console.print(Text(f"activations  {', '.join(recomputed)}"))
    traffic = [text for part in shown if (text := _traffic(part))]
    if traffic:
        console.print()
        console.print(Text(f"traffic  {', '.join(traffic)}"), soft_wrap=True)
    settings = {key: value for key, value in plan.settings.items() if value is not None}
    trained = {setting.name: setting.value for setting in plan.training}
    if WHITEN in settings and WHITEN in trained:
        settings[WHITEN] = trained[WHITEN]  # the plan has only whether, the run also how
    if ESTIMATOR in settings:
        if not plan.training and not plan.notation.is_trained:
            settings = with_shared_estimator(settings)
        settings[ESTIMATOR] = trained.get(ESTIMATOR) or estimator_of_train(settings[ESTIMATOR])
    if settings:
        console.print()
        console.print(Text("settings  " + ", ".join(f"{key}={value}" for key, value in settings.items())))


def _recomputed(part: ComponentPlan) -> str:
    """Layers whose activations a learner recomputes, where the plan chose them; else empty."""
    layers, shape = part.model.recomputed_layers, known_shape(part)
    if layers is None or shape is None:
        return ""
    return f"{part.name} recomputes those of {layers} of {shape.layers} layers"


def _traffic(part: ComponentPlan) -> str:
    """Bytes that each rank of a learner sends, as text; empty if there are none or they are not known."""
    traffic = micro_batch_traffic(part)
    if traffic is None or not traffic.total:
        return ""
    dimensions = " + ".join(f"{sent / 1e9:.3g} {name}" for name, sent in sent_by_dimension(traffic))
    return f"{part.name} sends {dimensions} GB from each rank per micro-batch of {micro_batch_tokens(part):,} tokens"


def sent_by_dimension(traffic: Traffic) -> list[tuple[str, float]]:
    """Bytes of each dimension that sends any; its name includes what the prediction assumes.

    >>> sent_by_dimension(Traffic(replicate=0.0, fsdp=2e9, context=0.0, tensor=0.0, expert=1e9))
    [('fsdp', 2000000000.0), ('expert (even routing)', 1000000000.0)]
    """
    return [(ASSUMED.get(name, name), sent) for name, sent in asdict(traffic).items() if sent]


def machines_line(inventory: Inventory) -> str:
    """The machines in one line: how many nodes, accelerators and declared devices.

    >>> machines_line(Inventory.from_dict({"nodes": [{"count": 2, "accelerators": 8}, {"hardware": {"Franka": 1}}]}))
    '3 nodes, 16 accelerators, 1 Franka'
    """
    declared: dict[str, int] = {}
    for node in inventory.nodes:
        for kind, items in node.hardware.items():
            declared[kind] = declared.get(kind, 0) + len(items)
    parts = [counted(inventory.num_nodes, "node"), counted(inventory.num_accelerators, "accelerator")]
    return ", ".join([*parts, *(f"{number} {kind}" for kind, number in declared.items())])


def _component_table(components: Sequence[ComponentPlan]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name, justify in (
        ("component", "left"),
        ("processes", "right"),
        ("group", "left"),
        ("ranks", "left"),
        ("strategy", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for part in components:
        name = part.name if part.name == part.written_name else f"{part.name} ({part.written_name})"
        ranks = spell_ranks(part.hardware_ranks.tolist(), limit=6) or "-"
        strategy = part.strategy.removesuffix("PlacementStrategy").lower()
        if part.managed_by:
            strategy += f", managed by {part.managed_by} 0"
        table.add_row(Text(name), f"{part.world_size:,}", Text(",".join(part.node_groups)), ranks, Text(strategy))
    return table


def _process_table(components: Sequence[ComponentPlan]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name, justify in (
        ("processes", "left"),
        ("nodes", "left"),
        ("per node", "right"),
        ("devices", "left"),
        ("software", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for part in components:
        rows = fold(part.table)
        for row in rows[:MAX_ROWS]:
            table.add_row(
                Text(f"{part.name} {row.ranks}"),
                row.node_ranks,
                row.per_node,
                _devices(part, row),
                _software(part, row),
            )
        if len(rows) > MAX_ROWS:
            table.add_row(Text(f"{part.name} ..."), f"{len(rows) - MAX_ROWS:,} more rows; see --json", "", "", "")
    return table


def _devices(part: ComponentPlan, row: FoldedRow) -> Text:
    kind = dict(zip(part.table.labels, part.table.kinds, strict=True))[row.group]
    prefix = "" if kind in ("accelerator", "node") else f"{kind} "
    return Text(prefix + row.devices)


def _software(part: ComponentPlan, row: FoldedRow) -> Text:
    """Interpreter and variables of the row's first node; the visible-devices variable follows from the devices."""
    software = part.table.inventory.group(row.group).software_of(row.nodes[0])
    words = [f"{key}={value}" for key, value in (*software.env_vars, *part.env)]
    if software.python_interpreter_path:
        words.insert(0, software.python_interpreter_path)
    return Text(" ".join(words))


COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Print findings with position, reason and fix. Notes come last; those with the same hint share one line of it."""
    found = list(findings)
    hints = list(dict.fromkeys(each.fix for each in found if each.severity is Severity.NOTE))
    ordered = sorted(found, key=lambda each: 1 + hints.index(each.fix) if each.severity is Severity.NOTE else 0)
    for finding, following in zip_longest(ordered, ordered[1:]):
        line = Text.assemble((finding.heading, f"bold {COLOURS[finding.severity]}"), ": ")
        if str(finding.where):
            line.append(f"{finding.where}: ", style="cyan")
        line.append(finding.what)
        console.print(line, soft_wrap=True)
        if finding.why:
            console.print(Text.assemble(("  why  ", "dim"), finding.why), soft_wrap=True)
        is_note = finding.severity is Severity.NOTE
        is_shared = is_note and following is not None and following.fix == finding.fix
        if finding.fix and not is_shared:
            console.print(Text.assemble(("  see  " if is_note else "  fix  ", "dim"), finding.fix), soft_wrap=True)


def print_settings(settings: Iterable[ResolvedSetting], notation: Notation, file: str | None, console: Console) -> None:
    """Print all settings as a table: name, value, origin; keys of the config's own `file` by line only."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for setting in settings:
        keys = "\n".join(_short(key, file) for key in setting.keys)
        words = (setting.name, spell_value(setting.value), keys or spell_origin(setting, notation))
        table.add_row(*(Text(word) for word in words))
    console.print(table)


def print_keys(keys: Iterable[KeyUse], file: str | None, console: Console) -> None:
    """Print keys of a config with their use and replacement: as a table, or as lists if keys are too long for it."""
    rows = [_key_row(use, file) for use in keys]
    if max((len(row[0]) for row in rows), default=0) * 2 > console.width:
        for key, *texts in rows:
            console.print(Text(key), soft_wrap=True)
            for text in filter(None, texts):
                console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("key", no_wrap=True)
    names = ("use", "instead") if any(row[2] for row in rows) else ("use",)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row[: 1 + len(names)]))
    console.print(table)


def _key_row(use: KeyUse, file: str | None) -> tuple[str, str, str]:
    followed = use.known.effect is Effect.FOLLOWED
    reason = f"by training alone, as {use.known.reason}" if followed else use.known.reason
    return _short(use.where, file), f"{use.known.effect.value}: {reason}", use.hint or use.known.instead


def _short(key: Where, file: str | None) -> str:
    line = f"line {key.line}" if key.file == file and key.line is not None else str(replace(key, path=()))
    return f"{key.key_path}, {line}" if line else key.key_path


def explain_setting(setting: ResolvedSetting, notation: Notation) -> list[str]:
    """Sentences about one setting: its value, what decides it, its meaning, and the keys that can set it."""
    # Imported here, because plans without training settings do not need them.
    from roost.config.notations.dialects import DERIVED_FROM
    from roost.config.train import SETTINGS

    declared = SETTINGS[setting.name]
    own = [".".join(path) for path in declared.native(notation)] + list(DERIVED_FROM[notation].get(setting.name, ()))
    keys = ", ".join(dict.fromkeys([f"train.{setting.name}", *own]))
    choices = [f"One of {', '.join(declared.choices)}."] if declared.choices else []
    return [
        f"{setting.name} is {spell_value(setting.value)}, from {spell_origin(setting, notation)}.",
        f"{declared.description.rstrip('.')}.",
        *choices,
        f"Keys that set it: {keys}.",
    ]


def spell_origin(setting: ResolvedSetting, notation: Notation) -> str:
    """The origin as text.

    >>> spell_origin(ResolvedSetting("top_p", 0.7, Origin.NOTATION), Notation.ROLL)
    "ROLL's default"
    """
    if setting.origin is Origin.NOTATION:
        return f"{notation.program}'s default"
    if setting.origin is Origin.ROOST:
        return "Roost's default"
    return ", ".join(str(key) for key in setting.keys)


def spell_value(value: Any) -> str:
    """Format a value as one line of YAML.

    >>> spell_value(None), spell_value(True), spell_value("grpo"), spell_value({"a": 1})
    ('null', 'true', 'grpo', '{"a": 1}')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)
