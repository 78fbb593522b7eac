"""The outside world in memory, speaking the real wires."""
