"""Nodes named for waiting pods before kube-scheduler asks about them."""
