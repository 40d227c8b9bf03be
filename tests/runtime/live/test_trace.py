"""The trace of a live job: what every worker did, by device, and shares of time that add up."""

import json
import time

import pytest

from roost import NodePlacementStrategy, PackedPlacementStrategy, Worker


class Busy(Worker):
    @Worker.timer("step")
    def work(self, seconds):
        with self.worker_timer("inner"):
            self.rest(seconds)

    def rest(self, seconds):
        with self.worker_timer():
            time.sleep(seconds)

    def wait_for(self, channel):
        return channel.get()

    def times(self):
        return self.pop_execution_times()


@pytest.fixture(scope="module")
def traced(shared_cluster, tmp_path_factory):
    """One worker that works while another waits, and one without a device."""
    channel = shared_cluster.create_channel("slow")
    actor = Busy.create_group().launch(shared_cluster, name="actor", placement_strategy=PackedPlacementStrategy(0, 1))
    agent = Busy.create_group().launch(shared_cluster, name="agent", placement_strategy=NodePlacementStrategy([0]))
    actor.wait_ready(), agent.wait_ready()
    waiting = actor.execute_on(1).wait_for(channel)
    actor.execute_on(0).work(0.4).wait()
    agent.work(0.1).wait()
    channel.put("at last")
    waiting.wait()
    times = actor.execute_on(0).times().wait()[0]
    path = tmp_path_factory.mktemp("trace") / "deep" / "trace.json"
    summary = shared_cluster.write_trace(path)
    yield summary, json.loads(path.read_text()), times
    actor.close(), agent.close()


def test_shares_add_up_to_the_wall_time(traced):
    summary, _, _ = traced
    assert [(use.node, use.device) for use in summary.devices] == [(0, 0), (0, 1)]
    for use in summary.devices:
        assert use.busy_ns + use.idle_ns == use.wall_ns == summary.window[1] - summary.window[0]


def test_waiting_is_not_work(traced):
    summary, trace, _ = traced
    working, waiting = summary.devices
    (wait,) = [event for event in trace["traceEvents"] if event["name"] == "get slow"]
    assert working.busy_ns >= 400_000_000
    assert waiting.idle_ns >= wait["dur"] * 1000 > 0  # Chrome's traces count microseconds


def test_every_worker_and_device_has_a_lane(traced):
    _, trace, _ = traced
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"accelerator 0", "accelerator 1", "actor 0", "actor 1", "agent 0"} <= lanes
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"work", "step", "inner", "get slow"} <= names


def test_timers_add_up_by_tag(traced):
    _, _, times = traced
    assert {"step", "inner", "rest"} <= set(times)  # one without a tag has the name of the method it is in
    assert times["step"] >= times["inner"] >= times["rest"] >= 0.4
