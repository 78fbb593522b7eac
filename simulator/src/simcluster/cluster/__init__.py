"""A Kubernetes API server in memory: pure, synchronous, with the clock and the dice handed in."""
