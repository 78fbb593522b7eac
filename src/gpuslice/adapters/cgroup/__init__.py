"""From a process id to its container."""
