"""nvidia-smi's table as shown in the documents."""

from __future__ import annotations

_TABLE = """\
«time»
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.87.01    Driver Version: 418.87.01    CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  {name:<20}On   | 00000000:00:07.0 Off |                    0 |
| N/A   «n»C    P0    «n»W / {watts:>3}W |{memory:>21} |      «n»%      Default |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
"""
_END = "+-----------------------------------------------------------------------------+"


def table(used_mib: int, total_mib: int, *, name: str = "Tesla V100-SXM2...", watts: int = 300) -> str:
    """As seen in a container: its own limit, and no processes."""
    memory = f"{used_mib}MiB / {total_mib:>5}MiB"
    return _TABLE.format(name=name, watts=watts, memory=memory) + _END


def table_of_node(
    used_mib: int, total_mib: int, *, name: str = "Tesla V100-SXM2...", watts: int = 300
) -> str:
    """As seen on the node; the list of processes is not compared."""
    memory = f"{used_mib}MiB / {total_mib:>5}MiB"
    return _TABLE.format(name=name, watts=watts, memory=memory)
