"""Rendezvous stores for torch process groups, protected from other users as far as torch allows.

torch's TCPStore listens on every interface without authentication: anyone who reaches the port can read, change and
list its keys. So ranks on one machine use a file in a private folder. Ranks on several machines need the TCPStore,
which then listens on the job's own address only.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

BACKLOG = 2048  # torch's own


def file_store(path: Path, world_size: int, limit: timedelta) -> Store:
    """A store for ranks on one machine; the file must be new, in a private folder."""
    store = dist.FileStore(str(path), world_size)  # type: ignore[attr-defined]
    store.set_timeout(limit)
    return store


def tcp_store(address: str, port: int, world_size: int, is_master: bool, limit: timedelta) -> Store:
    """A TCPStore whose master listens on this address only; other ranks may connect before it listens."""
    listening = listen(address, port) if is_master else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        world_size,
        is_master=is_master,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening is not None else None,  # the store closes it
    )


def listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {address}:{port}: {error.strerror}") from error
