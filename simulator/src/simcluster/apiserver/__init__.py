"""The HTTP face of the simulated API server."""

from simcluster.apiserver.server import ApiServer

__all__ = ["ApiServer"]
