"""The Ray actor of a node daemon. Every worker holds its handle and imports this file, so keep it small."""

from __future__ import annotations

from typing import Any


class NodeDaemonActor:
    """Runs a node daemon and forwards calls to it."""

    def __init__(self, *args: Any) -> None:
        from roost.runtime.node_daemon import NodeDaemon

        self._daemon = NodeDaemon(*args)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the daemon."""
        return await getattr(self._daemon, method)(*args)
