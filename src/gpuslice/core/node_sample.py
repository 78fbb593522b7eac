"""How many nodes kube-scheduler looks at for one pod, and so shows an extender."""

_EVERYBODY_BELOW = 100
"""Nodes; of so few it looks at each."""


def sample_size(nodes: int, percentage: int = 0) -> int:
    """How many feasible nodes it looks for (``numFeasibleNodesToFind`` of 1.36).

    `percentage` is its ``percentageOfNodesToScore``; 0 lets it choose by the size of the cluster.
    """
    if nodes < _EVERYBODY_BELOW or percentage >= 100:
        return nodes
    percentage = percentage or max(5, 50 - nodes // 125)
    return max(_EVERYBODY_BELOW, nodes * percentage // 100)
