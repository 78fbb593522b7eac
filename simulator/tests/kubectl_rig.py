"""The real kubectl against the simulated API server: one server, many commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from deadline import HANG_S

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.transport import HttpTransport
from simcluster.apiserver import ApiServer
from simcluster.cluster.cluster import Cluster

KUBECTL = Path(sys.executable).parent / "kubectl"


@dataclass(frozen=True)
class Outcome:
    """How one command ended."""

    code: int
    out: str
    err: str


@dataclass
class Rig:
    """A server and a folder with its kubeconfig."""

    server: ApiServer
    folder: Path
    client: KubeClient

    @property
    def cluster(self) -> Cluster:
        return self.server.cluster

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        """kubectl running, with pipes."""
        home = {
            "KUBECONFIG": str(self.folder / "config"),
            "HOME": str(self.folder),
            "PATH": os.environ["PATH"],
        }
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            KUBECTL, *words, env=home, stdin=pipe, stdout=pipe, stderr=pipe
        )

    async def run(self, *words: str, text: str = "") -> Outcome:
        """kubectl to its end; `text` is its standard input."""
        process = await self.start(*words)
        async with asyncio.timeout(HANG_S):
            out, err = await process.communicate(text.encode())
        assert process.returncode is not None
        return Outcome(process.returncode, out.decode(), err.decode())

    async def ok(self, *words: str, text: str = "") -> str:
        """The output of a command that must succeed."""
        outcome = await self.run(*words, text=text)
        assert outcome.code == 0, f"kubectl {' '.join(words)}: {outcome.err}{outcome.out}"
        return outcome.out

    async def fails(self, *words: str, text: str = "") -> str:
        """The complaint of a command that must not."""
        outcome = await self.run(*words, text=text)
        assert outcome.code != 0, f"kubectl {' '.join(words)}: {outcome.out}"
        return outcome.err


@contextlib.asynccontextmanager
async def kubectl_rig(folder: Path) -> AsyncIterator[Rig]:
    async with ApiServer(Cluster()) as server:
        (folder / "config").write_text(server.kubeconfig())
        async with HttpTransport(Connection(server.url), connections=100) as transport:
            yield Rig(server, folder, KubeClient(transport))


def rows(table: str) -> list[list[str]]:
    """The cells of a printed table, without the header."""
    return [line.split() for line in table.splitlines()[1:]]
