"""Failures: the first cause first, readable, and the same in another process."""

import pickle
import threading
from types import SimpleNamespace

import pytest
import ray
from hypothesis import given, strategies as st

from roost.runtime.failures import FailureWatch
from roost.transport.context import (
    Address,
    Failure,
    FailureKind,
    PeerLost,
    WaitedTooLong,
    WorkerFailed,
    in_order_of_cause,
)
from tests.limits import HANG_S


def failure(rank, time_ns, is_consequence=False, **more):
    kind = FailureKind.RAISED if is_consequence else FailureKind.DIED
    return Failure(Address("actor", rank), kind, f"failure {rank}", time_ns, is_consequence=is_consequence, **more)


ORDERS = {
    "by time": ([failure(0, 9), failure(1, 3)], [1, 0]),
    "a consequence comes last though it was noticed first": ([failure(0, 1, True), failure(1, 9)], [1, 0]),
    "consequences by time": ([failure(0, 5, True), failure(1, 4, True), failure(2, 9)], [2, 1, 0]),
    "of the same moment in the order told": ([failure(1, 4), failure(0, 4)], [1, 0]),
}


@pytest.mark.parametrize("failures, ranks", ORDERS.values(), ids=ORDERS)
def test_the_first_cause_comes_first(failures, ranks):
    error = WorkerFailed(iter(failures))
    assert [found.address.rank for found in error.failures] == ranks
    assert error.first.address.rank == ranks[0]
    first, *then = str(error).splitlines()
    assert first.startswith(f"actor:{ranks[0]} ")
    assert [line.split()[1] for line in then] == [f"actor:{rank}" for rank in ranks[1:]]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_no_failure_is_dropped_by_the_order(entries):
    failures = [failure(rank, time, late) for rank, (time, late) in enumerate(entries)]
    ordered = in_order_of_cause(failures)
    assert sorted(found.address for found in ordered) == [found.address for found in failures]
    assert [found.is_consequence for found in ordered] == sorted(found.is_consequence for found in failures)


TEXTS = {
    "bare": (failure(2, 1, node=0), ["actor:2 died on node 0: failure 2"]),
    "with a place": (
        failure(2, 1, node=3, host="gpu-3", devices=(4, 5), method="step"),
        ["actor:2 died in step on node 3 (gpu-3), device 4,5: failure 2"],
    ),
    "with a log": (
        failure(2, 1, node=0, log="one\ntwo\n", log_path="actor/rank_2.log"),
        [
            "actor:2 died on node 0: failure 2",
            "  last lines of its log (actor/rank_2.log):",
            "    one",
            "    two",
        ],
    ),
}


@pytest.mark.parametrize("found, lines", TEXTS.values(), ids=TEXTS)
def test_a_failure_says_who_where_and_what(found, lines):
    assert str(found).splitlines() == lines


def test_what_followed_is_told_in_one_line_each():
    error = WorkerFailed([failure(0, 1, traceback="Traceback:\n  boom"), failure(1, 2, traceback="Traceback:\n  lost")])
    assert str(error).splitlines()[1:] == ["    Traceback:", "      boom", "then: actor:1 died on node -1: failure 1"]


ERRORS = {
    "one failure": WorkerFailed([failure(0, 1, cause=pickle.dumps(ValueError("x")), call="actor.step#3")]),
    "several": WorkerFailed([failure(0, 7, True, log="a\nb"), failure(1, 9, devices=(1, 2), will_restart=True)]),
    "a lost peer": PeerLost("rollout:1 is gone: its process 7 ended"),
    "a long wait": WaitedTooLong("channel c stayed empty for 3 s"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("protocol", [2, 5])
def test_errors_are_the_same_in_another_process(error, protocol):
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert getattr(copy, "failures", ()) == getattr(error, "failures", ())


CAUGHT = {"a lost peer": (PeerLost("x"), ConnectionError), "a long wait": (WaitedTooLong("x"), TimeoutError)}


@pytest.mark.parametrize("error, kind", CAUGHT.values(), ids=CAUGHT)
def test_errors_are_caught_as_what_python_calls_them(error, kind):
    with pytest.raises(kind):
        raise error


def lost_daemon(*args):
    raise ray.exceptions.ActorDiedError()


def test_the_loss_of_the_drivers_node_daemon_is_raised_every_time(monkeypatch):
    monkeypatch.setattr("roost.runtime.failures.GRACE", 0.0)
    seen = FailureWatch(SimpleNamespace(ask=SimpleNamespace(remote=lost_daemon)), lambda: None)
    seen._thread.join(HANG_S)
    with pytest.raises(WorkerFailed, match="the node daemon of the driver's machine is lost"):
        seen.raise_if_failed()  # settles it
    seen.raise_if_failed()
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="the node daemon of the driver's machine is lost"):
            seen.raise_if_lost()


def test_an_expendable_loss_ends_no_wait_of_others(monkeypatch):
    monkeypatch.setattr("roost.runtime.failures.GRACE", -1.0)
    ended = threading.Event()

    def silent_daemon(*call):
        ended.wait(HANG_S)
        lost_daemon(*call)

    seen = FailureWatch(SimpleNamespace(ask=SimpleNamespace(remote=silent_daemon)), lambda: None)
    try:
        seen.set_expendable("rollout", [FailureKind.NODE_LOST])
        seen._add([Failure(Address("rollout", 1), FailureKind.NODE_LOST, "node 1 is lost", 1, 1)])
        seen.raise_if_failed()
        assert [failure.node for failure in seen.all] == [1]
        seen._add([Failure(Address("rollout", 0), FailureKind.RAISED, "it raised", 2)])
        with pytest.raises(WorkerFailed, match="it raised"):
            seen.raise_if_failed()
        seen.set_expendable("rollout", ())
        with pytest.raises(WorkerFailed, match="node 1 is lost"):
            seen.raise_if_failed()
    finally:
        seen.stop()
        ended.set()
