"""Several things done at once: errors are collected, and a cancelled one leaves nothing unawaited."""

import asyncio
import gc
import warnings

import pytest

from roost.engines.protocol import EngineError
from roost.engines.weights.sync import outcomes_of


async def fails(error):
    raise error


async def works():
    return "done"


def test_errors_of_engines_are_collected():
    lost = EngineError("lost")
    assert asyncio.run(outcomes_of([works(), fails(lost)])) == [None, lost]
    with pytest.raises(KeyError):
        asyncio.run(outcomes_of([works(), fails(KeyError("other"))]))


def test_cancelled_before_they_run():
    async def cancelled():
        task = asyncio.ensure_future(outcomes_of([works(), works()]))
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    gc.collect()  # what other tests left is not warned about below
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(cancelled())
        gc.collect()
    assert [str(each.message) for each in caught] == []
