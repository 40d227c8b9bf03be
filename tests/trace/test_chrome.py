"""The trace file: what its readers require of each event, lanes that nest, and a file that is whole or absent."""

import json
import math
from types import MappingProxyType

import pytest
from hypothesis import given, strategies as st

from roost.trace.chrome import device_uses, microseconds, write_trace
from roost.trace.spans import Span, WorkerSpans

EPOCH = 1_700_000_000_000_000_000
REQUIRED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}


def span(name, category, start, end, lane=0, **args):
    return Span(name, category, EPOCH + start, EPOCH + end, lane, args or None)


WORKERS = [
    WorkerSpans(
        "actor",
        0,
        0,
        ((0, 0), (0, 1)),
        (
            span("lock", "wait", 0, 1_000),
            span("forward", "work", 1_000, 2_001),
            span("train", "call", 0, 3_007, step=1),
        ),
    ),
    WorkerSpans(
        "rollout",
        1,
        1,
        ((1, 0),),
        (span("a", "call", 500, 2_500), span("b", "call", 700, 9_001, 1)),
        dropped=3,
    ),
    WorkerSpans("reward", 0, 1, (), (span("score", "call", 2_000, 2_500),)),
]
NODES = {0: "alpha", 1: "beta", 2: ""}


def read(path):
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def nanoseconds(value):
    """A time as a reader takes it that multiplies and cuts."""
    return int(value * 1000)


def check(events):
    """Rules of trace viewers: fields by phase, order in a lane, and spans of a lane that follow or nest."""
    named = {"process": {}, "thread": {}}
    placed = {"process": {}, "thread": {}}
    lanes = {}
    for event in events:
        for field, kind in REQUIRED[event["ph"]].items():
            assert type(event[field]) is kind, (event, field)
        assert event["pid"] > 0
        assert event["tid"] > 0
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            what, _, field = event["name"].partition("_")
            table = named[what] if field == "name" else placed[what]
            lane = event["pid"] if what == "process" else (event["pid"], event["tid"])
            assert lane not in table
            table[lane] = event["args"]["name" if field == "name" else "sort_index"]
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    assert named["process"].keys() == placed["process"].keys()
    assert named["thread"].keys() == placed["thread"].keys()
    assert len({*named["process"], *(tid for _, tid in named["thread"])}) == len(named["process"]) + len(
        named["thread"]
    )
    for lane, inside in lanes.items():
        assert lane in named["thread"]
        assert lane[0] in named["process"]
        open_ends, last = [], 0
        for event in inside:
            start = nanoseconds(event["ts"])
            end = start + nanoseconds(event["dur"])
            assert start >= last
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], event
            assert event["cat"] != "device" or not open_ends
            open_ends.append(end)
            last = start
    return named


def lanes_of(events):
    """Names of lanes with what is in them, in the order in which they are shown."""
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    hosts = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = {}
    for event in sorted(events, key=lambda event: order.get(event["tid"], 0)):
        if event["name"] == "thread_name":
            rows[hosts[event["pid"]], names[event["tid"]]] = []
        elif event["ph"] == "X":
            rows[hosts[event["pid"]], names[event["tid"]]].append((event["name"], event["ts"], event["dur"]))
    return rows


def test_each_node_has_its_devices_and_then_its_workers(tmp_path):
    write_trace(tmp_path / "trace.json", WORKERS, NODES)
    events = read(tmp_path / "trace.json")["traceEvents"]
    named = check(events)
    assert list(named["process"].values()) == ["node 0 (alpha)", "node 1 (beta)", "node 2"]
    rows = lanes_of(events)
    assert list(rows) == [
        ("node 0 (alpha)", "accelerator 0"),
        ("node 0 (alpha)", "accelerator 1"),
        ("node 0 (alpha)", "actor 0"),
        ("node 1 (beta)", "accelerator 0"),
        ("node 1 (beta)", "rollout 1"),
        ("node 1 (beta)", "rollout 1, lane 1"),
        ("node 1 (beta)", "reward 0"),
    ]
    assert rows["node 0 (alpha)", "accelerator 1"] == [("actor", 1.0, 2.007)]
    actor = [
        (name, nanoseconds(start), nanoseconds(length)) for name, start, length in rows["node 0 (alpha)", "actor 0"]
    ]
    assert actor == [("train", 0, 3_007), ("lock", 0, 1_000), ("forward", 1_000, 1_001)]


def test_waits_and_args_are_shown(tmp_path):
    write_trace(tmp_path / "trace.json", WORKERS, NODES)
    by_name = {event["name"]: event for event in read(tmp_path / "trace.json")["traceEvents"] if event["ph"] == "X"}
    assert by_name["train"]["args"] == {"step": 1}
    assert (by_name["lock"]["cat"], by_name["lock"]["cname"]) == ("wait", "grey")


def test_components_that_share_a_device_are_cut_where_they_overlap(tmp_path):
    workers = [
        WorkerSpans("actor", 0, 0, ((0, 0),), (span("train", "call", 0, 3_000),)),
        WorkerSpans("rollout", 0, 0, ((0, 0),), (span("generate", "call", 2_000, 5_000),)),
    ]
    write_trace(tmp_path / "trace.json", workers, NODES)
    events = read(tmp_path / "trace.json")["traceEvents"]
    check(events)
    assert lanes_of(events)["node 0 (alpha)", "accelerator 0"] == [
        ("actor", 0.0, 2.0),
        ("actor + rollout", 2.0, 1.0),
        ("rollout", 3.0, 2.0),
    ]


def test_the_use_of_devices_is_in_the_file_and_in_the_summary(tmp_path):
    summary = write_trace(tmp_path / "trace.json", WORKERS, NODES)
    about = read(summary.path)["otherData"]
    assert summary.devices == device_uses(WORKERS)
    assert about["utilization"][0] == {
        "node": 0,
        "device": 0,
        "busy_ns": 2_007,
        "idle_ns": 6_994,
        "wall_ns": 9_001,
        "by_component": {"actor": 2_007},
        "busy_share": 0.222975,
    }
    assert (about["start_ns"], about["wall_ns"], about["dropped_spans"]) == (EPOCH, 9_001, 3)
    assert (summary.window, summary.spans, summary.dropped) == ((EPOCH, EPOCH + 9_001), 6, 3)


def test_spans_are_cut_at_the_window(tmp_path):
    summary = write_trace(tmp_path / "trace.json", WORKERS[:1], NODES, (EPOCH + 500, EPOCH + 1_500))
    events = read(summary.path)["traceEvents"]
    check(events)
    rows = lanes_of(events)
    assert rows["node 0 (alpha)", "actor 0"] == [("train", 0.0, 1.0), ("lock", 0.0, 0.5), ("forward", 0.5, 0.5)]
    assert rows["node 0 (alpha)", "accelerator 0"] == [("actor", 0.5, 0.5)]


def test_of_spans_with_the_same_times_the_outer_one_comes_first(tmp_path):
    worker = WorkerSpans("actor", 0, 0, (), (span("inner", "work", 0, 10), span("outer", "call", 0, 10)))
    write_trace(tmp_path / "trace.json", [worker], {})
    assert [name for name, *_ in lanes_of(read(tmp_path / "trace.json")["traceEvents"])["node 0", "actor 0"]] == [
        "outer",
        "inner",
    ]


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("args", "written"),
    [
        pytest.param({"shape": (2, 3)}, {"shape": [2, 3]}, id="tuple"),
        pytest.param(MappingProxyType({"step": 1}), {"step": 1}, id="mapping"),
        pytest.param({"kind": int}, {"kind": "<class 'int'>"}, id="any object"),
        pytest.param({"loss": math.nan, "step": 1}, {"loss": "nan", "step": "1"}, id="not a number"),
        pytest.param({"loop": LOOP}, {"loop": "[[...]]"}, id="holds itself"),
        pytest.param({"by": {(0, 1): 2}}, {"by": "{(0, 1): 2}"}, id="keys that are no text"),
        pytest.param({"text": '"\ud800\n'}, {"text": '"\ud800\n'}, id="odd text"),
    ],
)
def test_whatever_is_attached_the_file_is_json(tmp_path, args, written):
    worker = WorkerSpans("actor", 0, 0, (), (Span("step", "call", 0, 1, 0, args),))
    write_trace(tmp_path / "trace.json", [worker], {})
    events = read(tmp_path / "trace.json")["traceEvents"]
    check(events)
    assert events[-1]["args"] == written


@pytest.mark.parametrize("workers", [[], [WorkerSpans("actor", 0, 0, ((0, 0),))]], ids=["no workers", "no spans"])
def test_an_empty_trace_is_a_trace(tmp_path, workers):
    summary = write_trace(tmp_path / "deep" / "trace.json", workers, NODES)
    check(read(summary.path)["traceEvents"])
    assert summary.spans == 0


class Unprintable:
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    worker = WorkerSpans("actor", 0, 0, (), (Span("step", "call", 0, 1, 0, {"value": Unprintable()}),))
    with pytest.raises(RuntimeError):
        write_trace(path, [worker], {})
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "old"


# Up to here, 50 days into a trace, numbers of microseconds are less than half a nanosecond apart.
LONGEST = 2**42 * 1000


@given(st.integers(0, LONGEST - 1))
def test_readers_that_cut_and_readers_that_round_see_the_same_nanosecond(value):
    written = json.loads(json.dumps(microseconds(value)))
    assert int(written * 1000) == value
    assert round(written * 1000) == value


@st.composite
def nested(draw, start, end, depth=3):
    """Spans of a lane between two times, each recorded after those inside it."""
    made = []
    while depth and start < end and draw(st.booleans()):
        first = draw(st.integers(start, end))
        last = draw(st.integers(first, end))
        made += draw(nested(first, last, depth - 1))
        made.append((draw(st.sampled_from(["call", "work", "wait"])), first, last))
        start = last
    return made


@st.composite
def some_workers(draw):
    made = []
    for rank in range(draw(st.integers(0, 4))):
        spans = [
            Span("x", category, start, end, lane)
            for lane in range(draw(st.integers(0, 2)))
            for category, start, end in draw(nested(0, 5_000))
        ]
        devices = tuple(draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=2)))
        made.append(
            WorkerSpans(draw(st.sampled_from(["a", "b"])), rank, draw(st.integers(0, 2)), devices, tuple(spans))
        )
    return made


@given(some_workers(), st.none() | st.just((1_000, 3_001)))
def test_every_trace_is_well_formed(tmp_path_factory, workers, window):
    summary = write_trace(tmp_path_factory.mktemp("trace") / "trace.json", workers, {0: "alpha"}, window)
    document = read(summary.path)
    check(document["traceEvents"])
    busy = sum(nanoseconds(event["dur"]) for event in document["traceEvents"] if event.get("cat") == "device")
    assert busy == sum(use.busy_ns for use in summary.devices)
