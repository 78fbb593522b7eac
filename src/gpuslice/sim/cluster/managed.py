from __future__ import annotations


def record(*args, **kw):
    pass
