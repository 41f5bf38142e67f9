"""Trials on several nodes: an agent on each runs its ranks as on a host of its own, and one launcher joins them.

The agents are started by what the cluster has (srun, ssh), and talk over the pipes of that program alone: no port of
ours is open to anybody. When a pipe ends, for whatever reason, its agent ends its ranks and itself.
"""
