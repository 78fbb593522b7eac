"""The open-source ``arena top node -o json`` and ours say the same, of whatever cluster.

Set GPUSLICE_ORIGINAL_ARENA to a build of that program (kubeflow/arena, 0.15). It names who asks by TLS alone,
which the simulated API server does not speak.
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

import pytest
import trustme
import yaml

from simcluster.apiserver.server import ApiServer
from tests.contract.random_api import printed, some_cluster

ORIGINAL = os.environ.get("GPUSLICE_ORIGINAL_ARENA", "")
OURS = Path(sys.executable).parent / "gpuslice"
WORDS = ("top", "node", "-o", "json")

if not ORIGINAL:
    pytest.skip("GPUSLICE_ORIGINAL_ARENA is not set", allow_module_level=True)


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


@pytest.mark.parametrize("seed", range(25))
async def test_arena_says_the_same(seed: int, tmp_path: Path) -> None:
    api, config = some_cluster(seed), tmp_path / "config"
    async with ApiServer(api.cluster) as server, by_tls(int(server.url.rpartition(":")[2])) as url:
        kubeconfig = yaml.safe_load(server.kubeconfig())
        kubeconfig["clusters"][0]["cluster"] = {"server": url, "insecure-skip-tls-verify": True}
        kubeconfig["users"][0]["user"] = {"username": "somebody", "password": "secret"}
        config.write_text(yaml.safe_dump(kubeconfig))
        ours, theirs = await printed(OURS, config, *WORDS), await printed(ORIGINAL, config, *WORDS)
    assert sorted_out(json.loads(ours)) == sorted_out(json.loads(theirs))
