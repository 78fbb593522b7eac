from __future__ import annotations


def validate_create(cluster, resource, obj):
    pass


def validate_update(cluster, resource, old, obj, sub):
    pass
