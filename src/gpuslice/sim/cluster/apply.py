from __future__ import annotations

from gpuslice.sim.cluster.errors import unsupported_media_type


def apply(cluster, target, request):
    raise unsupported_media_type("x")
    yield
