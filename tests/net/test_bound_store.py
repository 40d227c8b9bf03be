"""The store of a process group listens at the job's address only."""

import socket
from datetime import timedelta

import psutil
import pytest

pytest.importorskip("torch")

from roost.net.bound_store import listen, tcp_store
from tests.limits import HANG_S

LIMIT = timedelta(seconds=HANG_S)


def test_a_store_listens_at_its_address_only():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = tcp_store("127.0.0.1", port, 2, is_master=True, limit=LIMIT)
    other = tcp_store("127.0.0.1", port, 2, is_master=False, limit=LIMIT)
    master.set("key", "value")
    assert other.get("key") == b"value"
    connections = psutil.Process().net_connections("tcp")
    hosts = [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    assert hosts == ["127.0.0.1"]


def test_an_address_of_another_machine_is_named():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:29500"):
        listen("192.0.2.1", 29500)
