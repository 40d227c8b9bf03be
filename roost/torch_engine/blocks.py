"""Which blocks of the key-value cache are used by whom, and which prompts they can be found for."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

ROOT = b""


def block_hash(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Names a full block by its tokens and by all that come before it, since keys and values depend on both."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks with reference counts. A block that nobody uses any more can still be found until it is needed.

    >>> pool = BlockPool(count=4, block_size=2)
    >>> block = pool.take()
    >>> pool.announce(block, name := block_hash(ROOT, [1, 2]))
    >>> pool.give_back([block])
    >>> pool.find([name]) == [block], pool.free
    (True, 4)
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.epoch = 0  # goes up when everything is forgotten
        self._users = [0] * count
        self._names: list[bytes | None] = [None] * count
        self._by_name: dict[bytes, int] = {}
        self._blank = list(range(count - 1, -1, -1))
        self._idle: dict[int, None] = {}  # unused, but can be found; the longest unused first

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """The blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of these names, up to the first that is not there."""
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each of these blocks, which were found."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] += 1

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these count as free now, and would no more if they were shared."""
        return sum(block in self._idle for block in blocks)

    def take(self) -> int:
        """A block for new contents; the one that was unused for longest loses what it held."""
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        self._users[block] = 1
        return block

    def announce(self, block: int, name: bytes) -> None:
        """From now on the block is found by this name, unless another one is already."""
        if name not in self._by_name and self._names[block] is None:
            self._by_name[name] = block
            self._names[block] = name

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less for each of a sequence's blocks; its end is reused before its beginning."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._names[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def forget_all(self) -> None:
        """No block is found any more; those in use keep their contents for their users alone."""
        self.epoch += 1
        self._by_name.clear()
        self._names = [None] * self.count
        self._blank += self._idle
        self._idle.clear()

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None
