"""The HTTP face of the simulated API server."""

from .server import ApiServer

__all__ = ["ApiServer"]
