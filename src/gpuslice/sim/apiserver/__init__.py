"""The HTTP face of the simulated API server."""

from gpuslice.sim.apiserver.server import ApiServer

__all__ = ["ApiServer"]
