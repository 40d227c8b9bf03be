"""An address in Ray's shared folder is used only if this user, or root, wrote it and serves it."""

import http.server
import os
import socket
import subprocess
import sys
import threading

import pytest

from roost.runtime import ray_connection
from roost.runtime.ray_address import check_listener, listening_users, running_here, trusted_text, wait_for_answer
from tests.limits import HANG_S

NOBODY = 65534


def _has_ipv6_loopback():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


LISTENS = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
host = sys.argv[2]
server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
needs_ipv6 = pytest.mark.skipif(not _has_ipv6_loopback(), reason="this machine has no address ::1")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Ray's folder, open to everybody as Ray creates it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / "ray"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def write(shared, port, mode=0o644, host="127.0.0.1"):
    file = shared / "ray_current_cluster"
    file.write_text(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    file.chmod(mode)
    return file


def test_an_address_of_ones_own_is_used(shared, listening):
    write(shared, listening)
    reported = []
    assert running_here(reported.append) == f"127.0.0.1:{listening}"
    assert reported == []


@needs_ipv6
def test_an_address_of_ipv6_is_used(shared):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        write(shared, port, host="::1")
        assert running_here(print) == f"[::1]:{port}"


def test_no_file_and_no_answer_are_no_cluster(shared, listening):
    reported = []
    assert running_here(reported.append) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write(shared, port)
    assert running_here(reported.append) is None
    assert reported == []


def test_an_address_that_others_can_write_is_ignored(shared, listening):
    write(shared, listening, mode=0o666)
    reported = []
    assert running_here(reported.append) is None
    assert "other users can write to it (mode 666)" in reported[0]


def test_a_link_is_ignored(shared, listening, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(f"127.0.0.1:{listening}")
    (shared / "ray_current_cluster").symlink_to(elsewhere)
    reported = []
    assert running_here(reported.append) is None
    assert len(reported) == 1


@needs_root
@pytest.mark.parametrize("planted", ["file", "folder"])
def test_an_address_that_another_user_planted_is_ignored(shared, listening, planted, monkeypatch):
    file = write(shared, listening)
    os.chown(file if planted == "file" else shared, NOBODY, NOBODY)
    reported = []
    assert running_here(reported.append) is None
    assert "belongs to user nobody, not to you" in reported[0]


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_that_another_user_serves_is_ignored(shared, host):
    command = [sys.executable, "-c", LISTENS, str(NOBODY), host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        port = int(server.stdout.readline())
        write(shared, port, host=host)
        assert listening_users(port) == {NOBODY}
        reported = []
        assert running_here(reported.append) is None
        assert f"the process that listens on port {port} belongs to user nobody" in reported[0]
        server.stdin.close()


def test_a_listener_elsewhere_cannot_be_looked_at():
    check_listener("192.0.2.1", 6379)


def test_a_folder_is_no_address(tmp_path):
    with pytest.raises(OSError, match=r"regular file|Is a directory"):
        trusted_text(tmp_path)


def test_what_answers_is_waited_for_no_longer(listening):
    assert wait_for_answer(f"127.0.0.1:{listening}") == ""
    assert wait_for_answer(f"ray://localhost:{listening}") == ""


def test_a_head_that_is_being_started_is_waited_for():
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        port = later.getsockname()[1]
        threading.Timer(1.0, later.listen).start()
        assert wait_for_answer(f"127.0.0.1:{port}", limit_s=HANG_S) == ""


def test_a_wrong_address_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(ray_connection, "wait_for_answer", lambda address: wait_for_answer(address, limit_s=0.0))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        reported = []
        with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}: Connection refused"):
            ray_connection.connect(address, reported.append)
    assert reported == [f"joining the Ray at {address}"]
    with pytest.raises(ConnectionError, match=r"write HOST:PORT, such as 192\.0\.2\.1:6379"):
        ray_connection.connect("192.0.2.1", reported.append)


@pytest.mark.parametrize("port", ["0", "99999", "http"])
def test_a_port_that_cannot_be_one_is_named(port):
    assert wait_for_answer(f"10.0.0.1:{port}").startswith("it has no valid port (1 to 65535); write HOST:PORT")


def test_a_server_of_another_kind_is_no_ray():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert "is not Ray" in wait_for_answer(f"127.0.0.1:{server.server_port}", limit_s=0.0)
        server.shutdown()


def test_every_address_of_a_host_is_tried(listening, monkeypatch):
    """Something else listens at the first address, Ray at the second."""
    server = http.server.HTTPServer(("127.0.0.2", listening), http.server.BaseHTTPRequestHandler)
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *args, **kw: resolved if host == "head" else own(host, *args, **kw)
        )
        assert wait_for_answer(f"head:{listening}", limit_s=0.0) == ""
        server.shutdown()
