"""kubelet's services on the wire: the paths and bytes that a kubelet written in Go expects."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.exceptions import StreamTerminatedError

from gpuslice.adapters.kubelet.deviceplugin import CALL_FAILED, Patience, PluginAddress, PluginServer
from gpuslice.adapters.kubelet.podresources import PodResources, PodResourcesError, assignments_of
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import (
    DevicePluginService,
    PodResourcesClient,
    RegistrationClient,
    Server,
    unix_channel,
)
from gpuslice.core.device_assignment import DeviceAssignment, holder_of
from simcluster.kubelet.rpc import DevicePluginClient, RegistrationService
from tests import HANG_S

MEM = "aliyun.com/gpu-mem"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wire-") as name:  # socket paths must be short
        yield Path(name)


class Plugin(DevicePluginService):
    """Answers with what it was asked."""

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return dp.DevicePluginOptions(pre_start_required=True)

    async def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        yield dp.ListAndWatchResponse(devices=[dp.Device(ID="a", health="Healthy")])
        await asyncio.Event().wait()

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        ids = request.container_requests[0].available_deviceIDs
        return dp.PreferredAllocationResponse(
            container_responses=[dp.ContainerPreferredAllocationResponse(deviceIDs=ids)]
        )

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        raise GRPCError(Status.FAILED_PRECONDITION, "a sentence")

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        return dp.PreStartContainerResponse()


class Kubelet(RegistrationService):
    """Dials back inside Register, as kubelet does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[dp.RegisterRequest] = []
        self.options: list[dp.DevicePluginOptions] = []
        self.follow = True
        self.listens = asyncio.Event()  # it has heard of devices
        self._news = asyncio.Condition()
        self._streams: list[asyncio.Task[None]] = []

    async def register(self, request: dp.RegisterRequest) -> dp.Empty:
        async with unix_channel(self.folder / request.endpoint) as channel:
            self.options.append(await DevicePluginClient(channel).get_device_plugin_options(5))
        async with self._news:
            self.requests.append(request)
            self._news.notify_all()
        if self.follow:
            self._streams.append(asyncio.create_task(self._follow(request.endpoint)))
        return dp.Empty()

    async def _follow(self, endpoint: str) -> None:
        async with unix_channel(self.folder / endpoint) as channel:
            with contextlib.suppress(GRPCError):
                async for _ in DevicePluginClient(channel).list_and_watch():
                    self.listens.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = Server([self])
        await server.start(path=str(self.folder / "kubelet.sock"))
        try:
            yield
        finally:
            for stream in self._streams:
                stream.cancel()
            server.close()
            await server.wait_closed()
            (self.folder / "kubelet.sock").unlink(missing_ok=True)

    async def registered(self, times: int) -> None:
        async with asyncio.timeout(HANG_S):
            async with self._news:
                await self._news.wait_for(lambda: len(self.requests) >= times)


QUICK = Patience(poll_s=0.02, stream_s=0.2)


@contextlib.asynccontextmanager
async def plugin_server(folder: Path, patience: Patience = QUICK, **more: Any) -> AsyncIterator[PluginServer]:
    address = PluginAddress(folder, "plugin.sock", MEM)
    server = PluginServer(Plugin(), address, patience, **more)
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# -- names and bytes -------------------------------------------------------------------------------------
def test_service_paths_are_kubelets() -> None:
    assert sorted(Plugin().__mapping__()) == [
        "/v1beta1.DevicePlugin/Allocate",
        "/v1beta1.DevicePlugin/GetDevicePluginOptions",
        "/v1beta1.DevicePlugin/GetPreferredAllocation",
        "/v1beta1.DevicePlugin/ListAndWatch",
        "/v1beta1.DevicePlugin/PreStartContainer",
    ]
    assert list(Kubelet(Path("/")).__mapping__()) == ["/v1beta1.Registration/Register"]


def test_messages_have_kubelets_field_numbers() -> None:
    """Bytes written down by hand from the API's field numbers and types."""
    device = dp.Device(ID="a", health="b", topology=dp.TopologyInfo(nodes=[dp.NUMANode(ID=1)]))
    assert device.SerializeToString() == b"\x0a\x01a\x12\x01b\x1a\x04\x0a\x02\x08\x01"
    register = dp.RegisterRequest(
        version="v", endpoint="e", resource_name="r", options=dp.DevicePluginOptions(pre_start_required=True)
    )
    assert register.SerializeToString() == b"\x0a\x01v\x12\x01e\x1a\x01r\x22\x02\x08\x01"
    preferred = dp.ContainerPreferredAllocationRequest(
        available_deviceIDs=["a"], must_include_deviceIDs=["b"], allocation_size=3
    )
    assert preferred.SerializeToString() == b"\x0a\x01a\x12\x01b\x18\x03"
    answer = dp.ContainerAllocateResponse(
        envs={"k": "v"},
        mounts=[dp.Mount(container_path="c", host_path="h", read_only=True)],
        cdi_devices=[dp.CDIDevice(name="n")],
    )
    assert answer.SerializeToString() == (
        b"\x0a\x06\x0a\x01k\x12\x01v\x12\x08\x0a\x01c\x12\x01h\x18\x01\x2a\x03\x0a\x01n"
    )
    pod = pr.PodResources(
        name="p",
        namespace="n",
        containers=[
            pr.ContainerResources(
                name="c", devices=[pr.ContainerDevices(resource_name="r", device_ids=["i"])]
            )
        ],
    )
    assert pod.SerializeToString() == b"\x0a\x01p\x12\x01n\x1a\x0b\x0a\x01c\x12\x06\x0a\x01r\x12\x01i"


def test_our_messages_leave_upstreams_names_free_for_others() -> None:
    pool = descriptor_pool.Default()
    with pytest.raises(KeyError):
        pool.FindMessageTypeByName("v1beta1.Device")
    assert pool.FindMessageTypeByName("gpuslice.kubelet.deviceplugin.Device") is dp.Device.DESCRIPTOR


# -- staying registered ----------------------------------------------------------------------------------
async def test_a_plugin_serves_before_it_registers_and_says_by_which_name(folder: Path) -> None:
    kubelet = Kubelet(folder)
    async with kubelet.serving(), plugin_server(folder):
        await kubelet.registered(1)
    (request,) = kubelet.requests
    assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "plugin.sock", MEM)
    assert kubelet.options == [dp.DevicePluginOptions(pre_start_required=True)]
    assert not (folder / "plugin.sock").exists()


async def test_a_new_kubelet_is_found_although_nothing_was_swept(folder: Path) -> None:
    async with plugin_server(folder) as server:
        for _ in range(3):
            kubelet = Kubelet(folder)
            async with kubelet.serving():
                await kubelet.registered(1)
    assert server.registrations == 3


async def test_a_kubelet_that_is_away_is_looked_for_more_often(folder: Path) -> None:
    """It refuses pods that it looks at before we are registered, and begins within half a second."""
    heard: asyncio.Queue[bool] = asyncio.Queue()
    patience = Patience(poll_s=10 * HANG_S)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(HANG_S):
        before, after = Kubelet(folder), Kubelet(folder)
        async with before.serving():
            serving = plugin_server(folder, patience, on_kubelet=heard.put_nowait)
            await stack.enter_async_context(serving)
            await before.listens.wait()
        assert not await heard.get()
        async with after.serving():
            await after.registered(1)
            assert await heard.get()


async def test_a_kubelet_that_never_listens_is_asked_again(folder: Path) -> None:
    kubelet = Kubelet(folder)
    kubelet.follow = False
    async with kubelet.serving(), plugin_server(folder) as server:
        await kubelet.registered(2)
        assert not server.registered


async def test_it_is_told_at_once_that_kubelet_went_and_nothing_when_it_is_only_asked_again(
    folder: Path,
) -> None:
    heard: asyncio.Queue[bool] = asyncio.Queue()
    kubelet, patience = Kubelet(folder), Patience(poll_s=10 * HANG_S)  # by events alone
    async with contextlib.AsyncExitStack() as stack:
        async with kubelet.serving():
            serving = plugin_server(folder, patience, on_kubelet=heard.put_nowait)
            server = await stack.enter_async_context(serving)
            await kubelet.registered(1)
            server.register_again()
            await kubelet.registered(2)
            assert heard.empty()
        async with asyncio.timeout(HANG_S):
            assert not await heard.get()
        async with kubelet.serving(), asyncio.timeout(HANG_S):
            server.register_again()
            assert await heard.get()


async def test_a_dead_socket_is_taken_over_and_a_living_one_is_not(folder: Path) -> None:
    kubelet = Kubelet(folder)
    dead = Server([Plugin()])
    await dead.start(path=str(folder / "plugin.sock"))
    async with kubelet.serving(), plugin_server(folder):
        await asyncio.sleep(0.2)
        assert kubelet.requests == []
        dead.close()
        await dead.wait_closed()
        await kubelet.registered(1)


async def test_a_refusal_carries_its_sentence(folder: Path) -> None:
    kubelet = Kubelet(folder)
    async with kubelet.serving(), plugin_server(folder):
        await kubelet.registered(1)
        async with unix_channel(folder / "plugin.sock") as channel:
            with pytest.raises(GRPCError) as refused:
                await DevicePluginClient(channel).allocate(dp.AllocateRequest())
    assert (refused.value.status, refused.value.message) == (Status.FAILED_PRECONDITION, "a sentence")


class SlowPlugin(Plugin):
    """Takes its time over Allocate."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        self.asked.set()
        await self.answer.wait()
        return dp.AllocateResponse(container_responses=[dp.ContainerAllocateResponse(envs={"A": "B"})])


@pytest.mark.parametrize("answers", [True, False])
async def test_a_call_under_way_is_finished_at_the_end_if_it_does_not_take_for_ever(
    folder: Path, answers: bool
) -> None:
    kubelet, plugin = Kubelet(folder), SlowPlugin()
    async with kubelet.serving(), unix_channel(folder / "plugin.sock") as channel:
        patience = Patience(poll_s=0.02, finish_s=5 if answers else 0.1)
        serving = asyncio.create_task(
            PluginServer(plugin, PluginAddress(folder, "plugin.sock", MEM), patience).run()
        )
        await kubelet.registered(1)
        call = asyncio.create_task(DevicePluginClient(channel).allocate(dp.AllocateRequest()))
        await plugin.asked.wait()
        serving.cancel()
        if answers:
            plugin.answer.set()
            assert (await call).container_responses[0].envs == {"A": "B"}
        else:
            with pytest.raises(CALL_FAILED):
                await call
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        assert not (folder / "plugin.sock").exists()


async def test_a_call_that_kubelet_gives_up_is_no_error_of_ours(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet, plugin = Kubelet(folder), SlowPlugin()
    server = PluginServer(plugin, PluginAddress(folder, "plugin.sock", MEM), Patience(poll_s=0.02))
    async with kubelet.serving(), unix_channel(folder / "plugin.sock") as channel:
        serving = asyncio.create_task(server.run())
        await kubelet.registered(1)
        client = DevicePluginClient(channel)
        call = asyncio.create_task(client.allocate(dp.AllocateRequest()))
        await plugin.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await client.get_device_plugin_options(5)).pre_start_required
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


# -- kubelet's device assignments --------------------------------------------------------------------
def test_ids_that_come_one_by_one_are_joined_by_container() -> None:
    devices = [pr.ContainerDevices(resource_name=MEM, device_ids=[each]) for each in ("a", "b")]
    other = pr.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["c"])
    containers = [
        pr.ContainerResources(name="main", devices=[*devices, other]),
        pr.ContainerResources(name="idle"),
    ]
    pod = pr.PodResources(name="p", namespace="n", containers=containers)
    assert list(assignments_of([pod], MEM)) == [DeviceAssignment("n", "p", "main", frozenset("ab"))]


async def test_a_book_that_cannot_be_read_is_not_an_empty_book(folder: Path) -> None:
    with pytest.raises(PodResourcesError, match=r"nothing\.sock"):
        await PodResources(folder / "nothing.sock").assignments(MEM)


def test_ids_belong_to_the_container_with_just_these_or_else_to_the_pod_that_shares_most() -> None:
    whole = DeviceAssignment("n", "p", "main", frozenset("abc"))
    part = DeviceAssignment("n", "q", "main", frozenset("de"))
    exact = holder_of(frozenset("abc"), [part, whole])
    assert exact is not None
    assert (exact.assignment, exact.exact) == (whole, True)
    init = holder_of(frozenset("cdef"), [whole, part])
    assert init is not None
    assert (init.assignment, init.exact) == (part, False)
    assert holder_of(frozenset("x"), [whole, part]) is None


async def test_a_broken_call_leaves_the_task_that_made_it_uncancelled(folder: Path) -> None:
    """grpclib cancels the task that waits. Before Python 3.11.3 the next timeout would end it."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    kubelet = await asyncio.start_unix_server(hang_up, str(folder / "kubelet.sock"))
    async with kubelet, unix_channel(folder / "kubelet.sock") as channel:
        with pytest.raises(CALL_FAILED):
            await RegistrationClient(channel).register(dp.RegisterRequest(), HANG_S)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


class LostAtOnce(Channel):  # type: ignore[misc]  # grpclib has no types
    """Its connection is lost between the moment at which a call has it and the one at which it is used."""

    async def __connect__(self) -> Any:
        protocol = await super().__connect__()
        protocol.connection_lost(None)
        return protocol


async def test_a_connection_that_is_lost_as_a_call_begins_is_a_call_that_failed(tmp_path: Path) -> None:
    """grpclib then lacks an attribute, and the agent ended by that."""
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), tmp_path / "k.sock")
    channel = LostAtOnce(path=str(tmp_path / "k.sock"))
    async with server:
        with pytest.raises(StreamTerminatedError, match="lost as the call began"):
            await PodResourcesClient(channel).list(HANG_S)
    channel.close()
