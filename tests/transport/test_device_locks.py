"""Locks on shared devices: one holder, first come first served, nobody waits for what is free."""

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from roost.transport.context import Address
from roost.transport.exchange import DeviceLocks

A, B, C = (Address(name, 0) for name in ("actor", "rollout", "reward"))


async def tick():
    for _ in range(3):
        await asyncio.sleep(0)


def test_first_come_first_served():
    async def case():
        locks = DeviceLocks()
        first, second, third = (locks.acquire(who, [0]) for who in (A, B, C))
        assert [lock.done() for lock in (first, second, third)] == [True, False, False]
        locks.release(A, [0])
        assert [second.done(), third.done()] == [True, False]
        locks.release(B, [0])
        assert third.done()

    asyncio.run(case())


def test_several_devices_come_all_at_once_and_are_not_snatched_away():
    async def case():
        locks = DeviceLocks()
        locks.acquire(A, [0])
        both = locks.acquire(B, [0, 1])
        other = locks.acquire(C, [1])
        assert locks.holders([0, 1]) == {0: A}
        assert not other.done(), "who comes later must not take what the other waits for"
        locks.release(A, [0])
        assert both.done()
        assert locks.holders([0, 1]) == {0: B, 1: B}
        locks.release(B, [0, 1])
        assert other.done()

    asyncio.run(case())


def test_a_holder_may_come_again_even_while_others_wait():
    async def case():
        locks = DeviceLocks()
        locks.acquire(A, [0])
        waiting = locks.acquire(B, [0])
        assert locks.acquire(A, [0]).done()
        assert locks.acquire(A, [0, 1]).done()
        for devices in ([0, 1], [0]):
            locks.release(A, devices)
            assert not waiting.done()
        locks.release(A, [0])
        assert waiting.done()
        assert locks.holders([0, 1]) == {0: B}

    asyncio.run(case())


def test_a_waiter_that_gives_up_makes_way():
    async def case():
        locks = DeviceLocks()
        locks.acquire(A, [0])
        gives_up = locks.acquire(B, [0, 1])
        behind = locks.acquire(C, [1])
        gives_up.cancel()
        await tick()
        assert behind.done(), "device 1 is free and nobody waits for it any more"

    asyncio.run(case())


WRONG = {
    "held by nobody": ([], [0], "device 0, held by nobody"),
    "held by another": ([(B, [0])], [0], "device 0, held by rollout:0"),
    "held in part": ([(A, [0]), (B, [1])], [0, 1], "device 1, held by rollout:0"),
}


@pytest.mark.parametrize("held, given_back, text", WRONG.values(), ids=WRONG)
def test_giving_back_what_one_does_not_hold_changes_nothing(held, given_back, text):
    async def case():
        locks = DeviceLocks()
        for who, devices in held:
            locks.acquire(who, devices)
        before = locks.holders(range(4))
        with pytest.raises(ValueError, match=text):
            locks.release(A, given_back)
        assert locks.holders(range(4)) == before

    asyncio.run(case())


def test_giving_back_twice_is_an_error_that_does_not_hurt_the_next_holder():
    async def case():
        locks = DeviceLocks()
        locks.acquire(A, [0, 0])  # a device named twice counts once
        locks.acquire(B, [0])
        locks.release(A, [0, 0])
        with pytest.raises(ValueError, match="held by rollout:0"):
            locks.release(A, [0])
        assert locks.holders([0]) == {0: B}

    asyncio.run(case())


def test_what_a_lost_holder_held_and_waited_for_is_free():
    async def case():
        locks = DeviceLocks()
        locks.acquire(A, [0, 1])
        locks.acquire(A, [0])
        locks.acquire(B, [2])
        locks.acquire(A, [2, 3])
        next_one, other = locks.acquire(C, [0, 1]), locks.acquire(C, [3])
        assert locks.release_all(A) == (0, 1)
        assert next_one.done()
        assert other.done()
        assert locks.release_all(A) == ()

    asyncio.run(case())


steps = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release", "give up", "die"]),
        st.sampled_from([A, B, C]),
        st.frozensets(st.integers(0, 3), min_size=1),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(steps)
def test_a_device_has_one_holder_and_the_first_in_line_waits_only_for_a_holder(steps):
    async def case():
        locks = DeviceLocks()
        asked = []
        for step, who, devices in steps:
            mine = [entry for entry in asked if entry[0] == who]
            match step:
                case "acquire":
                    asked.append((who, devices, locks.acquire(who, devices)))
                case "release":
                    for entry in [entry for entry in mine if entry[2].done()][:1]:
                        locks.release(who, entry[1])
                        asked.remove(entry)
                case "give up":
                    for entry in [entry for entry in mine if not entry[2].done()][:1]:
                        entry[2].cancel()
                        asked.remove(entry)
                case "die":
                    locks.release_all(who)
                    asked = [entry for entry in asked if entry[0] != who]
            await tick()
            held = {(device, who) for who, devices, lock in asked if lock.done() for device in devices}
            assert held == {(device, who) for device, who in locks.holders(range(4)).items()}
            first = next((entry for entry in asked if not entry[2].done()), None)
            if first is not None:
                assert set(locks.holders(first[1]).values()) - {first[0]}, "the first in line waits for nobody"

    asyncio.run(case())
