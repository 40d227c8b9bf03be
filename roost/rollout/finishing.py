"""The end of workers that hold something: each is asked to let go of it, and has so long."""

from __future__ import annotations

import asyncio
from typing import Any

from roost.runtime.group import WorkerGroup, ref_future


async def finish_workers(group: WorkerGroup, limit_s: float) -> None:
    """Call `finish` on each worker, however the run ended: robots stand still then, and servers end.

    Each is waited for by itself, as what was lost elsewhere is no reason not to; one that is gone holds nothing.
    """
    asked: list[asyncio.Future[Any]] = [asyncio.ensure_future(ref_future(host.finish.remote())) for host in group.hosts]
    await asyncio.wait(asked, timeout=limit_s)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
