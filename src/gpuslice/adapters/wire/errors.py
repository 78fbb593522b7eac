"""What can be wrong with a message."""

from __future__ import annotations

import msgspec

from gpuslice.core.errors import GpusliceError

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be; strings that are no UTF-8 are apart."""


class MalformedError(GpusliceError):
    """The body is not what the endpoint takes; the message is for the caller."""
