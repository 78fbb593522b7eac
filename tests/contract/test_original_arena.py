"""The open-source ``arena top node`` and ours say the same, of whatever cluster.

Set GPUSLICE_ORIGINAL_ARENA to a build of kubeflow/arena 0.15, and GPUSLICE_ORIGINAL_ARENA_0_4 to one of
commit 829b0e9, the version of the vendor's documents. Both name who asks by TLS alone, which the simulated
API server does not speak.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml

from gpuslice_demo.ports import free_port
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from tests.contract.random_api import lines_of, printed, some_cluster
from tests.contract.test_cli_cluster import Shell
from tests.golden.clusters import five_nodes, three_notebooks
from tests.golden.test_tables import HERE as GOLDEN
from tests.integration.exporter_rig import gpu_node, have_native
from tests.integration.test_exporter_prometheus import prometheus, wait_for
from tests.integration.test_exporter_story import MIB, app

ORIGINAL = os.environ.get("GPUSLICE_ORIGINAL_ARENA", "")
ORIGINAL_0_4 = os.environ.get("GPUSLICE_ORIGINAL_ARENA_0_4", "")
OURS = Path(sys.executable).parent / "gpuslice"
current = pytest.mark.skipif(not ORIGINAL, reason="GPUSLICE_ORIGINAL_ARENA is not set")
documented = pytest.mark.skipif(not ORIGINAL_0_4, reason="GPUSLICE_ORIGINAL_ARENA_0_4 is not set")


@asynccontextmanager
async def by_tls(port: int) -> AsyncIterator[str]:
    """The address of a server that passes on what it is sent, without TLS."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ssl.SSLError):
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def sorted_out(document: dict[str, Any]) -> dict[str, Any]:
    """What is the same in both: not the words about a node, and its pods in some order."""
    for node in [each for nodes in document.values() for each in nodes]:
        del node["description"]
        for name, key in (("instances", "name"), ("devices", "id")):
            if name in node:
                node[name] = sorted(node[name], key=lambda each: each[key])
    return {name: sorted(nodes, key=lambda node: node["name"]) for name, nodes in document.items()}


@asynccontextmanager
async def seen_by_arena(server: ApiServer, folder: Path) -> AsyncIterator[Path]:
    """The kubeconfig by which arena reads this API server."""
    async with by_tls(int(server.url.rpartition(":")[2])) as url:
        kubeconfig = yaml.safe_load(server.kubeconfig())
        kubeconfig["clusters"][0]["cluster"] = {"server": url, "insecure-skip-tls-verify": True}
        kubeconfig["users"][0]["user"] = {"username": "somebody", "password": "secret"}
        config = folder / "config"
        config.write_text(yaml.safe_dump(kubeconfig))
        yield config


@current
@pytest.mark.parametrize("seed", range(25))
async def test_arena_says_the_same(seed: int, tmp_path: Path) -> None:
    words = ("top", "node", "-o", "json")
    async with ApiServer(some_cluster(seed).cluster) as server, seen_by_arena(server, tmp_path) as config:
        ours, theirs = await printed(OURS, config, *words), await printed(ORIGINAL, config, *words)
    assert sorted_out(json.loads(ours)) == sorted_out(json.loads(theirs))


@current
@pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")
async def test_arena_shows_what_prometheus_has_of_our_exporter(tmp_path: Path) -> None:
    legacy = free_port()
    async with (
        gpu_node(tmp_path) as host,
        host.exporter(legacy_address=f"127.0.0.1:{legacy}"),
        prometheus(tmp_path / "prometheus", legacy) as url,
        aiohttp.ClientSession() as session,
        seen_by_arena(host.node.server, tmp_path) as config,
    ):
        for name in ("app-0", "app-1"):
            await host.node.create(app(name, 4))
        await wait_for(session, url, f"sum(nvidia_gpu_memory_used_bytes) == {2 * 3193 * MIB}")
        words = ("top", "node", "--metric", "-o", "json")
        told = json.loads(await printed(ORIGINAL, config, *words, PROMETHEUS_ADDRESS=url))
    (node,) = told["gpuShareNodes"]
    (card,) = node["gpuMetrics"]
    assert card["usedGPUMemory"] == 2 * 3193 * MIB  # the sum of the containers
    assert card["totalGPUMemory"] == 15 << 30  # the card's own, which arena cuts to whole GiB
    assert set(card["podNames"]) == {"default/app-0", "default/app-1"}


@documented
@pytest.mark.parametrize(
    ("table", "pods", "words"),
    [
        ("top-node", [], ""),
        ("top-node-shared-empty", [], "-s"),
        ("top-node-shared", three_notebooks(), "-s"),
        ("top-node-shared-details", three_notebooks(), "-s -d"),
    ],
)
async def test_the_documented_arena_prints_the_documented_tables(
    table: str, pods: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    async with ApiServer(Cluster()) as server, seen_by_arena(server, tmp_path) as config:
        await Shell(tmp_path, server).has(five_nodes(), pods)
        theirs = await printed(ORIGINAL_0_4, config, "top", "node", *words.split())
    assert theirs == (GOLDEN / "printed" / f"{table}.txt").read_text()


@documented
@pytest.mark.parametrize("seed", range(25))
async def test_the_documented_arena_says_the_same(seed: int, tmp_path: Path) -> None:
    """Of pods on one card each: it knows no pods on several, and shows them as 0 on each."""
    api = some_cluster(seed, most_cards=1)
    async with ApiServer(api.cluster) as server, seen_by_arena(server, tmp_path) as config:
        for words in ("", "-d", "-s", "-s -d"):
            asked = ("top", "node", *words.split())
            ours, theirs = await printed(OURS, config, *asked), await printed(ORIGINAL_0_4, config, *asked)
            if not ours:
                assert "0/0 () (0%)" in theirs  # an empty table, where ours says on stderr what to do
            else:
                assert lines_of(ours) == lines_of(theirs)
