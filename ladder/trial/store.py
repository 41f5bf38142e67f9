"""Where the ranks of a process group meet."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def meeting_point(address: str, port: int, ranks: int) -> tuple[socket.socket, int]:
    """A socket that rank 0 serves, and its port: if that is 0, bound here, so that no other process can take it."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if port == 0:
        listener.bind((address, 0))
        listener.listen(ranks)
        port = listener.getsockname()[1]
    return listener, port


def store_at(address: str, port: int, world_size: int, listening: int | None, *, seconds: float) -> Any:
    """That of all ranks; `listening` is the descriptor of its socket in the process that serves it, None in others."""
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without declaring so
        address,
        port,
        world_size,
        listening is not None,
        timedelta(seconds=seconds),
        master_listen_fd=listening,
        use_libuv=False,  # with it torch 2.6 takes no descriptor
    )
