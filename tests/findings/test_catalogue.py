"""Every place in the code that reports a finding has an example, and docs/findings shows what it says."""

import ast
import inspect
import re
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

import roost
from roost.cluster.hardware.robot import Problem
from roost.config.findings import Findings
from roost.config.interpolation import ExpressionError
from roost.config.ranks import RankSyntaxError
from roost.config.source import Section
from roost.config.yaml_events import Refused, ValueBuilder
from roost.placement.memory.sharing import MemoryRefused
from roost.placement.strategies import refuse
from tests.findings.catalogue import SHIPPED, findings_pages, read_catalogue, run, shipped_examples, written_pages
from tests.grid import grid

ROOT = Path(roost.__file__).parent
EXAMPLES = [pytest.param(example, id=example.title) for chapter in read_catalogue() for example in chapter.examples]

# What reports a finding, and what carries the words of one to where it is reported.
REPORTS = ("error", "warn")
CARRIERS = (RankSyntaxError, ExpressionError, MemoryRefused, Refused, Problem)
NAMES = ("refuse", "_refusal", *(carrier.__name__ for carrier in CARRIERS))
# Files without any of this are not parsed.
MAY_REPORT = re.compile(rf"(?<!\blogger)(?<!\bwarnings)\.({'|'.join(REPORTS)})\b|\b({'|'.join(NAMES)})\(")
# These only hand on what their callers say, so the callers count.
ENDPOINT = ("rollout/agents/recording", "rollout/agents/endpoint/")
SERVERS = ("engines/", "net/", "torch_engine/", *ENDPOINT, "app_world/serving/", "runtime/up/")
FORWARDERS = (Section.error, refuse, ValueBuilder._refusal)

# Call sites that no config, command or public function reaches: where, what is said there, and why.
UNREACHABLE = (
    # Every entry of `hardware.configs` that is not a mapping is reported before its kind looks at it.
    ("cluster/hardware/robot.py", "is not a mapping of fields"),
    # Said only where a component is not placed and nobody has said why, which would be a mistake of Roost's own.
    ("placement/planner.py", "cannot be planned"),
)


class Site(NamedTuple):
    file: str
    function: str
    first: int
    last: int
    code: str

    @property
    def is_unreachable(self):
        return any(self.file == file and what in self.code for file, what in UNREACHABLE)

    def __str__(self):
        return f"roost/{self.file}:{self.first} in {self.function}"


@pytest.fixture(scope="module")
def sites():
    """Every call in roost/ that reports a finding, or makes what carries its words."""
    return [site for site in call_sites() if not any(site.first in lines for lines in forwarding_lines(site.file))]


def call_sites():
    for file in sorted(ROOT.rglob("*.py")):
        if file.relative_to(ROOT).as_posix().startswith(SERVERS):
            continue  # what a server refuses is an answer to a request, not a finding about a config
        text = file.read_text(encoding="utf-8")
        if not MAY_REPORT.search(text):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = {*NAMES, *_renamed_reports(nodes)}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if not _reports(call, names):
                continue
            around = [part for part in functions if part.lineno <= call.lineno <= part.end_lineno]
            function = max(around, key=lambda part: part.lineno).name if around else "the module"
            where = file.relative_to(ROOT).as_posix()
            yield Site(where, function, call.lineno, call.end_lineno, ast.unparse(call))


def _reports(call, names):
    match call.func:
        case ast.Attribute(value=ast.Name(id="warnings" | "logger")):
            return False
        case ast.Attribute(attr=name):
            return name in REPORTS or name in names
        case ast.Name(id=name):
            return name in names
    return False


def _renamed_reports(nodes):
    """Names that a report is called by: `report = findings.error if strict else findings.warn`."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            called = {id(part.func) for part in ast.walk(node.value) if isinstance(part, ast.Call)}
            attributes = [part for part in ast.walk(node.value) if isinstance(part, ast.Attribute)]
            if any(part.attr in REPORTS and id(part) not in called for part in attributes):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def forwarding_lines(file):
    for function in FORWARDERS:
        if Path(function.__code__.co_filename) == ROOT / file:
            lines, first = inspect.getsourcelines(function)
            yield range(first, first + len(lines))


@contextmanager
def traced():
    """The lines from which findings are reported while examples run."""
    lines = set()
    forwarding = {function.__code__ for function in FORWARDERS}

    def noting(original):
        def noted(*arguments, **named):
            frame = sys._getframe(1)
            while frame.f_code in forwarding:
                frame = frame.f_back
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return original(*arguments, **named)

        return noted

    with ExitStack() as stack:
        for owner, name in [*((Findings, name) for name in REPORTS), *((carrier, "__init__") for carrier in CARRIERS)]:
            stack.enter_context(patch.object(owner, name, noting(getattr(owner, name))))
        yield lines


class Runs(NamedTuple):
    found: dict
    crashed: dict
    lines: set


@pytest.fixture(scope="module")
def runs():
    """Findings of all examples; one that crashes fails its own test, not those of the others."""
    found, crashed = {}, {}
    with traced() as lines:
        for example in (case.values[0] for case in EXAMPLES):
            try:
                found[example.title] = run(example)
            except Exception as error:
                found[example.title], crashed[example.title] = (), error
    return Runs(found, crashed, lines)


@grid("example", EXAMPLES)
def test_example_gives_its_finding(example, runs):
    if example.title in runs.crashed:
        raise runs.crashed[example.title]
    found = runs.found[example.title]
    assert example.promised(found)
    assert example.several or len(found) == 1, "it gives other findings too; make it smaller, or write several: true"


def test_titles_are_unique_and_kebab_case():
    titles = [case.values[0].title for case in EXAMPLES]
    assert [title for title, count in Counter(titles).items() if count > 1] == []
    assert [title for title in titles if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", title)] == []


def test_every_finding_has_an_example(sites, runs):
    missed = [
        site
        for site in sites
        if not site.is_unreachable
        and not any((str(ROOT / site.file), line) in runs.lines for line in range(site.first, site.last + 1))
    ]
    assert not missed, "no example gives what is reported at\n  {}\nadd one to tests/findings/catalogue.yaml".format(
        "\n  ".join(map(str, missed))
    )


def test_unreachable_sites_exist(sites):
    assert sum(site.is_unreachable for site in sites) == len(UNREACHABLE)


@grid("example", EXAMPLES)
def test_finding_fits_a_reader(example, runs):
    unfit = re.compile(r"\b(None|True|False|Traceback)\b|<class |<[\w.]+ object|\bnp\.|\n")
    for finding in runs.found[example.title]:
        assert finding.fix, f"no fix: {finding.what}"
        for text in (finding.what, finding.why, finding.fix):
            assert not unfit.search(text), f"not in a reader's words: {text!r}"


def test_pages_are_what_the_code_says(runs):
    written, pages = written_pages(), findings_pages(runs.found)
    stale = sorted(name for name in written.keys() | pages.keys() if written.get(name) != pages.get(name))
    assert not stale, "run: python -m tests.findings.catalogue"


def test_shipped_examples_are_what_the_code_says(runs):
    written = SHIPPED.read_text(encoding="utf-8")
    assert written == shipped_examples(runs.found), "run: python -m tests.findings.catalogue"
