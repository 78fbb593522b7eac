"""Everything that is checked without a card and without a cluster, but for tests/gpu and tests/e2e."""

HANG_S = 600
"""The deadline of whatever a test waits for. It ends a hang; how fast a thing is no deadline says."""
