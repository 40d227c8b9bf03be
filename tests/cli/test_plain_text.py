"""Text is printed as it is: brackets are no markup, and `python -m roost` is the command."""

import io
import os
import re
import subprocess
import sys

import pytest
from rich.table import Table
from rich.text import Text

import roost
from roost.config.findings import Finding, Severity, Where
from roost.view.plain import PlainConsole
from roost.view.text import print_findings
from tests.cli.terminal import cluster_yaml, run, write

# Run before the command: these packages cannot be imported, as in `pip install roost` without extras.
PLAIN_INSTALL = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "torch", "transformers", "aiohttp", "zmq", "psutil"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from roost.cli.main import run
run()
"""
JOB = """
cluster: {num_nodes: 1, num_gpus_per_node: 2, component_placement: {actor: 0, rollout: 1}}
train:
  task: {_target_: roost.rollout.arithmetic.Arithmetic}
  model: %s
"""


def process(*words):
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environ |= {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([sys.executable, *map(str, words)], env=environ, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("command", "extra"), [("train", "train"), ("inventory", "ray")])
def test_a_plain_install_names_the_extra(tmp_path, command, extra):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    job = write(tmp_path, JOB % tmp_path)
    code, printed = process("-c", PLAIN_INSTALL, command, job)
    assert code == 1
    assert f"pip install 'roost[{extra}]'" in printed and "Traceback" not in printed


@pytest.mark.parametrize("words", [("--help",), ("status",)], ids=" ".join)
def test_a_plain_install_has_all_commands(tmp_path, words):
    code, printed = process("-c", PLAIN_INSTALL, *words)
    assert code == 0, printed


@pytest.mark.parametrize("command", ["watch", "report", "eval"])
def test_a_folder_that_is_not_there_is_reported_before_slow_imports(tmp_path, command):
    code, printed = process("-c", PLAIN_INSTALL, command, tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in printed and "is missing; install" not in printed and "Traceback" not in printed


def test_the_package_is_the_command():
    assert process("-m", "roost", "--version") == (0, f"roost {roost.__version__}\n")


def test_brackets_and_colons_of_a_config_are_shown(tmp_path):
    placement = {"actor": "0-3", "reward.[bold]": "4-7"}
    file = write(tmp_path, cluster_yaml(1, **placement), "[red]:key:.yaml")
    for words in (("plan", file, "--grid"), ("explain", file, "reward.[bold]")):
        printed = run(*words, width=200)
        assert printed.exit_code == 0, printed.output
        assert "reward.[bold]" in printed.stdout
    assert "[red]:key:.yaml" in run("plan", file, width=200).stdout
    changed = write(tmp_path, cluster_yaml(1, **{**placement, "reward.[bold]": "4-6"}), "other.yaml")
    assert "reward.[bold]" in run("diff", file, changed, width=200).stdout


@pytest.mark.parametrize("command", ["plan", "check", "train"])
def test_findings_keep_their_brackets(tmp_path, command):
    file = write(tmp_path, "cluster: {num_nodes: 1, component_placement: {actor: '[bold]:key:'}}")
    assert "[bold]:key:" in run(command, file, width=300).output


HOSTILE = "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1m\r\x08done"


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "file"])
def test_what_others_wrote_has_no_effect_on_the_terminal(is_terminal):
    console = PlainConsole(file=io.StringIO(), force_terminal=is_terminal, width=80, markup=False)
    table = Table("bold header")
    table.add_row(HOSTILE)
    console.print(f"error: {HOSTILE}", soft_wrap=True)
    console.print(Text(HOSTILE, style="bold"))
    console.print(table)
    written = console.file.getvalue()
    assert written.count("done") == 3 and "title" not in written and "\r" not in written and "\x08" not in written
    styles = set(re.findall(r"\x1b\[[0-9;]*[A-Za-z]", written))
    assert styles <= ({"\x1b[1m", "\x1b[0m"} if is_terminal else set()), "the console's own, and no others"
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", written)


def test_an_uncaught_error_cannot_take_over_the_terminal(tmp_path):
    (tmp_path / "hostile.py").write_text(f"import sys\nclass Bad(Exception): pass\nraise Bad({HOSTILE!r})\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from roost.cli import main; " + (
        "main.build_app = lambda names: __import__('hostile'); main.run()"
    )
    status, written = process("-c", code)
    assert status == 1 and "Bad: red" in written and "\x1b" not in written.replace("'\\x1b", "")


def test_a_hint_stands_below_its_notes():
    notes = [
        Finding("RST-A001", Where(), what, fix=fix, severity=Severity.NOTE)
        for what, fix in [("one", "look here"), ("two", "look there"), ("three", "look here"), ("four", "")]
    ]
    error = Finding("RST-A002", Where(), "wrong", fix="write it well")
    printed = PlainConsole(file=io.StringIO(), width=80, color_system=None)
    print_findings([*notes, error], printed)
    assert [line.strip().rpartition(": ")[2] for line in printed.file.getvalue().splitlines()] == [
        "wrong", "fix  write it well", "one", "three", "see  look here", "two", "see  look there", "four",
    ]  # fmt: skip
