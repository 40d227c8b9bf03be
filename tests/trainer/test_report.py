"""Parts of a report: the folded trace, the chosen rollouts, the pictures, the command."""

import json
import random
import sys

import pytest

from roost.trace.chrome import write_trace
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.page import write_plots, write_report
from roost.trainer.report.page_data import (
    MOST_CHARACTERS,
    MOST_LANES,
    MOST_SPANS,
    Bar,
    before_and_after,
    choose_rollouts,
    duration,
    merged,
    packed,
    page_data,
    phase_colours,
    phases_of,
    read_trace,
)
from tests.cli.terminal import run as roost
from tests.trainer.example_run import NASTY, STEPS, UNKNOWN_REWARDS, make_run, workers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"))


class TestData:
    def test_what_the_page_knows(self, run):
        data = page_data(run)
        assert (data["name"], data["mode"], data["machines"]) == ("sums", "disaggregated", "1 node, 4 accelerators")
        assert data["steps"] == list(range(1, STEPS + 1))
        series = dict(map(tuple, data["series"]))
        assert [step for step in data["steps"] if series["reward/mean"][step - 1] is None] == list(UNKNOWN_REWARDS)
        assert data["duration"] == pytest.approx(STEPS * 4.0)
        assert [phase["name"] for phase in data["phases"]] == ["generate", "score", "learn", "sync", "switch"]
        assert [device["busy_share"] for device in data["devices"]] == pytest.approx([0.25, 0.25, 0.6, 0.575], abs=0.01)
        json.dumps(data, allow_nan=False)

    @pytest.mark.parametrize(
        ("steps", "seconds"),
        [
            pytest.param([], None, id="none"),
            pytest.param([{"time": 5.0, "time/step": 2.0}, {"time": 9e3, "time/step": 3.0}], 5.0, id="resumed-later"),
            pytest.param([{"time": 5.0}, {"time": 9.0}], 4.0, id="only-ends-known"),
            pytest.param([{"time": 5.0}], None, id="one-end"),
            pytest.param([{"time/step": None}], None, id="not-a-number"),
        ],
    )
    def test_duration(self, steps, seconds):
        assert duration(steps) == seconds

    def test_phases_that_nobody_thought_of_have_their_own_colours(self):
        steps = [{"time/generate": 1.0}, {"time/evaluate": 1.0, "time/save": 2.0, "time/step": 3.0}]
        assert phases_of(steps) == ["generate", "evaluate", "save"]
        assert len({phase_colours(steps)[name] for name in phases_of(steps)}) == 3


class TestPartialRuns:
    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda run: None, id="nothing-but-the-config"),
            pytest.param(lambda run: run.plan_file.write_text("{"), id="broken-plan"),
            pytest.param(lambda run: run.plan_file.unlink(), id="no-plan"),
            pytest.param(lambda run: run.trace_file.write_text("[1]"), id="no-trace-in-it"),
            pytest.param(lambda run: run.trace_file.write_bytes(b"\xff{"), id="broken-trace"),
            pytest.param(lambda run: run.add_step({"step": 1}), id="step-of-nothing"),
            pytest.param(lambda run: run.add_step({"step": 1, "reward/mean": "high"}), id="reward-is-text"),
            pytest.param(lambda run: run.add_evaluation({"step": 3, "reward/mean": None}), id="evaluation-of-nothing"),
            pytest.param(lambda run: run.add_samples([{"step": 3}]), id="rollout-of-nothing"),
        ],
    )
    def test_there_is_always_a_report(self, tmp_path, spoil):
        run = RunFolder.create(tmp_path / "run", config="steps: 1", plan="{}")
        spoil(run)
        assert write_report(run).read_text().startswith("<!doctype html>")
        assert all(file.read_bytes().startswith(b"\x89PNG") for file in write_plots(run))

    def test_a_trace_that_cannot_be_read_is_told(self, tmp_path):
        run = RunFolder.create(tmp_path / "run", config="", plan="{}")
        run.trace_file.write_text('{"traceEvents":[{"ph":"X"}]}')
        assert "cannot be read" in page_data(run)["trace_problem"]


class TestTrace:
    def test_lanes_and_levels(self, run):
        trace = read_trace(run.trace_file)
        assert [lane.name for lane in trace.lanes[:5]] == [f"accelerator {n}" for n in range(4)] + ["actor 0"]
        learner = trace.lanes[4]
        assert [(bar.level, bar.name) for bar in learner.bars[:3]] == [(0, "learn"), (1, "minibatch"), (1, "minibatch")]
        assert trace.resolution == 0 and trace.spans == 4 * STEPS * 8
        names, rows = packed(trace.lanes)
        assert sum(len(row["bars"]) for row in rows) == 6 * sum(len(lane.bars) for lane in trace.lanes)
        assert names[rows[4]["bars"][3]] == "learn"

    def test_a_trace_of_any_layout(self, run, tmp_path):
        other = tmp_path / "trace.json"
        other.write_text(json.dumps(json.loads(run.trace_file.read_text()), indent=1))
        assert read_trace(other).lanes == read_trace(run.trace_file).lanes

    def test_many_spans_are_drawn_together(self, tmp_path):
        write_trace(tmp_path / "trace.json", workers(200, pieces=130), {0: "alpha"})
        trace = read_trace(tmp_path / "trace.json")
        drawn = [bar for lane in trace.lanes for bar in lane.bars]
        assert trace.spans == 4 * 200 * 132 > 100_000
        assert len(drawn) <= MOST_SPANS
        assert trace.resolution > 0
        held = sum(bar.spans for lane in trace.lanes if not lane.is_device for bar in lane.bars)
        assert held == trace.spans, "none is lost"
        assert [bar for bar in drawn if bar.name == "learn" and bar.spans == 1], "long ones stay what they were"

    def test_many_lanes_are_cut(self, tmp_path):
        many = [worker._replace(rank=rank) for rank in range(200) for worker in workers(1)[:1]]
        write_trace(tmp_path / "trace.json", many, {0: "alpha"})
        trace = read_trace(tmp_path / "trace.json")
        assert len(trace.lanes) == MOST_LANES
        assert trace.hidden_lanes == 201 - MOST_LANES

    @pytest.mark.parametrize("resolution", [0.0, 1.0, 7.0, 1e6])
    def test_merging_keeps_the_time_covered(self, resolution):
        chance = random.Random(3)
        starts = sorted(chance.uniform(0, 1000) for _ in range(300))
        bars = [Bar(0, start, chance.uniform(0, 9), "ab"[index % 2], 1.0, False) for index, start in enumerate(starts)]
        made = merged(bars, resolution)
        assert sum(bar.spans for bar in made) == 300
        assert made[0].start == bars[0].start
        assert max(bar.start + bar.length for bar in made) == pytest.approx(max(b.start + b.length for b in bars))

    def test_no_file_is_no_trace(self, tmp_path):
        assert read_trace(tmp_path / "trace.json") is None


class TestRollouts:
    def test_some_of_every_step_by_step(self):
        records = [{"step": step, "kind": "train", "task": str(n)} for step in (2, 1) for n in range(50)]
        chosen = choose_rollouts(records)
        assert [record["step"] for record in chosen.shown] == [1] * 8 + [2] * 8
        assert chosen.total == 100

    def test_too_many_steps_are_thinned_out(self):
        chosen = choose_rollouts(({"step": step, "task": "a"} for step in range(1, 1001)), most=80)
        steps = [record["step"] for record in chosen.shown]
        assert len(steps) == 10 and steps[0] == 1 and steps[-1] == 1000

    def test_long_texts_keep_both_ends(self):
        (shown,) = choose_rollouts([{"step": 1, "completion": "a" + "x" * 100_000 + "z"}]).shown
        assert shown["completion"][0] == "a" and shown["completion"][-1] == "z"
        assert "96,002 characters omitted" in shown["completion"]
        assert len(shown["completion"]) < MOST_CHARACTERS + 50

    @pytest.mark.parametrize(
        ("records", "pairs"),
        [
            pytest.param([], [], id="none"),
            pytest.param([(1, "train", "a")], [], id="one-step"),
            pytest.param([(1, "train", "a"), (9, "train", "b")], [("a", "b")], id="other-tasks"),
            pytest.param([(1, "train", "a"), (5, "train", "b"), (9, "train", "a")], [("a", "a")], id="equal-tasks"),
            pytest.param(
                [(1, "train", "a"), (2, "evaluation", "e"), (8, "evaluation", "e"), (9, "train", "a")],
                [("e", "e")],
                id="evaluations-first",
            ),
        ],
    )
    def test_before_and_after(self, records, pairs):
        made = before_and_after([{"step": step, "kind": kind, "task": task} for step, kind, task in records])
        assert [(before["task"], after["task"]) for before, after in made] == pairs


class TestPage:
    def test_nothing_of_a_model_is_markup(self, run):
        page = write_report(run).read_text()
        assert "<script>alert" not in page and "onerror=alert(1)>" not in page
        assert page.count("</script>") == 2, "the data and the page's own"

    def test_nothing_is_loaded(self, run):
        page = write_report(run).read_text()
        assert "<link" not in page and " src=" not in page.replace(NASTY, "").replace("img src=x", "")
        assert "default-src &#x27;none&#x27;" in page

    def test_a_name_is_text(self, tmp_path):
        run = RunFolder.create(tmp_path / "<b>&{{data}}", config="", plan="{}")
        assert "<title>&lt;b&gt;&amp;{{data}}: Roost run</title>" in write_report(run).read_text()


class TestCommand:
    def test_writes_the_page_and_says_where(self, tmp_path):
        run = make_run(tmp_path, steps=2)
        done = roost("report", run.path)
        assert (done.exit_code, done.stdout) == (0, f"{run.report_file}\n")
        assert run.report_file.exists() and run.reward_plot.exists() and run.timing_plot.exists()

    def test_a_wrong_folder_is_told_with_the_fix(self, tmp_path):
        make_run(tmp_path, steps=1)
        done = roost("report", tmp_path)
        assert done.exit_code == 2
        assert "holds no run" in done.stderr and str(tmp_path / "sums") in done.stderr

    def test_the_page_needs_no_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        run = make_run(tmp_path, steps=1)
        done = roost("report", run.path)
        assert done.exit_code == 0 and "pip install matplotlib" in done.stderr
        assert run.report_file.exists() and not run.reward_plot.exists()
