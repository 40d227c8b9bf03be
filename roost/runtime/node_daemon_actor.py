"""The Ray actor of a node's daemon. Every worker holds its handle and imports this file, so it is small."""

from __future__ import annotations

from typing import Any


class NodeDaemonActor:
    """Runs an daemon, and passes on what it is asked."""

    def __init__(self, *args: Any) -> None:
        from roost.runtime.node_daemon import NodeDaemon

        self._daemon = NodeDaemon(*args)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the daemon."""
        return await getattr(self._daemon, method)(*args)
