"""The one link of a process, made when it is first needed: many workers never need it, and loading it takes time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from roost.runtime.address import Address
from roost.runtime.process import AgentContact

if TYPE_CHECKING:
    from roost.runtime.link import AgentLink


class ProcessLink:
    """Makes the link when it is first used, and makes another in a process that was forked."""

    def __init__(self, who: Address, agent: AgentContact) -> None:
        self._who, self._agent = who, agent
        self._link: AgentLink | None = None
        self._pid = -1
        self._making = threading.Lock()

    def get(self) -> AgentLink:
        from roost.runtime.link import AgentLink

        if self._link is None or self._pid != os.getpid():
            with self._making:
                if self._link is None or self._pid != os.getpid():
                    self._link, self._pid = AgentLink(self._who, self._agent), os.getpid()
        return self._link

    @property
    def is_open(self) -> bool:
        return self._link is not None and self._pid == os.getpid()

    def close(self) -> None:
        if self._link is not None and self._pid == os.getpid():
            self._link.close()
        self._link = None
