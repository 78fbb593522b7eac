"""The node object: its labels say how to give cards out, its status and an annotation say which there are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.resources import NODES
from gpuslice.adapters.kube.watch import Change, Reflector
from gpuslice.apps.agent.node import Rules, rules_of
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.annotations import encode_gpus
from gpuslice.core.contract import GPU_CORE, GPU_COUNT, NODE_GPUS
from gpuslice.core.model import Gpu
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT

_log = logging.getLogger(__name__)

EVERY_S = 10.0
FIRST_RETRY_S = 0.5


class NodeKeeper:
    """Watches the node and writes what kubelet does not keep: kubelet zeroes it after it lost its checkpoint.

    The rules of the start stay in force until the agent is started anew, unless `hot`.
    """

    def __init__(
        self, client: KubeClient, writer: Writer, name: str, gpus: Callable[[], tuple[Gpu, ...]], *, hot: bool
    ) -> None:
        self.rules = Rules()
        self.read = asyncio.Event()
        self._writer = writer
        self._gpus = gpus
        self._hot = hot
        self.seen: Node | None = None
        self._wanted = asyncio.Event()
        self._reflector = Reflector(client, NODES, self._changed, fields=f"metadata.name={name}")

    async def watch(self) -> None:
        await self._reflector.run()

    def look(self) -> None:
        """The cards changed: see soon whether the node says so."""
        self._wanted.set()

    async def keep(self) -> None:
        """Write what the node object lacks, for ever."""
        while True:
            await self._write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._wanted.wait()
            self._wanted.clear()

    def _changed(self, change: Change[Node]) -> None:
        if change.object is None:
            return
        self.seen = change.object
        self._apply(rules_of(change.object.metadata.labels or {}))
        self._wanted.set()
        self.read.set()

    def _apply(self, rules: Rules) -> None:
        if rules == self.rules:
            return
        if self.read.is_set() and not self._hot:
            _log.warning("node labels changed; the agent follows them after its restart")
            return
        self.rules = rules
        _log.info("node rules", extra={"mode": str(rules.mode), "divides_compute": rules.divides_compute})

    async def _write(self) -> None:
        gpus = self._gpus()
        if self.seen is None or not gpus or not self.rules.shared:
            return
        try:
            amounts = missing_amounts(self.seen, wanted_amounts(len(gpus), self.rules))
            if amounts:
                await self._writer.node_status(amounts)
            text = encode_gpus(gpus)
            if (self.seen.metadata.annotations or {}).get(NODE_GPUS) != text:
                await self._writer.node_annotation(NODE_GPUS, text)
        except KubeError as error:
            _log.warning("node object not written, will try again", extra={"error": str(error)})
            asyncio.get_running_loop().call_later(FIRST_RETRY_S, self._wanted.set)


def wanted_amounts(gpu_count: int, rules: Rules) -> dict[str, str]:
    """What the node status has to say besides kubelet's devices."""
    amounts = {GPU_COUNT: str(gpu_count)}
    if rules.divides_compute:
        amounts[GPU_CORE] = str(gpu_count * WHOLE_CORE_PERCENT)
    return amounts


def missing_amounts(node: Node, wanted: dict[str, str]) -> dict[str, str]:
    """Those of `wanted` that capacity or allocatable do not say."""
    sides = (node.status.capacity or {}, node.status.allocatable or {})
    return {
        name: amount
        for name, amount in wanted.items()
        if any(whole_number(side.get(name)) != int(amount) for side in sides)
    }
