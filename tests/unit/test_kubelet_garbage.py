"""Messages of kubelet's sockets that cannot be read, to us and from us: a failed call, and nothing more."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpclib import Status
from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from gpuslice.adapters.kubelet.podresources import PodResources, PodResourcesError
from gpuslice.adapters.kubelet.rpc import Server, unix_channel
from simcluster.kubelet.rpc import DevicePluginClient
from tests import HANG_S
from tests.unit.test_kubelet_wire import MEM, Plugin


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wire-") as name:  # socket paths must be short
        yield Path(name)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def next_head(reader: asyncio.StreamReader) -> HeadersFrame:
    while True:
        frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
        frame.parse_body(memoryview(await reader.readexactly(length)))
        if isinstance(frame, HeadersFrame):
            return frame


UNREADABLE = {
    "no protobuf": DataFrame(1, b"\0\0\0\0\5\xff\xff\xff\xff\xff"),
    "a name that is no text": DataFrame(1, b"\0\0\0\0\5\x0a\3\x0a\1\xff"),
    "compressed": DataFrame(1, b"\1\0\0\0\1x"),
    "cut off": DataFrame(1, b"\0\0\0\0\x0aabc"),
    "nothing": DataFrame(1, b""),
}


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
async def test_an_answer_that_cannot_be_read_is_a_failed_call(folder: Path, sent: DataFrame) -> None:
    """It would end the agent, and that again and again: ids of any vendor's plugin stand in this book."""
    encoder = Encoder()
    head = encoder.encode([(":status", "200"), ("content-type", "application/grpc")])
    trailer = encoder.encode([("grpc-status", "0")])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        await next_head(reader)
        writer.write(SettingsFrame(0).serialize() + HeadersFrame(1, head, flags=["END_HEADERS"]).serialize())
        writer.write(sent.serialize())
        writer.write(HeadersFrame(1, trailer, flags=["END_HEADERS", "END_STREAM"]).serialize())
        while await reader.read(1 << 16):  # who closes first would be a lost connection
            pass
        writer.close()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_unix_server(answer, folder / "kubelet.sock"):
        with pytest.raises(PodResourcesError, match="INTERNAL: the answer cannot be read"):
            await PodResources(folder / "kubelet.sock").assignments(MEM)
        await ended.wait()


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_question_that_cannot_be_read_is_refused_and_the_next_is_answered(
    folder: Path, sent: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([Plugin()])
    await server.start(path=str(folder / "p.sock"))
    reader, writer = await asyncio.open_unix_connection(folder / "p.sock")
    path = "/v1beta1.DevicePlugin/Allocate"
    head = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("te", "trailers"),
    ]
    block = Encoder().encode([*head, ("content-type", "application/grpc")])
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
    writer.write(HeadersFrame(1, block, flags=["END_HEADERS"]).serialize())
    sent.flags.add("END_STREAM")
    writer.write(sent.serialize())
    decoder, said = Decoder(), dict[str, str]()
    async with asyncio.timeout(HANG_S):
        while "grpc-status" not in said:
            head_said = decoder.decode((await next_head(reader)).data)
            said |= {str(name): str(value) for name, value in head_said}
    assert said["grpc-status"] == str(Status.INTERNAL.value)
    assert "the request cannot be read" in said["grpc-message"]
    async with unix_channel(folder / "p.sock") as channel:
        assert (await DevicePluginClient(channel).get_device_plugin_options(HANG_S)).pre_start_required
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    assert caplog.records == []  # no traceback of grpclib's
