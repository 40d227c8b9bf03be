"""Shared memory: opened by real processes through /proc, counted, used again, and gone with the last who uses it."""

import gc
import multiprocessing
import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from roost.transport.shared_memory import (
    MAX_MAPS,
    MAX_SPARES,
    SMALLEST,
    NoRoom,
    SegmentMaps,
    SegmentPool,
    SegmentRef,
    Spares,
    needed,
    rounded,
)
from tests.limits import HANG_S

MIB = 1 << 20
forked = multiprocessing.get_context("fork")


@pytest.fixture
def pool():
    pool = SegmentPool(8 * MIB)
    yield pool
    pool.close()


def doubled(ref, places, answers):
    """In another process: read every buffer, write it doubled, tell what is released."""
    maps = SegmentMaps()
    views = maps.read(SegmentRef(*ref), places)
    arrays = [np.frombuffer(view, np.uint8) for view in views]
    for array in arrays:
        array *= 2
    sums = [int(array.sum()) for array in arrays]
    held = maps.take_released()
    del views, arrays, array
    gc.collect()
    answers.put((sums, held, maps.take_released()))


def held_forever(ref, places, answers):
    views = SegmentMaps().read(SegmentRef(*ref), places)
    answers.put(bytes(views[0][:3]))
    signal.pause()


def memory_of(ref):
    """Bytes of memory that a segment has pages for."""
    return os.fstat(ref.fd).st_blocks * 512


def test_two_processes_share_a_segment(pool):
    ref = pool.allocate(3 * MIB)
    maps = SegmentMaps()
    buffers = [np.full(size, value, np.uint8) for size, value in ((5, 3), (2 * MIB, 7), (0, 0), (64, 1))]
    places = maps.write(ref, [memoryview(buffer) for buffer in buffers])
    assert all(start % 64 == 0 for start, _ in places)
    answers = forked.Queue()
    other = forked.Process(target=doubled, args=(tuple(ref), places, answers))
    other.start()
    sums, while_held, released = answers.get(timeout=HANG_S)
    other.join()
    assert sums == [int(buffer.sum()) * 2 for buffer in buffers]
    assert (while_held, released) == ([], [ref.number])
    assert [bytes(view) for view in maps.read(ref, places)] == [bytes(buffer * 2) for buffer in buffers]


def test_a_reader_that_is_killed_leaves_the_memory_to_the_others(pool):
    ref = pool.allocate(1)
    maps = SegmentMaps()
    places = maps.write(ref, [memoryview(b"abc")])
    pool.share(ref.number, 1)
    answers = forked.Queue()
    other = forked.Process(target=held_forever, args=(tuple(ref), places, answers))
    other.start()
    assert answers.get(timeout=HANG_S) == b"abc"
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    pool.release(ref.number)  # on behalf of the dead one
    assert pool.used == SMALLEST
    assert bytes(maps.read(ref, places)[0]) == b"abc"
    pool.release(ref.number)
    assert pool.used == 0


def test_a_segment_is_released_when_the_last_of_its_views_is_gone(pool):
    maps = SegmentMaps()
    ref = pool.allocate(100)
    places = maps.write(ref, [memoryview(b"one"), memoryview(b"two")])
    one, two = maps.read(ref, places)
    array = np.frombuffer(two, np.uint8)[1:]
    del one, two
    gc.collect()
    assert maps.take_released() == []
    assert bytes(array) == b"wo"
    del array
    gc.collect()
    assert maps.take_released() == [ref.number]
    assert maps.take_released() == []


def test_a_message_without_buffers_is_released_at_once(pool):
    maps = SegmentMaps()
    ref = pool.allocate(1)
    assert maps.read(ref, []) == []
    gc.collect()
    assert maps.take_released() == [ref.number]


def test_views_outlive_the_mapping_that_a_worker_keeps():
    pool = SegmentPool((MAX_MAPS + 2) * MIB)
    maps = SegmentMaps()
    ref = pool.allocate(1)
    places = maps.write(ref, [memoryview(b"kept")])
    (view,) = maps.read(ref, places)
    for _ in range(MAX_MAPS + 1):
        maps.write(pool.allocate(1), [memoryview(b"other")])
    assert bytes(view) == b"kept"
    assert bytes(maps.read(ref, places)[0]) == b"kept"
    pool.close()


def test_a_freed_segment_is_used_again_for_the_same_size_only(pool):
    first = pool.allocate(2 * MIB)
    pool.release(first.number)
    assert pool.allocate(MIB) != first
    assert pool.allocate(2 * MIB - 1) == first
    assert pool.allocate(2 * MIB) != first


def test_a_segment_in_use_is_never_given_out_again(pool):
    first = pool.allocate(MIB)
    pool.share(first.number, 2)
    for _ in range(2):
        pool.release(first.number)
        assert pool.allocate(MIB).number != first.number
    pool.release(first.number)
    assert pool.allocate(MIB) == first


def test_releasing_what_is_free_already_changes_nothing(pool):
    first = pool.allocate(MIB)
    for _ in range(3):
        pool.release(first.number)
    assert pool.used == 0
    assert pool.allocate(MIB) != pool.allocate(MIB)


def test_the_limit_counts_free_segments_and_makes_room_of_them(pool):
    kept, *others = [pool.allocate(2 * MIB) for _ in range(4)]
    with pytest.raises(NoRoom, match=r"1,048,576 bytes requested, 8,388,608 of 8,388,608 in use"):
        pool.allocate(1)
    for ref in others:
        pool.release(ref.number)
    assert pool.total == 8 * MIB
    big = pool.allocate(6 * MIB)
    assert pool.total == 8 * MIB
    assert pool.used == 8 * MIB
    assert memory_of(kept) == memory_of(big) == 0
    assert pool.can_ever_hold(8 * MIB)
    assert not pool.can_ever_hold(8 * MIB + 1)


def test_a_dropped_segment_gives_its_memory_back_though_workers_keep_their_mappings(pool):
    maps = SegmentMaps()
    ref = pool.allocate(6 * MIB)
    maps.write(ref, [memoryview(bytes(6 * MIB))])
    assert memory_of(ref) >= 6 * MIB
    witness = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDONLY)
    pool.release(ref.number)
    pool.allocate(8 * MIB)
    assert os.fstat(witness).st_blocks == 0
    os.close(witness)


def test_closing_leaves_no_descriptor_behind():
    pool = SegmentPool(8 * MIB)
    held, free = pool.allocate(MIB), pool.allocate(2 * MIB)
    pool.release(free.number)
    pool.close()
    for ref in (held, free):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(ref.fd)
    assert pool.total == pool.used == 0


def spare(number, size):
    return SegmentRef(number, 1, number, rounded(size))


def test_spares_are_kept_one_of_a_size_and_the_oldest_goes():
    spares = Spares()
    assert spares.take(MIB) is None
    kept = [spare(number, (number + 1) * MIB) for number in range(MAX_SPARES)]
    assert [spares.keep(segment) for segment in kept] == [None] * MAX_SPARES
    double = spare(9, MIB)
    assert spares.keep(double) == double
    assert spares.keep(spare(10, 20 * MIB)) == kept[0]
    assert spares.take(2 * MIB) == kept[1]
    assert spares.take(2 * MIB) is None


@given(st.integers(0, 1 << 44))
def test_a_rounded_size_holds_what_is_asked_and_wastes_little(nbytes):
    size = rounded(nbytes)
    assert size >= nbytes
    assert size == rounded(size)
    assert size <= max(SMALLEST, nbytes + nbytes // 8 + 4096)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_what_is_written_is_read(buffers):
    pool, maps = SegmentPool(8 * MIB), SegmentMaps()
    try:
        ref = pool.allocate(needed([len(buffer) for buffer in buffers]))
        places = maps.write(ref, [memoryview(buffer) for buffer in buffers])
        assert [bytes(view) for view in maps.read(ref, places)] == buffers
    finally:
        pool.close()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 4 * MIB)), max_size=40))
def test_the_pool_counts_right_and_keeps_its_limit(steps):
    pool = SegmentPool(8 * MIB)
    users = {}
    try:
        for step, amount in steps:
            number = list(users)[amount % len(users)] if users else None
            if step == "allocate":
                try:
                    ref = pool.allocate(amount)
                except NoRoom:
                    assert pool.used + rounded(amount) > 8 * MIB
                    continue
                assert ref.number not in users
                users[ref.number] = [ref.size, 1]
            elif step == "share" and number is not None:
                pool.share(number, 2)
                users[number][1] += 2
            elif number is not None:
                pool.release(number)
                users[number][1] -= 1
                if not users[number][1]:
                    del users[number]
            assert pool.used == sum(size for size, _ in users.values())
            assert pool.used <= pool.total <= 8 * MIB
    finally:
        pool.close()
