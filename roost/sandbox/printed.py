"""What a sandbox prints: the beginning and the end are kept, the middle is left out."""

from __future__ import annotations

import codecs


class Printed:
    """The output of one execution, in bounded memory.

    >>> printed = Printed(limit=10)
    >>> printed.add(b"0123456789abcdef")
    >>> printed.text()
    '01234\\n[6 characters left out]\\nbcdef'
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = ""
        self._end = ""
        self._characters = 0
        self.size = 0  # in bytes, of everything

    def add(self, data: bytes) -> None:
        """More of it, cut anywhere."""
        self.size += len(data)
        self._keep(self._decoder.decode(data))

    def text(self) -> str:
        """What is shown of it."""
        self._keep(self._decoder.decode(b"", final=True))
        if self._characters <= self._limit:
            return self._start + self._end
        first = self._limit // 2
        last = self._limit - first
        left_out = self._characters - self._limit
        return f"{self._start[:first]}\n[{left_out} characters left out]\n{(self._start + self._end)[-last:]}"

    def _keep(self, text: str) -> None:
        self._characters += len(text)
        room = self._limit - len(self._start)
        self._start += text[:room]
        self._end = (self._end + text[room:])[-self._limit :]
