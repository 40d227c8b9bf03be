"""YAML with positions, and hostile YAML."""

import math
import os
from pathlib import Path

import pytest

from roost.config.findings import Findings
from roost.config.source import MAX_FILE_BYTES, Section, Source, parse_yaml, read_yaml


def parsed(text):
    findings = Findings()
    source = parse_yaml(text, "job.yaml", findings)
    return source, findings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("1", 1, id="int"),
        pytest.param("010", 8, id="octal"),
        pytest.param("0x10", 16, id="hexadecimal"),
        pytest.param("1_000", 1000, id="underscores"),
        pytest.param("1:30", "1:30", id="no-base-60"),
        pytest.param("0:0", "0:0", id="no-base-60-zero"),
        pytest.param("0-3", "0-3", id="range"),
        pytest.param("1e-5", 1e-5, id="float-without-dot"),
        pytest.param("1.5", 1.5, id="float"),
        pytest.param(".inf", float("inf"), id="infinity"),
        pytest.param("yes", True, id="yes"),
        pytest.param("off", False, id="off"),
        pytest.param("~", None, id="null"),
        pytest.param("", None, id="nothing"),
        pytest.param("''", "", id="empty-text"),
        pytest.param("'1'", "1", id="quoted"),
        pytest.param("2020-01-01", "2020-01-01", id="no-dates"),
        pytest.param("!!str 5", "5", id="tagged"),
        pytest.param("|\n  a\n  b\n", "a\nb\n", id="block"),
    ],
)
def test_scalars(text, value):
    source, findings = parsed(f"key: {text}")
    assert source.values == {"key": value}
    assert not findings.found


def test_positions_point_at_keys_and_items():
    source, _ = parsed("a:\n  b: [1, {c: 2}]\n4090: x\n")
    assert str(source.where(("a", "b"))) == "job.yaml:2:3 a.b"
    assert str(source.where(("a", "b", 1, "c"))) == "job.yaml:2:11 a.b[1].c"
    assert str(source.where(("4090",))) == "job.yaml:3:1 4090"
    assert str(source.where(("a", "b", 7))) == "job.yaml:2:3 a.b[7]", "the nearest key that has a place"


def test_anchors_and_merge_keys():
    source, findings = parsed("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: {<<: [{z: 1}, {z: 2, w: 3}]}")
    assert source.values["b"] == {"x": 1, "y": 3}
    assert source.values["c"] == {"x": 1, "y": 2}
    assert source.values["d"] == {"z": 1, "w": 3}
    assert not findings.found


LAUGHS = "\n".join(
    f"x{level}: &x{level} [{','.join(['*x' + str(level - 1)] * 10 if level else ['1'])}]" for level in range(12)
)
HOSTILE = [
    pytest.param("a: [", "not valid YAML", id="open-bracket"),
    pytest.param("a: 'b", "not valid YAML", id="open-quote"),
    pytest.param("a: b: c", "not valid YAML", id="two-colons"),
    pytest.param("\ta: 1", "not valid YAML", id="tab"),
    pytest.param("a: \x00", "not valid YAML", id="control-character"),
    pytest.param("- 1", "not a mapping", id="list"),
    pytest.param("just text", "not a mapping", id="text"),
    pytest.param("a: 1\na: 2", "written twice", id="key-twice"),
    pytest.param("a: &a [*a]", "refers to nothing", id="recursive-alias"),
    pytest.param("a: *b", "refers to nothing", id="unknown-alias"),
    pytest.param(LAUGHS, "more than 100,000 values", id="alias-bomb"),
    pytest.param("[" * 200_000, "nested more than 64 deep", id="deep-lists"),
    pytest.param("{a: " * 100_000, "nested more than 64 deep", id="deep-mappings"),
    pytest.param("? [1]\n: 2", "a key must be a word", id="list-as-key"),
    pytest.param("--- {a: 1}\n--- {b: 1}", "more than one YAML document", id="two-documents"),
    pytest.param("a: !!python/object/apply:os.system [true]", "has the tag", id="python-object-in-list"),
    pytest.param("a: !!python/name:os.system x", "has the tag", id="python-object"),
    pytest.param("a: " + "9" * 5000, "not a value Roost can hold", id="number-of-5000-digits"),
    pytest.param("a: [" + "1," * 150_000 + "]", "more than 100,000 values", id="long-list"),
]


@pytest.mark.parametrize(("text", "what"), HOSTILE)
def test_hostile_yaml_is_a_finding(text, what):
    _, findings = parsed(text)
    assert any(part in findings.errors[0].what for part in what.split("|"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        pytest.param(b"\x80\x81", "is not UTF-8 text", id="binary"),
        pytest.param(b"a" * (MAX_FILE_BYTES + 1), "is larger than", id="large"),
    ],
)
def test_hostile_files(content, what, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    findings = Findings()
    assert read_yaml(file, findings) is None
    assert what in findings.errors[0].what


def test_missing_file_and_folder(tmp_path):
    findings = Findings()
    assert read_yaml(tmp_path / "nowhere.yaml", findings) is None
    assert read_yaml(tmp_path, findings) is None
    assert {finding.what for finding in findings.errors} == {
        "cannot be read: No such file or directory",
        "cannot be read: Is a directory",
    }


def test_byte_order_mark_is_skipped(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_yaml(file, Findings()).values == {"a": 1}


def test_a_pipe_without_a_writer_is_refused(tmp_path):
    os.mkfifo(tmp_path / "job.yaml")
    findings = Findings()
    assert read_yaml(tmp_path / "job.yaml", findings) is None
    assert [(one.code, one.what) for one in findings.errors] == [
        ("RST-C001", "cannot be read: It is not a file, but a pipe or a device")
    ]


def test_a_pipe_that_the_caller_opened_is_read():
    reader, writer = os.pipe()
    try:
        os.write(writer, b"a: 1\n")
        os.close(writer)
        assert read_yaml(Path(f"/dev/fd/{reader}"), Findings()).values == {"a": 1}
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        *(
            ("1e-6x", "write lr: 1e-6"),
            ("5e-7a", "write lr: 5e-7"),
            ("3e-6,", "write lr: 3e-6"),
            ("0.5", "write lr: 0.5"),
        ),
        *((each, "write a plain number, or leave it out") for each in ("10%", "5k", "0,1", "1.2.3", "1e", "small")),
    ],
)
def test_a_number_is_suggested_with_its_exponent(value, fix):
    findings = Findings()
    assert Section({"lr": value}, (), Source({"lr": value}), findings).number("lr") is None
    assert findings.errors[0].fix == fix


@pytest.mark.parametrize(("value", "meant"), [(2.0, 2), ("4", 4), (2.5, 1), (0.0, 1), (1e30, 1), (math.inf, 1)])
def test_a_whole_number_is_suggested_as_it_was_meant(value, meant):
    findings = Findings()
    assert Section({"size": value}, (), Source({"size": value}), findings).whole_number("size", 1) is None
    assert findings.errors[0].fix == f"write size: {meant}"
