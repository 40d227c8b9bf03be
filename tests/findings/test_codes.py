"""Every finding has a code, every code has a meaning, and the meaning can be asked for."""

import ast
import functools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import roost
from roost.cli.main import build_app
from roost.config.finding_codes import AREAS, finding_kinds
from roost.config.findings import Findings, Where
from tests.grid import grid

ROOT = Path(roost.__file__).parent
CODE = re.compile(rf"RST-[{''.join(AREAS)}]\d{{3}}")
REPORTS = {"error", "warn", "note"}
# What carries the words of a finding to where it is reported.
CARRIERS = {"RankSyntaxError", "ExpressionError", "MemoryRefused", "Problem", "_refusal", "refuse"}
# Files without any of this are not parsed.
MAY_REPORT = re.compile(rf"\.({'|'.join(REPORTS)})\b|\b({'|'.join(CARRIERS)})\(")
# Objects and files with methods of these names that do not collect findings.
OTHERS = {"logger", "log", "warnings", "records", "self._watching", "self._live", "typer"}
OTHER_FILES = {"trainer/watching.py", "trainer/report/live_view.py"}
APP = build_app(["explain-finding"])
UNREACHABLE = {"RST-P004"}  # said only where Roost itself is wrong


@functools.cache
def texts():
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in sorted(ROOT.rglob("*.py"))}


@functools.cache
def used_codes():
    return {
        node.value
        for text in texts().values()
        if CODE.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    }


def reporting_calls(text):
    """Calls that report a finding, or make what carries its words."""
    if not MAY_REPORT.search(text):
        return
    nodes = list(ast.walk(ast.parse(text)))
    renamed = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp | ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name) and ast.unparse(node.value).endswith(("findings.error", "findings.warn"))
    }
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        match call.func:
            case ast.Attribute(value=owner, attr=name) if name in REPORTS and ast.unparse(owner) not in OTHERS:
                yield call
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in CARRIERS | renamed:
                yield call


def has_code(first):
    """Whether an argument is a code: written out, one of two, or handed on from elsewhere."""
    match first:
        case ast.Constant(value=str(value)):
            return CODE.fullmatch(value) is not None
        case ast.IfExp(body=one, orelse=other):
            return has_code(one) and has_code(other)
        case ast.Name(id="code") | ast.Attribute(attr="code"):
            return True
    return False


def test_every_report_begins_with_a_code():
    calls = [
        (f"roost/{file}:{call.lineno}", call)
        for file, text in texts().items()
        if file not in OTHER_FILES
        for call in reporting_calls(text)
    ]
    assert len(calls) > 300
    missing = [place for place, call in calls if not call.args or not has_code(call.args[0])]
    assert not missing, "give the code of the finding as the first argument; finding_codes.toml has them"


def test_codes_that_are_used_are_registered():
    assert sorted(used_codes() - finding_kinds().keys()) == [], "register them in roost/config/finding_codes.toml"


def test_codes_that_are_registered_are_used():
    assert sorted(finding_kinds().keys() - used_codes()) == [], "remove them from roost/config/finding_codes.toml"


def test_codes_are_well_formed_in_order_and_written_once():
    text = (ROOT / "config" / "finding_codes.toml").read_text(encoding="utf-8")
    written = re.findall(r"^\[(.*)\]$", text, re.MULTILINE)
    assert [code for code in written if not CODE.fullmatch(code)] == []
    assert written == sorted(set(written), key=lambda code: (list(AREAS).index(code[4]), code))


@grid("kind", [pytest.param(kind, id=kind.code) for kind in finding_kinds().values()])
def test_meaning_fits_a_reader(kind):
    assert kind.title and kind.title[-1] not in ".:"
    assert len(kind.title) <= 80
    assert kind.explanation.endswith(".")
    assert bool(kind.example) is (kind.code not in UNREACHABLE)
    assert kind.code in kind.example or kind.code in UNREACHABLE


def test_titles_are_unique():
    titles = [kind.title for kind in finding_kinds().values()]
    assert len(titles) == len(set(titles))


def test_message_begins_with_severity_and_code():
    findings = Findings()
    findings.warn("RST-P007", Where("job.yaml", 3, 5, ("actor",)), "rank 8 is out of range")
    assert str(findings.found[0]) == "warning RST-P007: job.yaml:3:5 actor: rank 8 is out of range"


@pytest.mark.parametrize("word", ["RST-P007", "rst-p007", "P007", " p007 "])
def test_command_explains_a_code(word):
    done = CliRunner().invoke(APP, ["explain-finding", word])
    kind = finding_kinds()["RST-P007"]
    assert done.exit_code == 0
    assert kind.title in done.output and kind.explanation in done.output
    assert "$ roost check job.yaml\nerror RST-P007: job.yaml:" in done.output


def test_command_lists_all_codes():
    done = CliRunner().invoke(APP, ["explain-finding"])
    assert [line.split("  ")[0] for line in done.output.splitlines()] == list(finding_kinds())


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        pytest.param("RST-P0007", "did you mean RST-P007?", id="misspelt"),
        pytest.param("nonsense", "roost explain-finding lists all codes", id="nothing near"),
    ],
)
def test_unknown_code_is_a_usage_error(word, hint):
    done = CliRunner().invoke(APP, ["explain-finding", word], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert hint in done.output


def test_planning_reads_no_explanations():
    """The registry is data for people; a plan must not wait for it."""
    importers = [
        file
        for file, text in texts().items()
        if "finding_codes" in text
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.module == "roost.config.finding_codes"
    ]
    assert importers == ["cli/explain_finding.py"]
