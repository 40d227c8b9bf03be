"""Parts of `roost up` that need no other node."""

import asyncio

import pytest

pytest.importorskip("ray")

from roost.cluster.allocation import Allocation
from roost.runtime.up.launcher import Head, UpOptions


class Broken(Head):
    async def _work(self):
        raise KeyError("rank")


def test_an_unexpected_error_ends_the_job():
    said = []
    options = UpOptions(("true",), timeout=10.0, grace=1.0)
    assert asyncio.run(Broken(Allocation(rank=0, nodes=1), options, {}, said.append).run()) == 1
    assert said == ["KeyError: 'rank'"]


def test_a_closed_terminal_does_not_keep_the_job_from_its_end():
    def say(text):
        raise OSError("the terminal is gone")

    options = UpOptions(("true",), timeout=10.0, grace=1.0)
    assert asyncio.run(Broken(Allocation(rank=0, nodes=1), options, {}, say).run()) == 1
