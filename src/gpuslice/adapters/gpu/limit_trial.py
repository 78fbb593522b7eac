"""Whether the driver refuses memory past a limit: a program that tries, in a cgroup of its own.

``python -m gpuslice.adapters.gpu.limit_trial CGROUP BYTES`` joins the cgroup, makes a context on the first
card that it sees and takes so many bytes of it. It says ``allowed``, ``refused``, or why it is neither.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpuslice.adapters.gpu.cuda import OUT_OF_MEMORY, Cuda, CudaError, CudaMissingError

ALLOWED = "allowed"
REFUSED = "refused"


def main(cgroup: str, size_bytes: str) -> str:
    """Contexts count: what is left of a small limit may not hold one."""
    (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        Cuda().allocate(int(size_bytes))
    except CudaError as error:
        return REFUSED if error.code == OUT_OF_MEMORY else str(error)
    except CudaMissingError as error:
        return str(error)
    return ALLOWED


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
