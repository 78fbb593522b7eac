"""The same question has the same answer, however a client puts it on the wire."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.builders import api_pod
from tests.integration.extender_rig import PREFIX, Rig, cluster, rig

NAMES = ["n1", "n2", "x"]
QUESTION = {"Pod": api_pod(memory="8"), "Nodes": None, "NodeNames": NAMES}
BODY = json.dumps(QUESTION, separators=(",", ":")).encode()
LINE = f"POST {PREFIX}/filter HTTP/1.1\r\nHost: x\r\n".encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


async def said(extender: Rig, *messages: bytes) -> dict[str, Any]:
    """The answer to these bytes, each sent once the one before it has arrived; 100 Continue is left out."""
    port = int(extender.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for number, message in enumerate(messages):
            writer.write(message)
            await writer.drain()
            if number + 1 < len(messages):
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer: dict[str, Any] = json.loads(await reader.readexactly(length))
        return answer
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "messages",
    [
        [LINE + LENGTH + b"\r\n" + BODY],
        [LINE + LENGTH + b"Connection: close\r\n\r\n" + BODY],
        [LINE + LENGTH + b"Accept-Encoding: gzip\r\nContent-Type: application/json\r\n\r\n" + BODY],
        [LINE.replace(b"1.1", b"1.0") + LENGTH + b"\r\n" + BODY],
        [LINE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 7)],
        [LINE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, len(BODY))],
        [LINE + LENGTH + b"Expect: 100-continue\r\n\r\n", BODY],
        [LINE + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n", chunked(BODY, 100)],
    ],
    ids=["plain", "close", "asks for gzip", "1.0", "small chunks", "one chunk", "expect", "expect, chunks"],
)
async def test_a_question_is_the_same_however_it_comes(messages: list[bytes]) -> None:
    async with rig(cluster(n1=(15, 1), n2=(4, 1))) as extender:
        answer = await said(extender, *messages)
        assert answer["NodeNames"] == ["n1"]


async def test_json_in_any_form_is_the_same_question() -> None:
    async with rig(cluster(n1=(15, 1), n2=(4, 1))) as extender:
        expected = await extender.post("filter", BODY)
        for body in (
            json.dumps(QUESTION, indent=2),
            json.dumps(dict(reversed(QUESTION.items()))),
            json.dumps({key.lower(): value for key, value in QUESTION.items()}),
            BODY.decode().replace('"n1"', '"\\u006e1"') + "\n",
        ):
            assert await extender.post("filter", body.encode()) == expected


async def test_whole_nodes_in_chunks_are_answered_with_the_same_nodes() -> None:
    nodes = [{"metadata": {"name": name}, "spec": {"padding": "x" * 20_000}} for name in NAMES]
    body = json.dumps({"Pod": QUESTION["Pod"], "Nodes": {"items": nodes}, "NodeNames": None}).encode()
    async with rig(cluster(n1=(15, 1), n2=(4, 1))) as extender:
        answer = await said(extender, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, 4096))
        assert answer["Nodes"]["items"] == nodes[:1]
        assert answer["NodeNames"] == ["n1"]


async def test_a_packed_question_is_refused_in_words() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        packed = gzip.compress(BODY)
        head = LINE + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        assert "the request's body is encoded as gzip" in str(await said(extender, head + packed))


async def test_two_schedulers_never_get_the_same_card() -> None:
    """Each on its own connection, with a question for the only room that is left."""
    async with rig(cluster(n1=(15, 1))) as extender:
        pods = [extender.api.add_pod(f"p{number}", "8") for number in range(2)]
        filtered = await asyncio.gather(*(extender.filter(pod, "n1") for pod in pods))
        assert sorted(answer["NodeNames"] for answer in filtered) == [[], ["n1"]], "it is promised once"
        errors = await asyncio.gather(*(extender.bind_unasked(pod) for pod in pods))
        assert sorted(bool(error) for error in errors) == [False, True]
        assert sorted(extender.api.bound_to(f"p{number}") for number in range(2)) == ["", "n1"]


CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
PRIORITY = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "high"},
    "value": 100,
}


async def test_preempt_answers_with_victims_by_card() -> None:
    async with rig(cluster(n1=(16, 2), n2=(8, 1))) as extender:
        names = {name: await extender.add_and_bind(name, "4") for name in "abcd"}
        assert list(names.values()) == ["0", "0", "1", "1"]
        await extender.caught_up()
        uid = {name: extender.api.pod(name)["metadata"]["uid"] for name in names}
        extender.api.call("POST", CLASSES, PRIORITY)
        high, huge = [
            extender.api.add_pod(name, units, priorityClassName="high")
            for name, units in (("high", "8"), ("huge", "9"))
        ]
        await extender.caught_up()
        proposed = {
            "n1": {"Pods": [{"UID": uid["a"]}, {"UID": uid["c"]}], "NumPDBViolations": 0},
            "n2": {"Pods": [{"UID": "gone"}], "NumPDBViolations": 0},
        }
        body = {"Pod": high, "NodeNameToMetaVictims": proposed}
        answer = await extender.post("preempt", body)
        kept = answer["NodeNameToMetaVictims"]["n1"]
        assert {each["UID"] for each in kept["Pods"]} in ({uid["a"], uid["b"]}, {uid["c"], uid["d"]})
        full = {"n1": {"Pods": [{"metadata": {"uid": uid["a"]}}], "NumPDBViolations": 1}}
        body = {"Pod": huge, "NodeNameToVictims": full}
        assert await extender.post("preempt", body) == {"NodeNameToMetaVictims": {}}
        assert await extender.post("preempt", b"nonsense") == {"NodeNameToMetaVictims": {}}
