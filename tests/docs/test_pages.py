"""Generated pages are what the code says, and links between Markdown files lead somewhere."""

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest

import roost
from roost.cluster.inventory import Inventory
from roost.placement.memory.shape import shape_from_config
from tests.docs import api_page, cli_page, memory_page
from tests.grid import grid

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "scripts", "tests")
FILES = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PACKAGES = {file.parent.name for file in (ROOT / "roost").glob("*/__init__.py")}
PATHS = re.compile(rf"`(?:roost/)?((?:{'|'.join(sorted(PACKAGES))})/[\w/]+(?:\.\w+)?)")
MODULES = re.compile(r"\broost((?:\.[a-z_]\w*)+)")
NAMED = re.compile(r"\bdocs/[\w/-]+\.(?:md|svg|png)\b")


def test_command_line_page_is_what_the_code_says():
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.cli_page(), "run: python -m tests.docs.cli_page"


def test_python_page_is_what_the_code_says():
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.api_page(), "run: python -m tests.docs.api_page"


@functools.cache
def anchors(file):
    """The anchors of a page's headings, as GitHub makes them and mkdocs.yml is set to."""
    text = FENCED.sub("", file.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@grid("file", [pytest.param(file, id=str(file.relative_to(ROOT))) for file in sorted(FILES)])
def test_links_lead_somewhere(file):
    dead = []
    for target in LINK.findall(CODE.sub("", file.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = (file.parent / path).resolve() if path else file
        if not other.exists() or (anchor and anchor not in anchors(other)):
            dead.append(target)
    assert not dead


def test_pages_that_the_code_names_exist():
    """Messages, docstrings and comments name pages by their path in the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name.endswith((".py", ".yaml", ".toml", "Makefile"))]
    files = [ROOT / name for name in names if (ROOT / name).exists()]
    named = {(found, file) for file in files for found in NAMED.findall(file.read_text(encoding="utf-8"))}
    assert [(page, str(file)) for page, file in sorted(named) if not (ROOT / page).exists()] == []


@grid("file", [pytest.param(file, id=str(file.relative_to(ROOT))) for file in sorted(FILES)])
def test_code_that_pages_name_exists(file):
    """Files of the package by their path, and modules by their dotted name, as in `_target_`."""
    text = file.read_text(encoding="utf-8")
    gone = [path for path in PATHS.findall(text) if not (ROOT / "roost" / path).exists()]
    for dotted in MODULES.findall(text):
        first, *rest = dotted.strip(".").split(".")
        if first in PACKAGES and rest:
            folder = ROOT / "roost" / first
            gone += [f"roost{dotted}"] if not _leads_to_code(folder, rest) else []
    assert not gone


def _leads_to_code(folder, names):
    """Whether names lead to a module below a package, and to whatever it defines."""
    for name in names:
        if (folder / f"{name}.py").exists():
            return True
        if not (folder / name).is_dir():
            return re.search(rf"\b{name}\b", (folder / "__init__.py").read_text(encoding="utf-8")) is not None
        folder /= name
    return True


def _tasks():
    """Entries of CONTRIBUTING.md about a task: its name, and what is in backticks in a bullet or row about it."""
    part = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where to change what")[2]
    *sections, last = part.partition("\n## ")[0].split("\n### ")[1:]
    found = []
    for section in sections:
        task, _, text = section.partition("\n")
        found += [(task, re.findall(r"`([^`]+)`", bullet)) for bullet in re.split(r"\n(?=- |\n)", text)]
    rows = [line for line in last.splitlines() if line.startswith("| ")][1:]
    found += [(row.split("|")[1].strip(), re.findall(r"`([^`]+)`", row)) for row in rows]
    return [(task, named) for task, named in found if any("/" in name for name in named)]


@grid(("task", "named"), [pytest.param(*entry, id=f"{entry[0]}: {entry[1][0]}") for entry in _tasks()])
def test_where_to_change_what(task, named):
    """Every path exists, and every other name occurs in a file of its bullet or row."""
    paths = [ROOT / name for name in named if "/" in name]
    assert [str(path) for path in paths if not path.exists()] == []
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    names = [name.partition("=")[0] for name in named if "/" not in name and not name.startswith(("make ", "_target_"))]
    assert [name for name in names if not any(name in text for text in texts)] == []


def test_tasks_of_contributors():
    """Each says which tests to change."""
    tasks = {}
    for task, named in _tasks():
        tasks.setdefault(task, []).extend(named)
    told = " ".join(tasks)
    for task in ("loss", "engine", "vendor", "finding", "reward", "key of a notation", "route", "devices", "metric"):
        assert task in told.lower()
    assert "launcher" in told
    assert [task for task, named in tasks.items() if not any(name.startswith("tests/") for name in named)] == []


def test_the_memory_page_is_what_plans_say():
    assert memory_page.PAGE.read_text(encoding="utf-8") == memory_page.page(), "run: python -m tests.docs.memory_page"


@pytest.mark.parametrize("training", ["", "train: {task: {_target_: my_tasks.Sums}, engine: vllm}"])
def test_the_job_of_larger_models_fits(tmp_path, monkeypatch, training):
    """The config as printed, on nodes of 8 GPUs of 80 GB; and as a training job."""
    text = (ROOT / "docs/guides/larger-models.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    folder = tmp_path / "Qwen/Qwen3-32B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(memory_page.MODELS["Qwen3-32B"]))
    file = tmp_path / "job.yaml"
    file.write_text(text + training)
    monkeypatch.chdir(tmp_path)
    machines = Inventory.from_dict({"nodes": [{"count": 4, "accelerators": 8, "memory_gb": 80}]})
    plan = roost.plan(file, inventory=machines)
    assert [part.is_float32 for part in plan.components] == [False, False]


def test_models_of_the_memory_page_have_their_published_parameters():
    billions = {name: shape_from_config(config).parameters / 1e9 for name, config in memory_page.MODELS.items()}
    published = {"Qwen2.5-7B": 7.61, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5}
    assert billions == pytest.approx(published, rel=0.003)
