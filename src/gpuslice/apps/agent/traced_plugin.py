"""The agent's spans of a pod: allocate and start, following the bind that the annotation names."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import DevicePluginService
from gpuslice.adapters.otlp.exporter import SpanExporter
from gpuslice.adapters.otlp.spans import Span, SpanContext, parsed, trace_of
from gpuslice.apps.agent.allocation_state import AllocationState


class TracedPlugin(DevicePluginService):
    """`plugin` with a span for each container that kubelet lets it grant and start."""

    def __init__(
        self,
        plugin: DevicePluginService,
        state: AllocationState,
        exporter: SpanExporter,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._plugin = plugin
        self._state = state
        self._exporter = exporter
        self._now_ns = now_ns

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return await self._plugin.get_device_plugin_options(request)

    def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        return self._plugin.list_and_watch(request)

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        return await self._plugin.get_preferred_allocation(request)

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        ids = [frozenset(each.devices_ids) for each in request.container_requests]
        with self._span("allocate", *ids):
            return await self._plugin.allocate(request)

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        with self._span("start", frozenset(request.devices_ids)):
            return await self._plugin.pre_start_container(request)

    @contextmanager
    def _span(self, name: str, *ids: frozenset[str]) -> Iterator[None]:
        """The container is known only at the end; without one, there is no span."""
        began_ns, error = self._now_ns(), ""
        try:
            yield
        except Exception as failed:
            error = str(failed)
            raise
        finally:
            for each in ids:
                if (holder := self._state.holder(each)) is None:
                    continue
                pod, parent = holder.pod.view, parsed(holder.pod.traceparent)
                context = SpanContext(parent.trace_id if parent else trace_of(pod.uid))
                about: dict[str, str | int] = {
                    "k8s.pod.uid": pod.uid,
                    "k8s.namespace.name": pod.namespace,
                    "k8s.pod.name": pod.name,
                    "k8s.container.name": holder.container.name if holder.container else "",
                    "k8s.node.name": self._state.node.name,
                    "gpuslice.units": len(each),
                }
                self._exporter.add(Span(name, context, began_ns, self._now_ns(), parent, about, error))
