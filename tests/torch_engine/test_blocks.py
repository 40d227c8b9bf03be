"""The block pool keeps its books, whatever is done in whatever order."""

from __future__ import annotations

import ctypes
import mmap

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roost.torch_engine.scheduler import ROOT, BlockPool, LayerShape, bytes_per_block, hash_block, new_cache

COUNT, SIZE = 6, 2
NAMES = [hash_block(ROOT, [number]) for number in range(5)]


class Books(RuleBasedStateMachine):
    """Sequences that take, share and give back blocks; `contents` is what each block was filled with last."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(COUNT, SIZE)
        self.held: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @precondition(lambda self: self.pool.free > 0)
    @rule(name=st.sampled_from(NAMES), tells=st.booleans())
    def fill(self, name: bytes, tells: bool) -> None:
        block = self.pool.take()
        assert all(block not in blocks for blocks in self.held)
        self.contents[block] = name
        self.held.append([block])
        if tells:
            self.pool.announce(block, name)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    def share(self, names: list[bytes]) -> None:
        found = self.pool.find(names)
        free, idle = self.pool.free, self.pool.idle(found)
        self.pool.share(found)
        assert self.pool.free == free - idle
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def forget_all(self) -> None:
        epoch = self.pool.epoch
        self.pool.forget_all()
        assert self.pool.epoch == epoch + 1
        assert not any(self.pool.find([name]) for name in NAMES)

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        assert self.pool.free == COUNT - len({block for blocks in self.held for block in blocks})

    @invariant()
    def what_is_found_holds_what_its_name_says(self) -> None:
        for name in NAMES:
            assert all(self.contents[block] == name for block in self.pool.find([name]))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_name_stands_for_all_that_comes_before() -> None:
    first, other = hash_block(ROOT, [1, 2]), hash_block(ROOT, [1, 3])
    assert hash_block(first, [4, 5]) != hash_block(other, [4, 5])
    assert hash_block(b"adapter", [1, 2]) != first


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    pool = BlockPool(2, SIZE)
    blocks = [pool.take(), pool.take()]
    for block, name in zip(blocks, NAMES[:2], strict=True):
        pool.announce(block, name)
    pool.release(blocks)
    assert pool.take() == blocks[1]
    assert pool.find(NAMES[:2]) == [blocks[0]]


def test_a_cache_on_the_host_takes_memory_only_where_it_is_used() -> None:
    layer, blocks = LayerShape(2, 64, 64), 1 << 16
    whole = blocks * bytes_per_block([layer], 16, torch.bfloat16)
    [(keys, values)] = new_cache([layer], blocks, 16, torch.bfloat16, torch.device("cpu"))
    assert keys.shape == values.shape == (blocks + 1, 16, 2, 64) and keys.dtype is torch.bfloat16
    keys[7] = 1.0
    assert keys[7].sum() == 16 * 2 * 64 and not keys[8].any() and not values[7].any()
    assert whole == 1 << 29 and resident(keys) + resident(values) < whole // 8
    assert resident(torch.zeros(1 << 22)) >= 1 << 24, "memory that was written counts"


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's pages that are in memory; those of the whole process change with its other threads."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
