"""The deadline of what a test waits for. It ends a hang; how fast a thing is no deadline says."""

HANG_S = 600
