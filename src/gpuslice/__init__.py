"""gpuslice gives containers fractions of a GPU, with limits that hold."""

__version__ = "0.1.0"
