"""The Ray actor of a node's agent. Whoever holds its handle imports this file, every worker among them: it is small."""

from __future__ import annotations

from typing import Any


class NodeDaemonActor:
    """Runs an agent, and passes on what it is asked."""

    def __init__(self, *args: Any) -> None:
        from roost.runtime.node_daemon import NodeDaemon

        self._agent = NodeDaemon(*args)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the agent."""
        return await getattr(self._agent, method)(*args)
