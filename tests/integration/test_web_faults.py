"""What breaks the protocol of HTTP/2, fault by fault, and what ends for it: the connection or one request."""

from __future__ import annotations

import pytest
from hyperframe.frame import DataFrame, Frame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from tests.integration.http2_rig import FIELDS, Attacker, Fields

FAULTS: dict[str, tuple[list[Frame | bytes], int]] = {
    "data of nobody's": ([b"\0\0\1\0\0\0\0\0\0x"], 1),
    "data of a stream that was not opened": ([DataFrame(5, b"x")], 1),
    "a head of nobody's": ([b"\0\0\1\1\5\0\0\0\0\x82"], 1),
    "a head of ours": ([b"\0\0\1\1\5\0\0\0\2\x82"], 1),
    "a head that goes on without a beginning": ([b"\0\0\1\x09\4\0\0\0\1\x82"], 1),
    "a head that another frame cuts in two": ([b"\0\0\1\1\0\0\0\0\5\x82", PingFrame(0, b"12345678")], 1),
    "a head that goes on for another": ([b"\0\0\1\1\0\0\0\0\5\x82", b"\0\0\1\x09\4\0\0\0\7\x82"], 1),
    "a head that is cut off": ([b"\0\0\1\1\5\0\0\0\5\x40"], 9),
    "a field of no table": ([b"\0\0\1\1\5\0\0\0\5\xf0"], 9),
    "field zero": ([b"\0\0\1\1\5\0\0\0\5\x80"], 9),
    "more padding than there is": ([b"\0\0\2\0\x08\0\0\0\1\x05x"], 1),
    "padding of a length that is missing": ([b"\0\0\0\0\x08\0\0\0\1"], 1),
    "a ping of seven bytes": ([b"\0\0\7\6\0\0\0\0\x001234567"], 6),
    "a ping of a stream": ([b"\0\0\x08\6\0\0\0\0\x0112345678"], 1),
    "settings of a stream": ([b"\0\0\0\4\0\0\0\0\1"], 1),
    "half a setting": ([b"\0\0\5\4\0\0\0\0\x0012345"], 6),
    "a push that is no switch": ([SettingsFrame(0, {2: 2})], 1),
    "a window that no number holds": ([SettingsFrame(0, {4: 2**31})], 3),
    "frames that are too small": ([SettingsFrame(0, {5: 16_383})], 1),
    "frames that no length holds": ([SettingsFrame(0, {5: 2**24})], 1),
    "a window that grows by nothing": ([b"\0\0\4\x08\0\0\0\0\0\0\0\0\0"], 1),
    "a window that grows too far": ([WindowUpdateFrame(0, 2**31 - 1)], 3),
    "leave for a stream that was not opened": ([WindowUpdateFrame(5, 1)], 1),
    "leave of three bytes": ([b"\0\0\3\x08\0\0\0\0\x01123"], 6),
    "a stream taken back that was not opened": ([RstStreamFrame(5, 8)], 1),
    "taken back in three bytes": ([b"\0\0\3\3\0\0\0\0\x01123"], 6),
    "a push": ([b"\0\0\5\5\4\0\0\0\1\0\0\0\2\x82"], 1),
    "priority of nobody's": ([b"\0\0\5\2\0\0\0\0\x0012345"], 1),
}


@pytest.mark.parametrize("sent", FAULTS.values(), ids=FAULTS)
async def test_what_breaks_the_protocol_ends_with_the_code_that_the_rfc_names(
    sent: tuple[list[Frame | bytes], int],
) -> None:
    """RFC 9113, 4 to 6, and RFC 7541 for what cannot be unpacked."""
    attacker = Attacker(lambda _: text_answer("x"), body_bytes=10_000_000)
    attacker.send(attacker.head(1, FIELDS))
    before = len(attacker.transport.written)
    for frame in sent[0]:
        attacker.send(frame)
    said = attacker.transport.written[before:]
    assert attacker.transport.closed
    assert (said[-17:-13], said[-4:]) == (b"\0\0\x08\7", sent[1].to_bytes(4))


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ([*FIELDS, ("connection", "close")], b"x"),
        (FIELDS[1:], b"x"),
        ([*FIELDS, ("content-length", "3")], b"four"),
        ([*FIELDS, ("content-length", "3")], b"2"),
    ],
)
async def test_a_request_that_is_none_ends_alone(fields: Fields, body: bytes) -> None:
    asked: list[bytes] = []

    def app(request: HttpRequest) -> HttpResponse:
        asked.append(request.body)
        return text_answer("x")

    attacker = Attacker(app)
    attacker.send(attacker.head(1, fields), DataFrame(1, body, flags=["END_STREAM"]))
    assert RstStreamFrame(1, 1).serialize() in attacker.transport.written
    attacker.send(attacker.head(3, FIELDS), DataFrame(3, b"right", flags=["END_STREAM"]))
    assert asked == [b"right"]
