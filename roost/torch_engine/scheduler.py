"""Which tokens of which sequences are computed next: first come, first served, as far as blocks and a step reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from roost.torch_engine.blocks import BlockPool, block_hash
from roost.torch_engine.sequence import Chunk, Tracked

SOON = 16  # tokens: those that run get the blocks for so many before anything new is let in


class Scheduler:
    """Sequences that wait and sequences that run; those that run are in the order in which they arrived."""

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        max_batch_tokens: int,
        max_logit_rows: int,
        root_of: Callable[[str | None], bytes],
    ) -> None:
        self.pool = pool
        self.waiting: deque[Tracked] = deque()
        self.running: list[Tracked] = []
        self._max_sequences = max_sequences
        self._max_batch_tokens = max_batch_tokens
        self._max_logit_rows = max_logit_rows
        self._root_of = root_of  # what the names of blocks start from, by adapter

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, tracked: Tracked) -> None:
        self.waiting.append(tracked)

    def remove(self, gone: Collection[Tracked]) -> None:
        """Forget these sequences, which ended."""
        for tracked in gone:
            self._take_blocks_from(tracked)
        self.running = [each for each in self.running if each not in gone]
        if any(each in gone for each in self.waiting):
            self.waiting = deque(each for each in self.waiting if each not in gone)

    def preempt_all(self) -> None:
        """Take their blocks from all that run; they are computed again later."""
        while self.running:
            self._preempt_last()

    def plan(self) -> list[Chunk]:
        """The next step. What runs comes before what waits, and has room before anything new is let in."""
        chunks: list[Chunk] = []
        tokens, rows = self._max_batch_tokens, self._max_logit_rows
        before = len(self.running)
        while len(chunks) < len(self.running) and tokens > 0:
            tracked = self.running[len(chunks)]
            chunk = self._next_chunk(tracked, tokens, rows)
            if self._grow(tracked, chunk.end):
                chunks.append(chunk)
                tokens, rows = tokens - chunk.size, rows - chunk.scored_rows
        had_to_preempt = len(self.running) < before
        while self.waiting and tokens > 0 and not had_to_preempt and len(self.running) < self._max_sequences:
            tracked = self.waiting[0]
            if (tracked.is_scored and rows == 0) or not self._admit(tracked):
                break
            chunk = self._next_chunk(tracked, tokens, rows)
            self._announce(chunk)
            chunks.append(chunk)
            tokens, rows = tokens - chunk.size, rows - chunk.scored_rows
        return [chunk for chunk in chunks if chunk.size > 0]

    def _next_chunk(self, tracked: Tracked, tokens: int, rows: int) -> Chunk:
        size = min(tokens, rows) if tracked.is_scored else tokens
        return Chunk(tracked, tracked.computed, min(tracked.computed + size, len(tracked.token_ids)))

    def _grow(self, tracked: Tracked, end: int) -> bool:
        """Give a running sequence blocks up to `end`, if need be those of the last to arrive, which may be itself."""
        while len(tracked.blocks) < self.pool.needed(end):
            if self.pool.free:
                tracked.blocks.append(self.pool.take())
            elif self._preempt_last() is tracked:
                return False
        self._announce(Chunk(tracked, tracked.computed, end))
        return True

    def _admit(self, tracked: Tracked) -> bool:
        """Let the first that waits run, with blocks for all its tokens, if there are enough."""
        names = [] if tracked.is_scored else list(self._names(tracked))
        found = self.pool.find(names)
        missing = self.pool.needed(len(tracked.token_ids)) - len(found)
        if missing + self.pool.idle(found) + self._needed_soon() > self.pool.free:
            return False
        self.pool.share(found)
        tracked.blocks = found + [self.pool.take() for _ in range(missing)]
        tracked.hashes = names[: len(found)]
        tracked.epoch = self.pool.epoch
        tracked.computed = len(found) * self.pool.block_size
        if tracked.made == 0:
            tracked.cached_tokens = tracked.computed
        self.running.append(self.waiting.popleft())
        return True

    def _needed_soon(self) -> int:
        """Blocks without which those that run would soon take theirs from what is let in now."""
        return sum(
            self.pool.needed(min(len(each.token_ids) + SOON, each.limit)) > len(each.blocks) for each in self.running
        )

    def _names(self, tracked: Tracked) -> Iterator[bytes]:
        """The names of the full blocks that may be found: the last token is always computed, to have its logits."""
        size, name = self.pool.block_size, self._root_of(tracked.request.adapter)
        for end in range(size, len(tracked.token_ids), size):
            name = block_hash(name, tracked.token_ids[end - size : end])
            yield name

    def _announce(self, chunk: Chunk) -> None:
        """Let others find the blocks that this chunk fills: in each layer all keys are written before any is read."""
        tracked, size = chunk.tracked, self.pool.block_size
        if tracked.epoch != self.pool.epoch:
            return
        for index in range(len(tracked.hashes), chunk.end // size):
            before = tracked.hashes[-1] if tracked.hashes else self._root_of(tracked.request.adapter)
            name = block_hash(before, tracked.token_ids[index * size : (index + 1) * size])
            tracked.hashes.append(name)
            self.pool.announce(tracked.blocks[index], name)

    def _preempt_last(self) -> Tracked:
        tracked = self.running.pop()
        self._take_blocks_from(tracked)
        tracked.computed = 0
        tracked.prompt_logprobs.clear()
        self.waiting.appendleft(tracked)
        return tracked

    def _take_blocks_from(self, tracked: Tracked) -> None:
        self.pool.give_back(tracked.blocks)
        tracked.blocks, tracked.hashes, tracked.gathered = [], [], None
