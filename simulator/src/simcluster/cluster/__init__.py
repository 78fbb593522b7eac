"""A Kubernetes API server in memory: pure and synchronous; clock and random numbers are passed in."""
