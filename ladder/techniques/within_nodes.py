"""What techniques share that keep exchanges inside a node. They have an effect only with several nodes."""

from __future__ import annotations

from ladder.candidates import Problem, Rung, Technique


class WithinNodes(Technique):
    """The ranks of each node form a group."""

    slot = "nodes"
    is_tried_everywhere = True
    changes_states = True

    def __init__(self, ranks: int = 0) -> None:
        self.ranks = ranks

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash((self.name, self.ranks))

    def on(self, problem: Problem) -> Technique:
        return self.in_groups_of(problem.world_size // problem.num_nodes)

    def in_groups_of(self, ranks: int) -> Technique:
        if ranks < 2:
            raise KeyError(self.name)
        return type(self)(ranks)

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """With several nodes that all have the same number of GPUs, two or more: a group of one divides nothing."""
        ranks, nodes = problem.world_size, problem.num_nodes
        return nodes > 1 and ranks % nodes == 0 and ranks // nodes > 1
