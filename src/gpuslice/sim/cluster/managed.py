from __future__ import annotations

from .metadata import same_content as same


def record(*args, **kw):
    pass
