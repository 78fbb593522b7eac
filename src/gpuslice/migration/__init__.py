"""Migrating a cluster from another system, switching nodes to claims, and back: plans, and their writes."""
