"""A process and the node daemon, over a real socket: what cannot be read, or is given up, stops nobody else."""

import asyncio
import os
import pickle
import threading
import time
import types

import pytest

from roost.trace.spans import SpanRecorder
from roost.transport.channel import Channel
from roost.transport.context import DRIVER, Address, DaemonContact, WaitedTooLong
from roost.transport.directory import Directory
from roost.transport.exchange import Exchange
from roost.transport.link import DaemonLink
from roost.transport.shared_memory import INLINE_LIMIT
from roost.transport.socket_server import SocketServer
from tests.limits import HANG_S


class NotThere:
    """A value whose class the other side does not have."""

    def __reduce__(self):
        return _missing, ()


def _missing():
    raise ImportError("No module named 'my_project'")


class Agent(threading.Thread):
    """An daemon with an event loop of its own, as its Ray actor has."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.ready = path, threading.Event()

    def run(self):
        asyncio.run(self.serve())

    async def serve(self):
        directory, self.done = Directory(), asyncio.Event()
        self.loop = asyncio.get_running_loop()

        async def look_up(method, name, *args):
            return await getattr(directory, method)(name, *args)

        self.exchange = Exchange(0, None, look_up, None, 1)
        server = SocketServer(self.path, self.answer, self.hear)
        self.ready.set()
        await self.done.wait()
        server.close()
        self.exchange.pool.close()

    async def answer(self, who, op, args, packets):
        if op == "give me that":
            return NotThere(), []
        return await self.exchange.serve(who, op, args, packets)

    def hear(self, who, op, args):
        if op == "release":
            self.exchange.release(who, *args)
        else:
            raise ValueError(f"{op} was not expected")


@pytest.fixture
def daemon(tmp_path):
    daemon = Agent(tmp_path / "daemon")
    daemon.start()
    assert daemon.ready.wait(HANG_S)
    yield daemon
    daemon.loop.call_soon_threadsafe(daemon.done.set)
    daemon.join(HANG_S)


@pytest.fixture
def link(daemon):
    link = DaemonLink(DRIVER, DaemonContact(0, "here", os.getpid(), str(daemon.path)))
    yield link
    link.close()


def until(condition):
    while not condition():
        time.sleep(0.005)


def place(link, check=None):
    return types.SimpleNamespace(
        setup=None, link=link, check=check, recorder=SpanRecorder(), address=Address(*link.who)
    )


def test_a_daemon_that_does_not_answer_is_named_and_its_link_closed(monkeypatch, tmp_path):
    monkeypatch.setattr("roost.transport.link.HELLO_LIMIT", 0.05)
    silent = DaemonContact(3, "there", os.getpid(), str(tmp_path / "nobody"))
    with pytest.raises(WaitedTooLong, match=rf"the daemon of node 3 \(pid {os.getpid()} on there\) did not answer"):
        DaemonLink(DRIVER, silent)
    assert not [thread for thread in threading.enumerate() if thread.name == "roost-link"]


MESSAGES = {
    "a request that cannot be read": lambda link: link.request("port", NotThere()),
    "a request that is unknown": lambda link: link.request("dance"),
    "an answer that cannot be read": lambda link: link.request("give me that"),
}


@pytest.mark.parametrize("send", MESSAGES.values(), ids=MESSAGES)
def test_a_bad_message_is_answered_and_the_next_are_served(link, send):
    with pytest.raises(ValueError, match=r"No module named 'my_project'|unknown request dance"):
        send(link).result(HANG_S)
    assert link.request("port").result(HANG_S)[0] > 0


SILENT = {
    "an envelope that is none": [b"not a pickle", b"", b""],
    "too few frames": [],
    "news that cannot be read": [pickle.dumps((None, tuple(DRIVER), "spans", [])), pickle.dumps(NotThere())],
    "news that nobody expects": [pickle.dumps((None, tuple(DRIVER), "gossip", [])), pickle.dumps(())],
}


@pytest.mark.parametrize("frames", SILENT.values(), ids=SILENT)
def test_a_message_that_cannot_be_answered_is_passed_over(link, frames):
    with link._sending:
        link._requests.send_multipart([link._identity, *frames])
    assert link.request("port").result(HANG_S)[0] > 0


def test_memory_that_came_with_a_bad_request_is_free(daemon, link):
    packet = link.pack(b"x" * (INLINE_LIMIT + 1))
    assert daemon.exchange.pool.used > 0
    with pytest.raises(ValueError, match="the daemon cannot read the request put of driver:0"):
        link.send("put", NotThere(), packet=packet).result(HANG_S)
    until(lambda: daemon.exchange.pool.used == 0)


class Key:
    """A key whose class the daemon cannot have: it was made in a function."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return Key, (self.number,)

    def __eq__(self, other):
        return isinstance(other, Key) and other.number == self.number

    def __hash__(self):
        return hash(self.number)


def test_keys_of_any_class_come_back_as_they_were(link):
    channel = Channel.create("c", place=place(link))
    for key in (Key(1), ("a", Key(2)), "text"):
        channel.put("item", key=key)
    assert channel.sizes() == {Key(1): 1, ("a", Key(2)): 1, "text": 1}
    assert (channel.qsize(Key(1)), channel.qsize(Key(3)), channel.full(Key(3))) == (1, 0, False)
    assert channel.get(key=Key(1)) == "item"
    with pytest.raises(TypeError, match="unhashable"):
        channel.put("item", key=[])


@pytest.mark.parametrize("what", ["get", "get async", "put"])
def test_a_driver_that_waits_learns_that_the_job_has_failed(daemon, link, what):
    def check():
        raise error

    error = RuntimeError("the job has failed")
    channel = Channel.create("c", maxsize=1, place=place(link, check))
    channel.put("first") if what == "put" else None
    with pytest.raises(RuntimeError, match="the job has failed"):
        match what:
            case "get":
                channel.get()
            case "get async":
                channel.get(async_op=True).wait()
            case "put":
                channel.put(b"x" * (INLINE_LIMIT + 1))
    until(lambda: not daemon.exchange._tasks)
    if what == "put":
        assert channel.get() == "first"
        until(lambda: daemon.exchange.pool.used == 0)
    assert channel.qsize() == 0
    channel.put("for another")
    assert channel.get() == "for another", "who gave up takes nothing"


def test_what_comes_for_a_request_that_was_given_up_is_released(daemon, link):
    channel = Channel.create("c", place=place(link))
    future = link.request("get", "c", "k", None, None)
    del link._waiting[next(number for number, waiting in link._waiting.items() if waiting is future)]
    channel.put(b"x" * (INLINE_LIMIT + 1), key="k")
    segments = [link._spares._by_size.popitem()[1]]
    link._maps.released.extend(segment.number for segment in segments)
    until(lambda: daemon.exchange.pool.used == 0)
    link.cancel(future)  # too late, and no error
