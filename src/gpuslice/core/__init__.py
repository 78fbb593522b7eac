"""What GPU sharing is: pure values and functions, no I/O, clock or Kubernetes JSON."""
