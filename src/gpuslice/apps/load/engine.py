"""Keeps a card busy at a given level: it works for a part of each short period and waits for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpuslice.adapters.gpu import cuda
from gpuslice.adapters.gpu.cuda import Cuda, CudaError
from gpuslice.apps.load.fields import MOVING, Work
from gpuslice.apps.load.kernels import ENTRY, kernel_for, ptx
from gpuslice.core.errors import GpusliceError

PERIOD_S = 0.05
THREADS = 256
BLOCKS_A_MULTIPROCESSOR = 8
COPY_BYTES = 16 << 20
SINK_BYTES = 4096
LONGEST_BUFFER_BYTES = 1 << 30


class CannotGenerateError(GpusliceError):
    """This card, or this machine, cannot do that kind of work."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What was done between two reports: the fraction of time busy, and the work per second if counted."""

    busy_ratio: float
    gflops: float = 0.0
    bytes_per_s: float = 0.0
    bytes_moved: int = 0


class Engine:
    """One kind of work on one card; copies between two cards need the other one, `peer`."""

    def __init__(self, card: Cuda, work: Work, peer: Cuda | None = None) -> None:
        self._card = card
        self._kind = work.kind
        self._moved = 0
        self._copy_once: Callable[[], None]
        if work.kind in {"to_peer", "from_peer"}:
            self._copy_once = self._between_cards(work, peer)
        elif work.kind in {"to_host", "to_device"}:
            host, device = card.allocate_host(COPY_BYTES), card.allocate(COPY_BYTES)
            if work.kind == "to_host":
                self._copy_once = lambda: card.copy_to_host(host, device, COPY_BYTES)
            else:
                self._copy_once = lambda: card.copy_to_device(device, host, COPY_BYTES)
        else:
            self._prepare_kernel()

    def run(self, level: float, seconds: float) -> Interval:
        """Work for `seconds` at `level` (0…1 of the time)."""
        began, busy_s, before = time.perf_counter(), 0.0, self._counted()
        while (now := time.perf_counter()) - began < seconds:
            if self._kind in MOVING:
                while time.perf_counter() < now + level * PERIOD_S:
                    self._copy_once()
                    self._moved += COPY_BYTES
            elif level > 0:
                parameters = (int(level * PERIOD_S * 1e9), self._sink, self._buffer, self._buffer_bytes)
                self._card.launch(self._kernel, self._blocks, THREADS, parameters)
                self._card.synchronize()
            busy_s += min(level * PERIOD_S, time.perf_counter() - now)
            time.sleep(max(0.0, now + PERIOD_S - time.perf_counter()))
        took_s = time.perf_counter() - began
        done = self._counted() - before
        moving = self._kind in MOVING
        return Interval(
            busy_ratio=busy_s / took_s,
            gflops=0.0 if moving else done * self._flops / took_s / 1e9,
            bytes_per_s=done / took_s if moving else 0.0,
            bytes_moved=done if moving else 0,
        )

    def _between_cards(self, work: Work, peer: Cuda | None) -> Callable[[], None]:
        card = self._card
        if peer is None:
            raise CannotGenerateError(f"{work.title}: needs a second card in this process to copy to")
        if not card.reaches(peer):
            raise CannotGenerateError(
                f"{work.title}: cards {card.ordinal} and {peer.ordinal} do not reach each other, "
                "copies would go through the host"
            )
        peer.make_current()
        theirs = peer.allocate(COPY_BYTES)
        peer.open_to(card)
        card.make_current()
        own = card.allocate(COPY_BYTES)
        card.open_to(peer)

        def copy() -> None:
            if self._kind == "to_peer":
                card.copy_to_peer(peer, theirs, own, COPY_BYTES)
            else:
                peer.copy_to_peer(card, own, theirs, COPY_BYTES)
            card.synchronize()

        return copy

    def _prepare_kernel(self) -> None:
        card = self._card
        kernel = kernel_for(self._kind, card.attribute(cuda.MAJOR))
        self._flops = kernel.flops
        self._blocks = card.attribute(cuda.MULTIPROCESSORS) * BLOCKS_A_MULTIPROCESSOR
        self._sink = card.allocate(SINK_BYTES)
        card.fill(self._sink, SINK_BYTES)
        self._buffer, self._buffer_bytes = self._sink, SINK_BYTES
        size = LONGEST_BUFFER_BYTES
        while self._kind == "memory" and self._buffer_bytes < size:
            try:  # larger than the card's caches; less if there is a limit
                self._buffer, self._buffer_bytes = card.allocate(size), size
            except CudaError as error:
                if error.code != cuda.OUT_OF_MEMORY or size <= COPY_BYTES:
                    raise
                size //= 2
        try:
            self._kernel = card.kernel(ptx(kernel), ENTRY)
        except CudaError as error:
            raise CannotGenerateError(f"{self._kind}: the driver refuses the kernel: {error}") from error

    def _counted(self) -> int:
        """Rounds of all warps, or bytes moved, so far."""
        if self._kind in MOVING:
            return self._moved
        return self._card.read_u64(self._sink)
