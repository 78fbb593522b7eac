"""What can be wrong with a message."""

from __future__ import annotations

from gpuslice.core.errors import GpusliceError


class MalformedError(GpusliceError):
    """The body is not what the endpoint takes; the message is for the caller."""
