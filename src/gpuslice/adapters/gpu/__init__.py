"""Where cards are read from: NVML or a recording."""
