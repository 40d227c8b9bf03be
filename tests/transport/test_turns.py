"""OrderedLocks: in order where a key is shared, at once where none is."""

import asyncio
import random

import pytest

from roost.transport.mailboxes import OrderedLocks

ROWS = {
    "one row": ["a", "a", "a"],
    "rows that cross": ["a", "ab", "b", "bc", "c"],
    "all at once": ["a", "b", "c"],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("seed", range(5))
def test_who_shares_a_key_comes_in_order_whoever_gives_up(rows, seed):
    async def case():
        chance, turns, went = random.Random(seed), OrderedLocks(), []

        async def go(number, keys, turn):
            with turn:
                if number and chance.random() < 0.3:
                    return  # gives up before its turn has come
                assert await turn.wait_turn()
                for _ in range(chance.randrange(5)):
                    await asyncio.sleep(0)
                went.append((number, keys))

        taken = [(number, keys, turns.take(keys)) for number, keys in enumerate(rows * 5)]
        chance.shuffle(taken)
        await asyncio.gather(*(go(*each) for each in taken))
        for key in "abc":
            numbers = [number for number, keys in went if key in keys]
            assert numbers == sorted(numbers)
        assert len(turns) == 0

    asyncio.run(case())


def test_a_turn_that_does_not_come_in_time():
    async def case():
        turns = OrderedLocks()
        first, second, other = turns.take("a"), turns.take("a"), turns.take("b")
        assert await first.wait_turn(0)
        assert await other.wait_turn(0)
        assert not await second.wait_turn(0)
        assert not await second.wait_turn(0.01)
        third = turns.take("a")
        second.end()
        assert not await third.wait_turn(0), "the first is not through"
        first.end()
        assert await third.wait_turn()
        third.end()
        other.end()
        assert len(turns) == 0

    asyncio.run(case())


@pytest.mark.parametrize("ending", ["done", "raises", "cancelled before it began"])
def test_a_turn_ends_with_the_work_it_is_spent_on(ending):
    async def case():
        async def work():
            if ending == "raises":
                raise ValueError

        turns = OrderedLocks()
        task = turns.take("a").run_then_release(work())
        if ending == "cancelled before it began":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await turns.take("a").wait_turn(1)

    asyncio.run(case())
