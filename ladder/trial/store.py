"""The store at which the ranks of a process group meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


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
