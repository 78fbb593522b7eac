"""What all tests of the simulated cluster share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("simulator", deadline=None)  # what else the machine does must not fail a test
settings.load_profile("simulator")
