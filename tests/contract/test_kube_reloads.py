"""What a kubeconfig, or the pod's own account, does not say any more is not believed: without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import UnavailableError
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.transport import HttpTransport
from tests import HANG_S
from tests.contract.test_kube_wires import Authority, echo, serving


async def answer_or_watch(request: web.Request) -> web.StreamResponse:
    if "watch" not in request.query:
        return await echo(request)
    stream = web.StreamResponse()
    await stream.prepare(request)
    await stream.write(b"{}\n")
    await asyncio.sleep(HANG_S)
    return stream


def replace_by(path: Path, content: str, how: str) -> None:
    """As Helm, an editor, or kubelet replaces a file."""
    if how == "in place":
        path.write_text(content)
    elif how == "by rename":
        other = path.with_suffix(".new")
        other.write_text(content)
        other.rename(path)
    else:
        folder = path.parent / f"..{len(list(path.parent.iterdir()))}"
        folder.mkdir()
        (folder / path.name).write_text(content)
        link = path.parent / "..data.new"
        link.symlink_to(folder.name)
        link.rename(path.parent / "..data")
        if not path.is_symlink():
            path.unlink(missing_ok=True)
            path.symlink_to(Path("..data", path.name))


class Files:
    """A kubeconfig beside its authority, or the files of a pod's account."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def write(self, authority: Authority, url: str, token: str) -> None:
        user, cluster = {"token": token}, {"server": url, "certificate-authority": "ca.crt"}
        context = {"cluster": "c", "user": "u"}
        document = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        replace_by(self.folder / "ca.crt", authority.pem, self.how)
        replace_by(self.folder / "config", json.dumps(document), "by rename")


@contextlib.asynccontextmanager
async def transport_of(folder: Path) -> AsyncIterator[HttpTransport]:
    connection = connect({}, kubeconfig=str(folder / "config"))
    async with HttpTransport(connection, timeout_s=5, follow_every_s=0.02) as transport:
        yield transport


async def who(transport: HttpTransport) -> str:
    """What the server heard of us; "" where we do not trust it."""
    try:
        answer = await transport.request(ApiRequest("GET", "/"))
    except UnavailableError:
        return ""
    return str(json.loads(answer.body)["authorization"])


async def until_heard(transport: HttpTransport, token: str) -> None:
    async with asyncio.timeout(HANG_S):
        while await who(transport) != token:  # noqa: ASYNC110  # the server is on this loop, too
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["by rename", "in place", "by link"])
async def test_an_api_server_of_a_withdrawn_authority_is_not_trusted(how: str, tmp_path: Path) -> None:
    authorities = [Authority(trustme.CA()) for _ in range(3)]
    files = Files(tmp_path, how)
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(serving(answer_or_watch, each.server("127.0.0.1")))
            for each in authorities
        ]
        files.write(authorities[0], urls[0], "t0")
        transport = await stack.enter_async_context(transport_of(tmp_path))
        for at in (0, 1, 2, 0):
            watch = transport.stream(ApiRequest("GET", "/", {"watch": "1"})) if at else None
            if watch is not None:
                assert await anext(watch) == b"{}"
            files.write(authorities[at], urls[at], f"t{at}")
            await until_heard(transport, f"Bearer t{at}")
            if watch is not None:
                with pytest.raises(UnavailableError, match="has changed"):
                    await anext(watch)
            # the same server, shown by another authority: as if somebody stood between
            replace_by(tmp_path / "ca.crt", authorities[(at + 1) % 3].pem, how)
            await until_heard(transport, "")
            replace_by(tmp_path / "ca.crt", authorities[at].pem, how)
            await until_heard(transport, f"Bearer t{at}")


async def test_files_that_cannot_be_used_leave_the_way_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(trustme.CA())
    files = Files(tmp_path, "in place")
    async with serving(echo, authority.server("127.0.0.1")) as url:
        files.write(authority, url, "t")
        async with transport_of(tmp_path) as transport:
            assert await who(transport) == "Bearer t"
            half = authority.pem[:100]
            spoilt = [("ca.crt", half), ("ca.crt", None), ("config", "clusters: ["), ("config", None)]
            for name, content in [*spoilt, ("config", "")]:
                path = tmp_path / name
                path.unlink() if content is None else path.write_text(content)
                for _ in range(8):
                    assert await who(transport) == "Bearer t"
                    await asyncio.sleep(0.01)
                files.write(authority, url, "t")
            files.write(authority, url, "next")
            await until_heard(transport, "Bearer next")
    assert "the last one stays" in caplog.text
