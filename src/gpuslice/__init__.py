"""gpuslice gives containers fractions of a GPU, with limits that hold.

The names of `__all__` are the Python API, which is in `gpuslice.api`: it is imported when one of them is
first used, so that programs start fast. What they are, type checkers read in ``__init__.pyi``.
"""

__version__ = "0.1.0"
__all__ = [
    "Candidates",
    "Card",
    "CardSlice",
    "Cluster",
    "ContainerUsage",
    "ExplainedPod",
    "GpusliceError",
    "NoSuchPodError",
    "NodeClass",
    "NodeState",
    "Placement",
    "Pod",
    "Request",
    "Simulation",
    "explain",
    "place",
    "read_cluster",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = "gpuslice.diagnosis.simulate.rule" if name == "Simulation" else "gpuslice.api"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
