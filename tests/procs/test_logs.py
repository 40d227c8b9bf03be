"""Logs: all output of real processes in one file, and whole lines with the worker's name on the console."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import roost
from roost.procs import child
from roost.procs.child import LogCollector, LogTail, last_lines, log_name, read_from

NOISY = """
import os, subprocess, sys
from pathlib import Path
from roost.procs.child import redirect_output
print("before")
redirect_output(Path(sys.argv[1]))
print("printed")
print("complained", file=sys.stderr)
print("un\\udcffprintable")
os.write(1, b"from a library\\n")
subprocess.run([sys.executable, "-c", "import subprocess, sys; print('child', flush=True);"
    "subprocess.run(['sh', '-c', 'echo grandchild; echo grandchild complains >&2'])"])
sys.stdout.write("no newline")
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def run(script, *args):
    env = {**os.environ, "PYTHONPATH": str(Path(roost.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, "-c", script, *map(str, args)], env=env, capture_output=True, text=True)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        log.write(text)


def test_everything_a_process_and_its_children_say_is_in_its_log(tmp_path):
    path = tmp_path / "deep" / "er" / "rank_0.log"
    for _ in range(2):  # a worker that starts again goes on in its log
        done = run(NOISY, path)
        assert (done.stdout, done.stderr) == ("before\n", "")
    once = [
        "printed", "complained", "un?printable", "from a library", "child", "grandchild", "grandchild complains",
    ]  # fmt: skip
    assert path.read_text().split("\n") == [*once, "no newline" + once[0], *once[1:], "no newline"]


LAST = {
    "fewer than asked": (b"a\nb\n", 5, "a\nb"),
    "the last ones": (b"a\nb\nc", 2, "b\nc"),
    "empty": (b"", 3, ""),
    "not text": (b"\xff\xfe\nok\n", 2, "\ufffd\ufffd\nok"),
    "a long log": (b"x" * 200_000 + b"\nend\n", 1, "end"),
}


@pytest.mark.parametrize("text, count, expected", LAST.values(), ids=LAST)
def test_the_last_lines_of_a_log(tmp_path, text, count, expected):
    write(tmp_path, "a.log", text)
    assert last_lines(tmp_path / "a.log", count) == expected


def test_a_log_that_is_not_there_is_empty(tmp_path):
    assert last_lines(tmp_path / "none.log", 3) == ""
    assert read_from(tmp_path / "none.log", 0) == b""


def test_lines_are_shown_whole_with_the_name_of_who_said_them(tmp_path):
    console = io.StringIO()
    collector = LogCollector(tmp_path, None, console)
    write(tmp_path, log_name("actor", 0), b"one\ntw")
    write(tmp_path, log_name("reward.math", 12), b"three\n")
    collector.collect()
    assert console.getvalue() == "[actor:0] one\n[reward.math:12] three\n"
    collector.collect()
    write(tmp_path, log_name("actor", 0), b"o \xe2\x82")
    collector.collect()
    write(tmp_path, log_name("actor", 0), b"\xac\n")
    collector.collect()
    assert console.getvalue() == "[actor:0] one\n[reward.math:12] three\n[actor:0] two \u20ac\n"


def test_lines_stay_whole_where_more_is_written_than_is_read_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "MAX_READ", 64)
    console = io.StringIO()
    collector = LogCollector(tmp_path, None, console)
    lines = [f"line {number} " + "x" * (number % 30) for number in range(100)]
    write(tmp_path, log_name("actor", 0), "".join(f"{line}\n" for line in lines).encode())
    while collector.collect():
        pass
    assert console.getvalue().splitlines() == [f"[actor:0] {line}" for line in lines]


def test_a_line_without_end_does_not_hold_up_what_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "MAX_READ", 64)
    console = io.StringIO()
    collector = LogCollector(tmp_path, None, console)
    write(tmp_path, log_name("actor", 0), b"z" * 200 + b"\nnext\n")
    while collector.collect():
        pass
    assert console.getvalue().count("z") == 200
    assert console.getvalue().endswith("[actor:0] next\n")


def test_stopping_brings_all_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "MAX_READ", 64)
    monkeypatch.setattr(child, "LOOK_EVERY", 1000.0)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    text = "".join(f"line {number}\n" for number in range(50)).encode() + b"its last wor"
    write(there, log_name("actor", 1), text)
    write(here, log_name("actor", 0), text)
    console = io.StringIO()
    collector = LogCollector(here, fetch_from(there), console)
    collector.start()
    collector.stop()
    assert (here / log_name("actor", 1)).read_bytes() == text
    for rank in (0, 1):
        shown = [line for line in console.getvalue().splitlines() if line.startswith(f"[actor:{rank}]")]
        assert len(shown) == 51
        assert shown[-1] == f"[actor:{rank}] its last wor"


def test_without_other_machines_or_a_console_nothing_runs(tmp_path):
    collector = LogCollector(tmp_path / "none", None, None)
    collector.start()
    collector.stop()


def fetch_from(folder):
    def fetch(sizes):
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.log")]
        found = {name: read_from(folder / name, sizes.get(name, 0)) for name in names}
        return {name: text for name, text in found.items() if text}

    return fetch


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=40), max_size=12))
def test_another_machines_log_arrives_byte_for_byte(tmp_path_factory, pieces):
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    collector = LogCollector(here, fetch_from(there), None)
    for piece in pieces:
        write(there, log_name("actor", 0), piece)
        collector.collect()
    assert read_from(here / log_name("actor", 0), 0) == b"".join(pieces)


def test_lines_written_during_a_look_are_read_once(tmp_path, monkeypatch):
    log, looks = tmp_path / "actor" / "rank_0.log", Path.stat
    log.parent.mkdir()
    log.write_text("one\n")

    def writes(path, **options):
        found = looks(path, **options)
        if path == log:
            with log.open("a") as file:
                file.write("more\n")
        return found

    tail = LogTail(tmp_path, lambda name: True)
    monkeypatch.setattr(Path, "stat", writes)
    first = tail.last(50)
    monkeypatch.undo()
    with log.open("a") as file:
        file.write("last\n")
    assert [*first, *tail.new()] == [f"[actor:0] {line}" for line in log.read_text().splitlines()]
