"""The loss of a control service that answers on a port."""

import socket
import time

import pytest

from roost.runtime.control_watch import SETTING, ControlLost, ControlWatch
from tests.limits import HANG_S


def until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_service_that_no_longer_answers_is_lost():
    reported = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watch = ControlWatch(address, reported.append, {SETTING: "1.5"})
        watch.raise_if_lost()
    assert until(lambda: watch.is_lost)
    with pytest.raises(ControlLost, match=rf"\(GCS\) at {address} has not answered for 1 s; check the head node"):
        watch.raise_if_lost()
    watch.stop()
