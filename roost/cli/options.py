"""The console, options shared by several commands, and planning with them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roost.config.findings import Findings
from roost.config.job import Layout, Notation
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.view.plain import PlainConsole

WITH_RAY = "pip install 'roost[ray]'"
WITH_TRAINING = "pip install 'roost[train]'"
# Modules that come with these extras; huggingface_hub comes with transformers.
EXTRAS = frozenset(
    [
        "aiohttp",
        "datasets",
        "fastapi",
        "fsspec",
        "huggingface_hub",
        "matplotlib",
        "openai",
        "peft",
        "prometheus_client",
        "psutil",
        "ray",
        "safetensors",
        "torch",
        "transformers",
        "uvicorn",
        "zmq",
    ]
)
GpusPerNode = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node", min=0, metavar="N", help="Accelerators on each node, where the config does not say."
    ),
]
InventoryFile = Annotated[
    Path | None,
    typer.Option(
        "--inventory", metavar="FILE", help="Machines to plan on (YAML or JSON), instead of those the config describes."
    ),
]
NotationChoice = Annotated[
    Notation | None,
    typer.Option("--notation", help="The notation of the config (default: recognised from its keys)."),
]
LayoutChoice = Annotated[
    Layout | None,
    typer.Option(
        "--layout",
        help="RLinf configs: place ranks as written, or split them by the models' parallel sizes. "
        "Default: as the config implies.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Treat a written worker size that contradicts the engine's parallel sizes as an error."
    ),
]
ConfigOrScript = Annotated[
    Path,
    typer.Argument(help="The config file (YAML or TOML), or the script that starts the job.", metavar="CONFIG"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Values to change, as Hydra takes them: key=value, +key=value, group@package=option. "
        "For a script: its arguments, as bash would give them.",
        metavar="OVERRIDES",
    ),
]
ConfigsAndOverrides = Annotated[
    list[str],
    typer.Argument(
        help="Config files (YAML or TOML) or scripts that start jobs of other frameworks, and values to change in all "
        "of them: key=value, +key=value, ~key.",
        metavar="CONFIG... [OVERRIDES]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan_with_options(
    config: Path,
    findings: Findings,
    inventory: Path | None,
    gpus_per_node: int | None,
    layout: Layout | None,
    overrides: list[str] | None = None,
    notation: Notation | None = None,
    strict: bool = False,
    trains: bool = False,
    despite: Collection[str] = (),
) -> Plan | None:
    """Plan with the options of a command; findings go to `findings`. Errors with codes in `despite` do not stop it."""
    return try_plan(
        config,
        findings,
        inventory,
        overrides=tuple(overrides or ()),
        notation=notation,
        layout=layout,
        accelerators_per_node=gpus_per_node,
        strict=strict,
        trains=trains,
        despite=despite,
    )


def split_overrides(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separate config files from overrides: an override has `=`, or begins with `~`, and is not an existing file.

    Flags of a script, and all words after the first of them, are overrides too.

    >>> split_overrides(["a.yaml", "b.yaml", "runner.max_steps=5", "~data"])
    ([PosixPath('a.yaml'), PosixPath('b.yaml')], ['runner.max_steps=5', '~data'])
    >>> split_overrides(["run.sh", "--colocate", "--rollout-num-gpus", "8"])
    ([PosixPath('run.sh')], ['--colocate', '--rollout-num-gpus', '8'])
    """
    first_flag = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    is_override = [
        at >= first_flag or (("=" in word or word.startswith("~")) and not Path(word).is_file())
        for at, word in enumerate(words)
    ]
    files = [Path(word) for word, other in zip(words, is_override, strict=True) if not other]
    return files, [word for word, other in zip(words, is_override, strict=True) if other]


def not_installed(error: ImportError, install: str) -> str:
    """Return a message for a missing module of the extras. Re-raise any other import error: it is a bug."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in EXTRAS:
        raise error
    return f"{error.name} is missing; install it with: {install}"


def exit_not_installed(error: ImportError, install: str) -> typer.Exit:
    """Print that a module of the extras is missing; return the exit to raise. Re-raise any other import error."""
    open_console(stderr=True).print(f"error: {not_installed(error, install)}", soft_wrap=True)
    return typer.Exit(1)


def import_from_here() -> None:
    """Make the current folder importable: configs may name classes in its files."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def write_file(file: Path, text: str, option: str) -> None:
    """Write a file; `option` is the one that names another, for the error."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(
            f"{file} cannot be written: {error.strerror}; name another file with {option}"
        ) from None


def open_console(stderr: bool = False) -> Console:
    """A console that prints text literally: no markup, no emoji, and without escape sequences.

    >>> open_console().print("pip install 'roost[train]'")
    pip install 'roost[train]'
    """
    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
