"""Code that speaks for its process, or spoils the connection."""

import asyncio

import psutil
import pytest

from roost.sandbox.execution import Fault
from roost.sandbox.sandbox import Sandbox
from tests.sandbox.playground import executed, ran

FIND = """
import json, os, stat, struct, threading
def is_socket(number):
    try: return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError: return False
(connection,) = filter(is_socket, range(64))
def say(body, length=None):
    os.write(connection, struct.pack('>I', len(body) if length is None else length) + body)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("say(json.dumps({'receipt': '0' * 32, 'outcome': None}).encode())", id="a guessed receipt"),
        pytest.param("say(json.dumps({'receipt': None, 'outcome': None}).encode())", id="no receipt"),
        pytest.param("say(b'not json')", id="no JSON"),
        pytest.param("say(b'\\xff\\xfe\\x00')", id="no text"),
        pytest.param("say(b'[' * 10**5)", id="nested deeply"),
        pytest.param("say(b'1' * 10**5)", id="a long number"),
        pytest.param("say(b'', 2**32 - 1)", id="a length of 4 GB"),
        pytest.param("say(b'{}')", id="an empty message"),
        pytest.param("say(b'[1, 2]')", id="a list"),
        pytest.param('say(b\'{"app": 1, "api": [], "arguments": 3}\')', id="a call of wrong types"),
        pytest.param("say(b'{\"in_force\": {}}')", id="a second greeting"),
        pytest.param("os.write(connection, os.urandom(10**5))", id="noise"),
    ],
)
def test_what_is_forged_is_not_believed(code):
    async def nothing(app, api, arguments):
        raise AssertionError("never called")

    execution, after = executed(f"{FIND}\n{code}\nprint('went on')", "print('fresh')", call=nothing)
    assert execution.error == Fault.BROKEN
    assert "interfered with the connection" in execution.output
    assert (after.output, after.error) == ("fresh\n", None)


def test_a_call_without_apis_is_not_believed():
    forged = "say(json.dumps({'app': 'a', 'api': 'b', 'arguments': {}}).encode())"
    assert executed(f"{FIND}\n{forged}")[0].error == Fault.BROKEN


def test_nothing_can_be_answered_in_advance():
    """A thread that an execution left behind answers for the next one, which it does not know."""
    left = (
        f"{FIND}\nnext_began = threading.Event()\ndef later():\n  next_began.wait()\n"
        "  while True: say(json.dumps({'receipt': '0' * 32, 'outcome': None}).encode())\n"
        "threading.Thread(target=later, daemon=True).start()"
    )
    first, second = executed(left, "next_began.set()\nimport time; time.sleep(20)\nraise ValueError")
    assert first.error is None
    assert second.error == Fault.BROKEN


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("os.close(connection)", Fault.DIED, id="closed"),
        pytest.param("os.dup2(os.open('/dev/null', os.O_RDWR), connection)", Fault.DIED, id="replaced"),
        pytest.param("os.close(connection)\nimport time; time.sleep(20)", Fault.BROKEN, id="closed and going on"),
        pytest.param("import socket; socket.socket(fileno=connection).shutdown(2)\nimport time; time.sleep(20)",
                     Fault.BROKEN, id="shut down"),
        pytest.param("json.dumps = lambda *a, **k: '{}'", Fault.BROKEN, id="patched"),
        pytest.param("os.write = None", Fault.DIED, id="patched away"),
    ],
)  # fmt: skip
def test_a_spoilt_connection_ends_the_process(code, error):
    execution, after = executed(f"{FIND}\n{code}", "print('fresh')")
    assert execution.error == error, execution.output
    assert after.output == "fresh\n"


def test_reading_the_connection_finds_nothing():
    read = "try: os.read(connection, 1)\nexcept BlockingIOError: print('none')"
    code = f"{FIND}\nos.set_blocking(connection, False)\n{read}\nos.set_blocking(connection, True)"
    execution, after = executed(code, "print('alive')")
    assert (execution.output, after.output) == ("none\n", "alive\n")


def test_calls_without_end_leave_the_owner_small():
    async def count(app, api, arguments):
        return None

    async def run():
        async with await Sandbox.start(call=count) as sandbox:
            before = psutil.Process().memory_info().rss
            for _ in range(3):
                execution = await sandbox.execute("for _ in range(200): apis.a.b(x='a' * 10**5)")
                assert execution.error is None
            return psutil.Process().memory_info().rss - before

    assert ran(run()) < 50 << 20


def test_a_value_that_cannot_be_sent_is_the_owners_error():
    async def wrong(app, api, arguments):
        return object()

    async def run():
        async with await Sandbox.start(call=wrong) as sandbox:
            with pytest.raises(TypeError, match="not JSON"):
                await sandbox.execute("apis.a.b()")
            return await sandbox.execute("print('fresh')")

    assert ran(run()).output == "fresh\n"


def test_executions_of_one_sandbox_follow_one_another():
    async def run():
        async with await Sandbox.start() as sandbox:
            await sandbox.execute("x = []")
            adding = "import time; x.append(len(x)); time.sleep(0.01)"
            await asyncio.gather(*(sandbox.execute(adding) for _ in range(5)))
            return await sandbox.execute("print(x)")

    assert ran(run()).output == "[0, 1, 2, 3, 4]\n"
