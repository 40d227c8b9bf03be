"""A plan and findings on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roost.cluster.inventory import Inventory
from roost.config.findings import Finding, Severity
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan
from roost.view.grid_model import FoldedRow, fold

MAX_ROWS = 40  # rows of one component; a layout that cannot be folded is cut there


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
    settings = {key: value for key, value in plan.settings.items() if value is not None}
    if settings:
        console.print()
        console.print(Text("settings  " + ", ".join(f"{key}={value}" for key, value in settings.items())))


def machines_line(inventory: Inventory) -> str:
    """The machines in one line: how many nodes, accelerators and declared devices.

    >>> machines_line(Inventory.from_dict({"nodes": [{"count": 2, "accelerators": 8}, {"hardware": {"Franka": 1}}]}))
    '3 nodes, 16 accelerators, 1 Franka'
    """
    declared: dict[str, int] = {}
    for node in inventory.nodes:
        for kind, items in node.hardware.items():
            declared[kind] = declared.get(kind, 0) + len(items)
    parts = [_count(inventory.num_nodes, "node"), _count(inventory.num_accelerators, "accelerator")]
    return ", ".join([*parts, *(f"{number} {kind}" for kind, number in declared.items())])


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


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
    """Print findings with position, reason and fix; notes come last, shared hints once."""
    hints: dict[str, None] = {}
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.NOTE):
        line = Text.assemble((finding.heading, f"bold {COLOURS[finding.severity]}"), ": ")
        if str(finding.where):
            line.append(f"{finding.where}: ", style="cyan")
        line.append(finding.what)
        console.print(line, soft_wrap=True)
        if finding.why:
            console.print(Text.assemble(("  why  ", "dim"), finding.why), soft_wrap=True)
        if finding.fix and finding.severity is Severity.NOTE:
            hints[finding.fix] = None
        elif finding.fix:
            console.print(Text.assemble(("  fix  ", "dim"), finding.fix), soft_wrap=True)
    for hint in hints:
        console.print(Text.assemble(("  see  ", "dim"), hint), soft_wrap=True)
