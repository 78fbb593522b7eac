"""The controllers of kube-controller-manager that workloads need: pure decisions and one runner."""
