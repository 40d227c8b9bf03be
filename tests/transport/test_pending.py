"""Something under way: waited for by threads and event loops, as often as wanted, finished once."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from roost.transport.context import PeerLost, WaitedTooLong
from roost.transport.waits import Pending
from tests.limits import HANG_S


def test_a_wait_that_is_too_short_can_be_repeated():
    future = Future()
    pending = Pending(future, str)
    with pytest.raises(WaitedTooLong, match=r"not done within 0 s"):
        pending.wait(0)
    future.set_result(3)
    assert pending.done()
    assert (pending.wait(0), pending.wait()) == ("3", "3")


def test_an_event_loop_that_gives_up_waiting_does_not_end_the_operation():
    """Whoever answers would otherwise find a future that takes no answer, and so fail for all others."""

    async def case():
        future = Future()
        pending = Pending(future, str)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pending.async_wait(), 0.01)
        assert not future.cancelled()
        future.set_result(3)
        assert await pending == "3"

    asyncio.run(case())


@pytest.mark.parametrize("error", [PeerLost("gone"), WaitedTooLong("nothing came")], ids=["lost", "late"])
def test_the_operations_own_error_is_raised_as_it_is(error):
    future = Future()
    future.set_exception(error)
    with pytest.raises(type(error), match=str(error)):
        Pending(future, str).wait(1)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(Pending(future, str).async_wait())


def test_many_who_wait_get_one_result():
    future = Future()
    made = []

    def finish(answer):
        made.append(answer)
        return object()

    pending = Pending(future, finish)
    results = []
    threads = [threading.Thread(target=lambda: results.append(pending.wait(HANG_S))) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.set_result(1)
    for thread in threads:
        thread.join()
    assert made == [1]
    assert len(set(map(id, results))) == 1
