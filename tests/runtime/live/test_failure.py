"""Errors after a failure, and recovery without help."""

import os
import signal
import sys
import time

import pytest

from roost import Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker as RoostWorker, WorkerFailed
from tests.limits import HANG_S


class Clumsy(RoostWorker):
    def __init__(self, fails_on=None):
        super().__init__()
        if self._rank == fails_on:
            print("cannot find the checkpoint")
            raise FileNotFoundError("/no/such/checkpoint")

    def rank(self):
        return self._rank

    def stumble(self):
        print("one step", flush=True)
        print("two steps", file=sys.stderr, flush=True)
        if self._rank == 1:
            raise ValueError("not a number: x")
        time.sleep(3600)

    def leave(self):
        sys.exit(3)

    def vanish(self):
        print("good bye", flush=True)
        os._exit(4)

    def interrupt(self):
        raise KeyboardInterrupt

    def odd_error(self):
        class Local(Exception):
            def __init__(self, one, two):
                super().__init__(one)

        raise Local("cannot be carried", 2)

    def place(self):
        return os.getpid(), os.environ["ROOST_VISIBLE_DEVICES"], os.environ["RANK"], os.environ["MARK"]

    def hang(self):
        time.sleep(3600)


class Juggler(RoostWorker):
    async def agent(self):
        return self.worker_info.daemon.pid

    async def drop(self):
        raise ValueError("too many balls")

    async def catch(self):
        return "caught"


def launched(cluster, *args, name="clumsy", strategy=None, **options):
    strategy = strategy or PackedPlacementStrategy(0, 1)
    return Clumsy.create_group(*args).launch(cluster, name=name, placement_strategy=strategy, **options)


def failure_of(call):
    with pytest.raises(WorkerFailed) as caught:
        call.wait(timeout=HANG_S)
    return caught.value


def test_a_constructor_that_raises(cluster):
    group = launched(cluster, 1)
    error = failure_of(group.rank())
    assert str(error).startswith("clumsy:1 raised in its constructor on node 0")
    assert "device 1: FileNotFoundError: /no/such/checkpoint" in str(error)
    assert "cannot find the checkpoint" in error.first.log
    assert isinstance(error.__cause__, FileNotFoundError)
    with pytest.raises(WorkerFailed, match="in its constructor"):
        group.wait_ready(timeout=HANG_S)


def test_a_method_that_raises_is_told_while_others_still_work(cluster):
    error = failure_of(launched(cluster).stumble())
    assert str(error.first.address) == "clumsy:1"
    assert error.first.devices == (1,)
    assert "raise ValueError" in error.first.traceback
    assert "host.py" not in error.first.traceback
    assert error.first.log == "one step\ntwo steps"
    assert error.first.log_path.endswith("clumsy/rank_1.log")


EXITS = [
    pytest.param("leave", "raised", "it called exit(3)", id="sys.exit"),
    pytest.param("vanish", "died", "its process", id="os._exit"),
    pytest.param("interrupt", "raised", "KeyboardInterrupt", id="interrupt"),
    pytest.param("odd_error", "raised", "cannot be carried", id="unpicklable"),
]


def test_ends_of_all_kinds(cluster):
    for case in EXITS:
        method, kind, summary = case.values
        group = launched(cluster, name=case.id.replace(".", ""), strategy=NodePlacementStrategy([0]))
        error = failure_of(getattr(group, method)())
        assert error.first.kind == kind
        assert summary in error.first.summary
        if method == "vanish":
            assert error.first.log == "good bye"
        else:
            assert group.rank().wait() == [0]  # the process lives on
        group.close()


def test_a_failure_nobody_waits_for_ends_other_waits(cluster):
    group = launched(cluster)
    group.wait_ready()
    hanging = group.execute_on(0).hang()
    group.execute_on(1).vanish()
    error = failure_of(hanging)
    assert str(error.first.address) == "clumsy:1"


def test_an_asynchronous_worker_goes_on_while_its_daemon_is_slow_to_hear_of_a_failure(cluster):
    group = Juggler.create_group().launch(cluster, name="juggler", placement_strategy=NodePlacementStrategy([0]))
    group.wait_ready()
    agent = group.agent().wait()[0]
    os.kill(agent, signal.SIGSTOP)
    try:
        dropped = group.drop()
        assert group.catch().wait(timeout=HANG_S) == ["caught"]
        assert not dropped.done()
    finally:
        os.kill(agent, signal.SIGCONT)
    error = failure_of(dropped)
    assert error.first.summary == "ValueError: too many balls"
    assert "host.py" not in error.first.traceback


@pytest.mark.long
def test_a_restartable_worker_comes_back_on_its_place(cluster):
    group = launched(cluster, restarts=1, env={"MARK": "kept"})
    before = group.place().wait()
    os.kill(before[1][0], signal.SIGKILL)
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            after = group.place().wait()
            break
        except WorkerFailed as error:
            assert error.first.will_restart
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert after[0] == before[0]
    assert after[1][0] != before[1][0]
    assert after[1][1:] == ("1", "1", "kept")
    assert any(failure.will_restart for failure in cluster.failures)
    os.kill(after[1][0], signal.SIGKILL)
    error = failure_of(group.hang())
    assert str(error.first.address) == "clumsy:1"
    assert not error.first.will_restart


@pytest.mark.long
def test_a_lost_node_is_reported_with_what_it_carried(doomed_nodes):
    nodes, lost = doomed_nodes
    with Cluster(num_nodes=2, address=nodes.address) as cluster:
        group = launched(cluster, name="far", strategy=NodePlacementStrategy([0, 1, 1]))
        group.wait_ready()
        waiting = group.hang()
        os.kill(lost.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        error = failure_of(waiting)
        deadline = time.monotonic() + HANG_S
        while not any(failure.kind == "node lost" for failure in cluster.failures) and time.monotonic() < deadline:
            time.sleep(0.2)
        (report,) = [failure for failure in cluster.failures if failure.kind == "node lost"]
    assert {str(failure.address) for failure in error.failures} <= {"far:1", "far:2"}
    assert "it ran far:1, far:2" in report.summary
    assert report.node == 1
