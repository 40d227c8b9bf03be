"""Scheduling decisions, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from roost.engines.protocol import Sampling
from roost.torch_engine.scheduler import BlockPool, Chunk, Request, Scheduler, Tracked

BLOCK = 4


def scheduler(blocks: int = 100, sequences: int = 10, tokens: int = 100, rows: int = 100) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), sequences, tokens, rows, lambda adapter: (adapter or "").encode())


def sequence(name: str, length: int, first: int = 0, scored: bool = False, adapter: str | None = None) -> Tracked:
    ids = tuple(range(first, first + length))
    request = Request(name, ids, Sampling(max_tokens=64), scored, adapter)
    return Tracked(request, lambda progress: None, seed=0, stop_ids=frozenset(), limit=length + 64)


def done(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    """The scheduled work after it was computed: sequences at their end get one more token."""
    for chunk in chunks:
        chunk.tracked.computed = chunk.end
        if chunk.makes_token:
            chunk.tracked.token_ids.append(1000 + chunk.end)
    return [(chunk.tracked.request.request_id, chunk.start, chunk.end) for chunk in chunks]


@dataclass(frozen=True)
class Case:
    limits: dict[str, int]
    sequences: tuple[tuple[str, int], ...]  # names and lengths; no two have a block in common
    steps: tuple[list[tuple[str, int, int]], ...]


CASES = {
    "all at once": Case({}, (("a", 3), ("b", 5)), ([("a", 0, 3), ("b", 0, 5)], [("a", 3, 4), ("b", 5, 6)])),
    "a long prompt in chunks": Case(
        {"tokens": 8}, (("a", 20),), ([("a", 0, 8)], [("a", 8, 16)], [("a", 16, 20)], [("a", 20, 21)])
    ),
    "what runs comes before what waits": Case(
        {"tokens": 8}, (("a", 4), ("b", 9)), ([("a", 0, 4), ("b", 0, 4)], [("a", 4, 5), ("b", 4, 9)])
    ),
    "no more than so many": Case({"sequences": 1}, (("a", 3), ("b", 3)), ([("a", 0, 3)], [("a", 3, 4)], [("a", 4, 5)])),
    "no room for the second": Case({"blocks": 4}, (("a", 9), ("b", 9)), ([("a", 0, 9)], [("a", 9, 10)])),
    "first come, first served": Case({"blocks": 4}, (("a", 9), ("b", 9), ("c", 1)), ([("a", 0, 9)], [("a", 9, 10)])),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps(case: Case) -> None:
    plans = scheduler(**case.limits)
    for place, (name, length) in enumerate(case.sequences):
        plans.add(sequence(name, length, first=100 * place))
    assert tuple(done(plans.plan()) for _ in case.steps) == case.steps


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    plans = scheduler()
    for name in "abc":
        plans.add(sequence(name, 10))
    assert done(plans.plan()) == [("a", 0, 10), ("b", 8, 10), ("c", 8, 10)]
    assert [each.cached_tokens for each in plans.running] == [0, 8, 8]
    assert plans.pool.count - plans.pool.free == 2 + 3


def test_the_last_token_is_always_computed() -> None:
    plans = scheduler()
    plans.add(sequence("a", 8))
    plans.add(sequence("b", 8))
    assert done(plans.plan()) == [("a", 0, 8), ("b", 4, 8)]


@pytest.mark.parametrize(
    "change", [{"adapter": "x"}, {"scored": True}, {"first": 1}], ids=["adapter", "scored", "other"]
)
def test_what_is_not_shared(change: dict[str, object]) -> None:
    plans = scheduler()
    plans.add(sequence("a", 10))
    plans.add(sequence("b", 10, **change))  # type: ignore[arg-type]
    assert done(plans.plan()) == [("a", 0, 10), ("b", 0, 10)]


def test_made_tokens_are_found_by_the_next_turn() -> None:
    plans = scheduler()
    first = sequence("a", 6)
    plans.add(first)
    for _ in range(6):
        done(plans.plan())
    plans.remove([first])
    following = sequence("b", 0)
    following.token_ids = [*first.token_ids, 7, 7]
    plans.add(following)
    assert done(plans.plan())[0] == ("b", 8, 14)


def test_what_was_forgotten_is_not_found_and_not_announced_again() -> None:
    plans = scheduler()
    plans.add(sequence("a", 6))
    done(plans.plan())
    plans.pool.forget_all()
    for _ in range(4):
        done(plans.plan())
    plans.add(sequence("b", 6))
    assert done(plans.plan())[-1] == ("b", 0, 6)


def test_the_last_to_arrive_gives_way_and_comes_back() -> None:
    plans = scheduler(blocks=5)
    older, newer = sequence("old", 8), sequence("new", 4, first=50)
    plans.add(older)
    plans.add(newer)
    steps = [done(plans.plan()) for _ in range(6)]
    assert steps[0] == [("old", 0, 8), ("new", 0, 4)]
    assert steps[5] == [("old", 12, 13)]
    assert (plans.running, list(plans.waiting), newer.blocks) == ([older], [newer], [])
    made = len(newer.token_ids)
    plans.remove([older])
    # Its first block was not needed by anyone else in the meantime.
    assert done(plans.plan()) == [("new", 4, made)]


def test_scored_prompts_share_the_rows() -> None:
    plans = scheduler(rows=6)
    for name in "ab":
        plans.add(sequence(name, 8, scored=True))
    assert [done(plans.plan()) for _ in range(3)] == [
        [("a", 0, 6)],
        [("a", 6, 8), ("b", 0, 4)],
        [("a", 8, 9), ("b", 4, 8)],
    ]


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    blocks=st.integers(10, 30),
    sequences=st.integers(1, 6),
    tokens=st.integers(6, 40),
    common=st.booleans(),
)
def test_everything_is_computed_in_order_and_ends(
    lengths: list[int], blocks: int, sequences: int, tokens: int, common: bool
) -> None:
    plans = scheduler(blocks, sequences, tokens)
    left = [sequence(str(place), length, 0 if common else 100 * place) for place, length in enumerate(lengths)]
    for each in left:
        plans.add(each)
    wanted = {each.request.request_id: len(each.token_ids) + 10 for each in left}
    for _ in range(2000):
        if not left:
            break
        chunks = plans.plan()
        assert chunks, "nothing is planned, though there is work"
        assert sum(chunk.size for chunk in chunks) <= tokens
        assert len(chunks) <= sequences
        for chunk in chunks:
            assert chunk.start == chunk.tracked.computed
            assert len(chunk.tracked.blocks) >= plans.pool.needed(chunk.end)
        done(chunks)
        ended = [each for each in left if len(each.token_ids) >= wanted[each.request.request_id]]
        plans.remove(ended)
        left = [each for each in left if each not in ended]
    assert not left
    assert plans.pool.free == blocks
