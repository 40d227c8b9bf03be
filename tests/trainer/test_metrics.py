"""Sinks of metrics, each with the real thing behind it; one that fails is told about once and never stops a run."""

import errno
import math
import urllib.request

import pytest

from roost.trainer.records.fan_out import FanOut, MetricSettings, PrometheusEndpoint, free_name, open_metrics
from roost.trainer.records.run_folder import RunFolder
from tests.limits import HANG_S

VALUES = {"reward/mean": 0.5, "loss/policy": math.nan, "busy/llm-judge": 0.25, "version": 3}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "first", config="", plan="{}")


class Failing:
    """A sink that takes some steps and then breaks."""

    def __init__(self, good_steps=0, breaks_closing=False):
        self.good_steps, self.breaks_closing, self.taken, self.is_closed = good_steps, breaks_closing, [], False

    def write(self, step, values):
        if step > self.good_steps:
            raise RuntimeError("the server is gone")
        self.taken.append(step)

    def close(self):
        self.is_closed = True
        if self.breaks_closing:
            raise OSError("the disk is full")


def test_the_file_is_always_written(run):
    described = []
    metrics = open_metrics(run, tell=described.append)
    metrics.write(1, VALUES)
    metrics.write(2, {"time": 12.5})
    metrics.close()
    first, second = run.steps()
    assert {key: first[key] for key in VALUES} == {**VALUES, "loss/policy": None}
    assert first["time"] > 1e9, "the end of the step, since the epoch"
    assert second == {"step": 2, "time": 12.5}
    assert described == []


def test_a_sink_that_fails_is_told_once_and_left_out():
    described, good, bad = [], Failing(9), Failing(1)
    metrics = FanOut({"bad": bad, "good": good}, described.append)
    for step in range(1, 5):
        metrics.write(step, VALUES)
    assert good.taken == [1, 2, 3, 4]
    assert bad.taken == [1]
    assert (
        len(described) == 1 and "bad" in described[0] and "step 2" in described[0] and "server is gone" in described[0]
    )
    assert metrics.names == ("good",)


def test_closing_goes_on_where_one_fails():
    described, good, bad = [], Failing(), Failing(breaks_closing=True)
    metrics = FanOut({"bad": bad, "good": good}, described.append)
    metrics.close()
    metrics.close()
    assert good.is_closed and len(described) == 1 and "disk is full" in described[0]


def test_a_file_that_cannot_be_written_does_not_stop_the_run(run):
    described = []
    metrics = open_metrics(run, tell=described.append)
    run.metrics.path.mkdir()
    metrics.write(1, VALUES)
    metrics.write(2, VALUES)
    assert len(described) == 1 and "metrics.jsonl" in described[0]


class OnFullDisk:
    def write(self, step, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        pass


def test_a_full_disk_stops_the_run():
    fan_out = FanOut({"metrics.jsonl": OnFullDisk()}, pytest.fail)
    with pytest.raises(OSError, match="No space left"):
        fan_out.write(1, {"step": 1})


@pytest.mark.parametrize(
    ("name", "words"),
    [pytest.param("tensorbord", "did you mean tensorboard", id="misspelt"), pytest.param("x", "wandb", id="unknown")],
)
def test_an_unknown_sink_is_a_mistake(name, words):
    with pytest.raises(ValueError, match=words):
        MetricSettings(sinks=(name,))


def test_a_sink_that_is_not_installed_is_left_out(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    described = []
    metrics = open_metrics(run, MetricSettings(sinks=("trackio",)), described.append)
    assert metrics.names == ("metrics.jsonl",)
    assert described == ["metrics do not go to trackio: trackio is missing; pip install trackio"]


class TestPrometheus:
    def scraped(self, url):
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            return answer.read().decode().splitlines()

    def test_scraped_while_it_runs_and_gone_afterwards(self, run):
        described = []
        metrics = open_metrics(run, MetricSettings(sinks=("prometheus",)), described.append)
        url = described[0].split()[-1]
        assert url.startswith("http://127.0.0.1:")
        metrics.write(6, {"reward/mean": 0.1})
        metrics.write(7, VALUES)
        lines = self.scraped(url)
        for line in (
            'roost_step{run="first"} 7.0',
            'roost_reward_mean{run="first"} 0.5',
            'roost_loss_policy{run="first"} NaN',
            'roost_busy_llm_judge{run="first"} 0.25',
        ):
            assert line in lines
        metrics.close()
        with pytest.raises(OSError):
            self.scraped(url)

    def test_two_runs_in_a_process(self):
        one, other = PrometheusEndpoint("one"), PrometheusEndpoint("other")
        one.write(1, {"a": 1})
        other.write(2, {"a": 2})
        assert 'roost_a{run="one"} 1.0' in self.scraped(one.url)
        assert 'roost_a{run="other"} 2.0' in self.scraped(other.url)
        one.close()
        other.close()

    def test_a_port_that_is_taken_is_told(self, run):
        described, taken = [], PrometheusEndpoint("other")
        port = int(taken.url.rsplit(":", 1)[1].split("/")[0])
        metrics = open_metrics(run, MetricSettings(sinks=("prometheus",), prometheus_port=port), described.append)
        assert metrics.names == ("metrics.jsonl",)
        assert len(described) == 1 and "prometheus" in described[0]
        taken.close()

    @pytest.mark.parametrize(
        ("name", "taken", "exported"),
        [
            pytest.param("reward/mean", (), "roost_reward_mean", id="slash"),
            pytest.param("9 lives!", (), "roost_9_lives", id="digit-first"),
            pytest.param("奖励/mean", (), "roost_mean", id="other-letters"),
            pytest.param("a_b", ("roost_a_b", "roost_a_b_2"), "roost_a_b_3", id="taken"),
        ],
    )
    def test_names(self, name, taken, exported):
        assert free_name(name, set(taken)) == exported

    def test_names_that_become_equal_are_kept_apart(self):
        endpoint = PrometheusEndpoint("first")
        endpoint.write(1, {"a/b": 1, "a_b": 2, "a b": 3})
        lines = self.scraped(endpoint.url)
        assert [line for line in lines if line.startswith("roost_a")] == [
            'roost_a_b{run="first"} 1.0',
            'roost_a_b_2{run="first"} 2.0',
            'roost_a_b_3{run="first"} 3.0',
        ]
        endpoint.close()


def test_tensorboard_reads_back_what_was_written(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    described = []
    for first_step, steps in ((0, (1, 2, 3)), (1, (2,))):  # the second start does steps 2 and 3 again, up to 2
        metrics = open_metrics(run, MetricSettings(sinks=("tensorboard",)), described.append, first_step)
        for step in steps:
            metrics.write(step, {"reward/mean": step / 4 + first_step})
            metrics.evaluated(step, {"reward/mean": 1.0 + step})
        metrics.close()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert described == []
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 1.5)]
    assert [(event.step, event.value) for event in events.Scalars("evaluation/reward/mean")] == [(1, 2.0), (2, 3.0)]
    assert not any("evaluation" in key for record in run.metrics for key in record), "it has a file of its own"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_takes_a_run(run, name, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(run.path / "trackio"))  # read as it is imported
    pytest.importorskip(name)
    described = []
    metrics = open_metrics(run, MetricSettings(sinks=(name,)), described.append)
    metrics.write(1, VALUES)
    assert metrics.names == ("metrics.jsonl", name)
    metrics.close()
    assert described == []
    assert [file for file in (run.path / name).rglob("*") if file.is_file()]
