"""The names of a job: found when they are there, waited for when they are not."""

import asyncio

import pytest

from roost.transport.context import Address, Failure, FailureKind
from roost.transport.directory import ChannelEntry, Directory, GroupEntry

ACTOR = GroupEntry("actor", (0, 1))
LONG = 60.0


def failure(number):
    return Failure(Address("actor", number), FailureKind.DIED, f"failure {number}", number)


@pytest.mark.parametrize("timeout", [0, 0.01, LONG], ids=str)
def test_what_is_there_is_found_without_waiting(timeout):
    async def case():
        directory = Directory()
        await directory.add_group(ACTOR)
        channel = await directory.add_channel(ChannelEntry("c", 1, 4))
        assert await directory.group("actor", timeout) == ACTOR
        assert await directory.channel("c", timeout) == channel

    asyncio.run(case())


def test_all_who_wait_for_a_name_get_it_when_it_comes():
    async def case():
        directory = Directory()
        waiting = [asyncio.ensure_future(directory.group("actor", LONG)) for _ in range(3)]
        channel = asyncio.ensure_future(directory.channel("c", LONG))
        waiting[1].cancel()
        await asyncio.sleep(0)
        await directory.add_group(ACTOR)
        assert await waiting[0] == await waiting[2] == ACTOR
        assert not channel.done()
        await directory.add_channel(ChannelEntry("c", 0, 0))
        assert (await channel).name == "c"

    asyncio.run(case())


def test_a_name_that_never_comes_is_named():
    async def case():
        directory = Directory()
        with pytest.raises(LookupError, match=r"no group is called actr \(waited 0.01 s\)"):
            await directory.group("actr", 0.01)
        with pytest.raises(LookupError, match=r"no channel is called c \(waited 0 s\)"):
            await directory.channel("c", 0)
        await directory.add_group(ACTOR)  # who gave up does not hold up the others
        assert await directory.group("actor", 0) == ACTOR

    asyncio.run(case())


def test_a_group_that_comes_and_goes_while_somebody_waits_is_either_found_or_waited_for():
    async def case():
        directory = Directory()
        waiting = asyncio.ensure_future(directory.group("actor", LONG))
        await asyncio.sleep(0)
        await directory.add_group(ACTOR)
        await directory.remove_group("actor")
        for _ in range(5):
            await asyncio.sleep(0)
        if not waiting.done():
            await directory.add_group(ACTOR)
        assert await waiting == ACTOR

    asyncio.run(case())


def test_a_groups_name_is_taken_once_and_free_when_it_is_closed():
    async def case():
        directory = Directory()
        await directory.add_group(ACTOR)
        with pytest.raises(ValueError, match="there is a group actor already"):
            await directory.add_group(ACTOR._replace(nodes=(3,)))
        await directory.remove_group("actor")
        await directory.remove_group("actor")
        await directory.add_group(ACTOR._replace(nodes=(3,)))
        assert directory.groups() == (GroupEntry("actor", (3,)),)

    asyncio.run(case())


def test_two_who_make_one_channel_get_the_same():
    async def case():
        directory = Directory()
        first = await directory.add_channel(ChannelEntry("c", 0, 4))
        assert await directory.add_channel(ChannelEntry("c", 1, 8)) == first

    asyncio.run(case())


def test_failures_are_told_once_each_to_whoever_counts_them():
    async def case():
        directory = Directory()
        await directory.add_failure(failure(0))
        assert await directory.failures_after(0) == (1, [failure(0)])
        waiting = [asyncio.ensure_future(directory.failures_after(1)) for _ in range(2)]
        await asyncio.sleep(0)
        await directory.add_failure(failure(1))
        assert [await wait for wait in waiting] == [(2, [failure(1)])] * 2
        assert await directory.failures_after(0) == (2, [failure(0), failure(1)])

    asyncio.run(case())


def test_a_spent_channel_is_replaced_once():
    async def case():
        directory = Directory()
        spent = await directory.add_channel(ChannelEntry("c", 0, 4))
        new = await directory.replace_channel(spent, ChannelEntry("c", 1, 8))
        assert new == ChannelEntry("c", 1, 8, serial=1)
        assert await directory.replace_channel(spent, ChannelEntry("c", 2, 9)) == new
        assert await directory.channel("c", 0) == new

    asyncio.run(case())
