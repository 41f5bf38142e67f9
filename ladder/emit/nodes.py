"""Starting a training on several nodes: one copy of the launcher runs on each, and they meet on the first."""

from __future__ import annotations

PORT = 29500
"""Where the copies meet, unless MASTER_PORT says otherwise. Chosen: torchrun's own default."""


def finding(num_nodes: int) -> list[str]:
    """Lines for a shell that set `head`, the first node's address, and `port`; none for one node."""
    if num_nodes == 1:
        return []
    listed = "${SLURM_JOB_NODELIST:?set MASTER_ADDR to the address of the first node}"
    return [
        f"# One copy of this runs on each of {num_nodes} nodes; they meet on the first.",
        f'head=${{MASTER_ADDR:-$(scontrol show hostnames "{listed}" | head -n 1)}}',
        f"port=${{MASTER_PORT:-{PORT}}}",
    ]


def number_of_node() -> str:
    """A shell word for the number of the node on which it is evaluated."""
    return '"${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK to the number of this node, from 0}}"'


def accelerate_options(num_nodes: int) -> str:
    """For `accelerate launch` behind `finding`, without the number of the node."""
    return ' --main_process_ip "$head" --main_process_port "$port"' if num_nodes > 1 else ""


def on_this_node(num_nodes: int) -> str:
    """Options for `accelerate launch` behind `finding`, evaluated on the node itself."""
    return f" --machine_rank {number_of_node()}{accelerate_options(num_nodes)}" if num_nodes > 1 else ""


def torchrun_options(world_size: int, num_nodes: int) -> str:
    """For torchrun; on several nodes behind `finding`."""
    if num_nodes == 1:
        return f"--standalone --nproc_per_node {world_size}"
    return (
        f"--nnodes {num_nodes} --nproc_per_node {world_size // num_nodes} --rdzv_backend c10d "
        '--rdzv_id "${SLURM_JOB_ID:-ladder}" --rdzv_endpoint "$head:$port"'
    )
