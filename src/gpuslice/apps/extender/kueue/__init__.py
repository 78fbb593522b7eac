"""Kueue, the queue of jobs: which of its workloads cards can hold."""
