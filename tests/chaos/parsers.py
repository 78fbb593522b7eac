# ruff: noqa: E501 -- examples are read best on one line each
"""Every parser of what strangers write, fed with what nobody would: it answers, or refuses in one sentence.

An input begins as something right and is changed: bytes, values of a JSON document, its depth, its length.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from hpack import Encoder
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from gpuslice.adapters.cgroup.container import parse_cgroup
from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import decode_status
from gpuslice.adapters.kube.http_connection import BrokenConnectionError, HttpConnection
from gpuslice.adapters.kube.slim import SlimNode, SlimPod
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.adapters.kubelet.podresources import assignments_of, claims_of
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.otlp.spans import parsed
from gpuslice.adapters.region.layout import MAGIC, REGION_BYTES, VERSION, RegionHead
from gpuslice.adapters.region.limits import LimitsError, parse_limits
from gpuslice.adapters.region.reader import RegionError, parse_region
from gpuslice.adapters.web.clients import READ_BYTES, Client, Clients
from gpuslice.adapters.web.connection import Connection
from gpuslice.adapters.web.frames import ConnectionFault, StreamFault
from gpuslice.adapters.web.heads import Unpacker
from gpuslice.adapters.web.http2 import Http2Connection
from gpuslice.adapters.web.messages import text_answer
from gpuslice.adapters.web.negotiation import accepts_gzip, chosen_format
from gpuslice.adapters.web.scrape import parse as parse_page
from gpuslice.adapters.web.webconfig import WebConfigFile
from gpuslice.adapters.wire.extender import Questions, decode_binding
from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.agent.health import excluded_cards
from gpuslice.apps.exporter import counters, fields
from gpuslice.apps.exporter.flags import read_upstream_file
from gpuslice.apps.exporter.settings import parse_address, parse_devices
from gpuslice.apps.extender.main import WEB_LIMITS
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.settings import load
from gpuslice.core.annotations import decode_tiers
from gpuslice.core.card_links import decode_links
from gpuslice.core.contract import ANN_TIERS
from gpuslice.core.errors import GpusliceError
from gpuslice.core.quantity import whole_number
from gpuslice.diagnosis.simulate.facts import load_nodes, load_pods
from tests.builders import api_node, api_pod
from tests.integration.http2_rig import PREFACE, Memory

Parser = Callable[[bytes], object]
LONGEST_SENTENCE = 1000
OF_OPERATORS = ("kubeconfig", "web config", "trace of pods", "trace of nodes")
"""What they write themselves: the sentence may quote it whole."""
LONGEST_S = 2.0
"""For an input of at most some hundred KiB, on a machine that others use too."""


class BadAnswer(AssertionError):
    """A parser that failed in another way than by a sentence, or took too long."""


def feed(seed: int, inputs: int, only: Iterable[str] = ()) -> Counter[str]:
    """How many inputs each parser answered. Raises `BadAnswer` with the input."""
    dice, done = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        parsers = {name: each for name, each in parsers_in(Path(folder)).items() if not only or name in only}
        names = sorted(parsers)
        for number in range(inputs):
            name = names[number % len(names)]
            examples, parser = parsers[name]
            changed = dice.choice(examples)
            for _ in range(dice.randrange(1, 5)):
                changed = dice.choice(CHANGES)(changed, dice)
            _judge(name, parser, changed[:400_000])
            done[name] += 1
    return done


def _judge(name: str, parser: Parser, given: bytes) -> None:
    began_s = time.process_time()
    try:
        parser(given)
    except (GpusliceError, LimitsError, RegionError) as error:
        said = str(error)
        longest = LONGEST_SENTENCE if name not in OF_OPERATORS else len(said)
        if not said or len(said) > longest or not said.isprintable():
            raise BadAnswer(f"{name} refuses {given[:300]!r} with {said[:400]!r}") from error
    except Exception as error:
        raise BadAnswer(
            f"{name} fails at {given[:300]!r} ({len(given)} bytes): {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if (took_s := time.process_time() - began_s) > LONGEST_S:
        raise BadAnswer(f"{name} takes {took_s:.1f} s for {given[:300]!r} ({len(given)} bytes)")


# -- what is parsed ------------------------------------------------------------------------------------------


def parsers_in(folder: Path) -> Mapping[str, tuple[list[bytes], Parser]]:
    """By name: examples that are right, and the parser as a function of bytes."""
    pod = api_pod("p", "4", annotations={
        "ALIYUN_COM_GPU_MEM_IDX": "0,1", "ALIYUN_COM_GPU_MEM_POD": "4", "ALIYUN_COM_GPU_MEM_DEV": "15",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "scheduler.framework.gpushare.allocation": '{"0":{"0":2,"1":2}}',
        "gpushare.alibabacloud.com/core-percentage": '{"0":{"0":20}}',
        "gpuslice.io/meant-for": "0,2",
    })  # fmt: skip
    node = api_node("n1", 30, 2)
    node["metadata"].setdefault("annotations", {})["gpuslice.io/gpus"] = (
        '[{"index":0,"uuid":"GPU-a","memory_mib":16130,"units":15,"model":"V100"}]'
    )
    config_map = {"metadata": {"name": "unhealthy-gpu-n1"}, "data": {"gpus": "0,2"}}
    user = {"username": "u", "groups": ["g"]}
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "1",
            "operation": "CREATE",
            "object": pod,
            "userInfo": user,
            "kind": {"kind": "Pod"},
        },
    }
    binding = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n1"}
    victims = {"Pod": pod, "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "u"}], "NumPDBViolations": 0}}}
    kubeconfig = (
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters:\n- name: c\n  cluster:\n    server: https://h:6443\n"
        "    certificate-authority-data: QUJD\nusers:\n- name: u\n  user:\n    token: t\n    exec:\n      apiVersion: client.authentication.k8s.io/v1\n      command: x\n"
        "contexts:\n- name: c\n  context: {cluster: c, user: u}\n"
    )
    web_config = "tls_server_config:\n  min_version: TLS12\nhttp_server_config:\n  headers: {X-Frame-Options: deny}\nbasic_auth_users: {}\n"
    upstream = "metrics:\n  groups:\n  - name: g\n    counters:\n    - {field: DCGM_FI_DEV_GPU_TEMP, type: gauge, help: t}\n"
    file = folder / "file"
    catalogue = fields.load()

    def from_file(read: Callable[[Path], object]) -> Parser:
        def parse(given: bytes) -> object:
            file.write_bytes(given)
            return read(file)

        return parse

    def viewed(kind: type[Any], view: Callable[[Any], object]) -> Parser:
        """Objects come from the API server: what has not their form never arrives, whatever they say does."""

        def parse(given: bytes) -> object:
            try:
                found = msgspec.json.decode(given, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
            return view(found)

        return parse

    def text(parse: Callable[[str], object]) -> Parser:
        return lambda given: parse(given.decode(errors="surrogateescape"))

    def setting(name: str) -> Parser:
        return text(lambda value: load(ExtenderSettings, {}, {f"GPUSLICE_{name.upper()}": value}))

    return {
        "question of kube-scheduler": (_json({"Pod": pod, "NodeNames": ["n1", "n2"]}, {"Pod": pod, "Nodes": {"items": [node]}}), Questions(WEB_LIMITS).decode),
        "binding": (_json(binding), decode_binding),
        "preemption": (_json(victims), lambda given: Questions(WEB_LIMITS).decode_preemption(given).victims()),
        "admission review": (_json(review), decode_review),
        "pod": (_json(pod), viewed(SlimPod, pod_view)),
        "node": (_json(node), viewed(SlimNode, node_view)),
        "unhealthy cards": (_json(config_map), viewed(objects.ConfigMap, unhealthy_view)),
        "status of the API server": (_json({"kind": "Status", "code": 409, "reason": "Conflict", "message": "m"}), decode_status),
        "kubeconfig": ([kubeconfig.encode()], from_file(lambda path: connect({}, kubeconfig=str(path)))),
        "web config": ([web_config.encode()], from_file(WebConfigFile)),
        "upstream's file": ([upstream.encode()], from_file(lambda path: read_upstream_file(str(path)))),
        "counters": ([b"# a\nDCGM_FI_DEV_GPU_TEMP, gauge, GPU temperature (in C).\n"], text(lambda given: counters.parse(given, catalogue))),
        "another's metrics": ([b'# TYPE a gauge\na{b="c",d="e\\n"} 1.5 1700000000\na 2\n'], text(parse_page)),
        "cgroup": ([b"0::/kubepods.slice/kubepods-pod1234abcd_1234_1234_1234_123456789abc.slice/cri-containerd-" + b"a" * 64 + b".scope\n"], text(parse_cgroup)),
        "limits": ([b"gpuslice 1\nGPU-5f3a memory=4509925376 share=30 cap=100\nend 1\n"], text(parse_limits)),
        "region": ([_region(), bytes(REGION_BYTES)], parse_region),
        "devices": ([b"g:0,2-3", b"f", b"i:1-2"], text(parse_devices)),
        "address": ([b"0.0.0.0:9400", b"[::1]:80"], text(parse_address)),
        "quantity": ([b"4", b"4Gi", b"1e3", b"100m"], text(whole_number)),
        "trace of pods": ([b"name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\np,1,2,1,500,,LS,Running,0,5,1\n"], from_file(load_pods)),
        "trace of nodes": ([b"sn,cpu_milli,memory_mib,gpu,model\nn,1,2,4,V100\n"], from_file(load_nodes)),
        "number in a setting": ([b"12345"], setting("port")),
        "seconds in a setting": ([b"1.5"], setting("bind_timeout_s")),
        "switch in a setting": ([b"true"], setting("preemption")),
        **_of_sockets(),
        **_of_annotations(),
    }  # fmt: skip


def _of_sockets() -> Mapping[str, tuple[list[bytes], Parser]]:
    """What strangers send to our servers, and servers to us, byte by byte."""
    asked = [(":method", "POST"), (":scheme", "https"), (":path", "/bind"), (":authority", "h"), ("x", "y")]
    head = Encoder().encode(asked)
    begun = [
        SettingsFrame(0, {4: 100}),
        HeadersFrame(1, head, flags=["END_HEADERS"]),
        DataFrame(1, b"{}" * 9),
    ]
    ended = [
        DataFrame(1, b"{}", pad_length=3, flags=["PADDED", "END_STREAM"]),
        WindowUpdateFrame(0, 9),
        GoAwayFrame(0),
    ]
    spoken = PREFACE + b"".join(frame.serialize() for frame in (*begun, *ended))
    older = b"POST /bind?a=%20b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    device = pr.ContainerDevices(resource_name="aliyun.com/gpu-mem", device_ids=["GPU-a_-_0"])
    claim = pr.DynamicResource(
        claim_name="c", claim_resources=[pr.ClaimResource(driver_name="d", pool_name="p")]
    )
    container = pr.ContainerResources(name="c", devices=[device], dynamic_resources=[claim])
    held = pr.ListPodResourcesResponse(
        pod_resources=[pr.PodResources(name="p", namespace="n", containers=[container])]
    )

    def served(kind: type[Client]) -> Parser:
        async def heard(given: bytes) -> None:
            clients, transport = (
                Clients(lambda request: text_answer(str(request.query)), Limits(body_bytes=1 << 16)),
                Memory(),
            )
            connection = kind(clients)
            connection.connection_made(transport)
            for start in range(0, len(given), READ_BYTES):
                part = given[start : start + READ_BYTES]
                clients.buffer[: len(part)] = part
                if not transport.closed:
                    connection.buffer_updated(len(part))
            await asyncio.sleep(0)
            connection.connection_lost(None)

        return lambda given: asyncio.run(heard(given))

    async def answered(given: bytes) -> object:
        connection = HttpConnection()
        connection.connection_made(Memory())
        connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
        connection.data_received(given)
        connection.connection_lost(None)
        try:
            return await connection.whole()
        except BrokenConnectionError as error:
            return error

    def unpacked(given: bytes) -> object:
        try:
            return Unpacker(1 << 15).unpack(given).request()
        except (ConnectionFault, StreamFault) as fault:
            return fault

    def holders(given: bytes) -> object:
        try:
            found = pr.ListPodResourcesResponse.FromString(given)
        except DecodeError as error:
            return error
        return list(claims_of(found.pod_resources)), list(
            assignments_of(found.pod_resources, "aliyun.com/gpu-mem")
        )

    return {
        "HTTP/2": ([spoken], served(Http2Connection)),
        "head of HTTP/2": ([head, b"\x3f\xe1\x1f" + head], unpacked),
        "HTTP/1.1": ([older], served(Connection)),
        "answer of the API server": ([chunked], lambda given: asyncio.run(answered(given))),
        "pod-resources": ([held.SerializeToString()], holders),
    }  # fmt: skip


def _of_annotations() -> Mapping[str, tuple[list[bytes], Parser]]:
    """What anybody writes into a header or an object: text by the time that we see it."""

    def said(parse: Callable[[str], object]) -> Parser:
        return lambda given: parse(given.decode(errors="replace"))

    return {
        "Accept": ([b"application/openmetrics-text;version=1.0.0;q=0.9,text/plain;q=0.5,*/*;q=0.1"], said(chosen_format)),
        "Accept-Encoding": ([b"br;q=1.0, gzip;q=0.8, *;q=0.1"], said(accepts_gzip)),
        "trace": ([b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"], said(parsed)),
        "links of cards": ([b"311,11,3"], said(lambda text: decode_links(text, 4))),
        "tiers of containers": ([b'{"a":"driver"}'], said(lambda text: decode_tiers({ANN_TIERS: text}))),
        "cards out of use": ([b'{"index":[0,"1"],"uuid":["GPU-a"]}'], lambda given: excluded_cards(given, ())),
    }  # fmt: skip


def _region() -> bytes:
    head = RegionHead()
    head.magic = MAGIC | VERSION
    return bytes(head).ljust(REGION_BYTES, b"\0")


def _json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


# -- how it is changed ---------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 1e308, -1e308, 2**31, 2**63, -(2**63), 2**64, 10**400, "", " ", "0", "-1", "1e999999",
    "9" * 5000, "0x10", "٣", "１２", "\x00", "\x1b[2J", "a\nb", "\u202e", "\ud800", "é" * 100, "x" * 100_000,
    [], {}, [[]], [None], {"": None}, {"a": {"b": "c"}}, "NaN", "Infinity", "../../etc/passwd", "{}", "[", '{"0":{"0":1e400}}',
    '{"0":{"-1":3}}', '{"0":' * 300, "0," * 3000, "0-99999999999",
)  # fmt: skip


def _flip(given: bytes, dice: random.Random) -> bytes:
    changed = bytearray(given or b"\0")
    for _ in range(dice.choice((1, 1, 3, 20))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _cut(given: bytes, dice: random.Random) -> bytes:
    return given[: dice.randrange(len(given) + 1)]


def _doubled(given: bytes, dice: random.Random) -> bytes:
    begin, end = sorted((dice.randrange(len(given) + 1), dice.randrange(len(given) + 1)))
    return given[:end] + given[begin:end] * dice.choice((1, 2, 50)) + given[end:]


def _inserted(given: bytes, dice: random.Random) -> bytes:
    place, odd = dice.randrange(len(given) + 1), dice.choice(ODD)
    raw = odd if isinstance(odd, str) else json.dumps(odd)
    return given[:place] + raw.encode(errors="surrogatepass") + given[place:]


def _number(given: bytes, dice: random.Random) -> bytes:
    """One run of digits becomes another number."""
    places = [index for index, one in enumerate(given[:5000]) if 48 <= one < 58]
    if not places:
        return given
    begin = dice.choice(places)
    end = begin
    while end < len(given) and 48 <= given[end] < 58:
        end += 1
    numbers = (b"0", b"-1", b"99999999999999999999", b"9" * 4400, b"1e999", b"0.5", b"00", b"", b"4294967296")
    return given[:begin] + dice.choice(numbers) + given[end:]


def _value(given: bytes, dice: random.Random) -> bytes:
    """Of a JSON document: one value becomes an odd one, one name an odd name, or one goes."""
    try:
        document = json.loads(given)
    except (ValueError, RecursionError):
        return _inserted(given, dice)
    at: Any = document
    while True:
        if not isinstance(at, dict | list) or not at:
            return json.dumps(dice.choice(ODD)).encode(errors="surrogatepass")
        key = dice.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if isinstance(at[key], dict | list) and at[key] and dice.random() < 0.85:
            at = at[key]
            continue
        draw = dice.random()
        if draw < 0.15:
            del at[key]
        elif draw < 0.25 and isinstance(at, dict):
            at[str(dice.choice(ODD))] = at.pop(key)
        else:
            at[key] = dice.choice(ODD)
        return json.dumps(document, ensure_ascii=dice.random() < 0.5).encode(errors="surrogatepass")


def _deep(given: bytes, dice: random.Random) -> bytes:
    depth = dice.choice((50, 2000, 60_000))
    opened, closed = dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"{", b"}"), (b"- ", b"")))
    return opened * depth + (given if dice.random() < 0.5 else b"0") + closed * depth


def _noise(_: bytes, dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 10, 1000)))


CHANGES = (_flip, _flip, _cut, _doubled, _inserted, _inserted, _number, _number, *[_value] * 8, _deep, _noise)
