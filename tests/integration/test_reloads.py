"""Who was let in by what a file said is let in no longer once it says so: no server needs a restart."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from gpuslice.adapters.web.app import for_known_clients, get
from gpuslice.adapters.web.messages import HttpResponse, text_answer
from gpuslice.adapters.web.serve import Listen, serving
from tests.integration.reload_rig import CUT, HOWS, Files, Line, Party, asked, client_context, until
from tests.integration.test_extender_hostile import NAME
from tests.integration.test_web_serve import app_of


@contextlib.asynccontextmanager
async def served(
    files: Files, *, h2: bool = False, hold: threading.Event | None = None
) -> AsyncIterator[int]:
    async def slow(_: object) -> HttpResponse:
        assert hold is not None
        await asyncio.to_thread(hold.wait)
        return text_answer("at last")

    routes = [for_known_clients(get("/act", lambda _: text_answer("done"))), get("/slow", slow)]
    listen = Listen(
        0,
        "localhost",
        certificate=str(files.path("tls.crt")),
        key=str(files.path("tls.key")),
        client_ca=str(files.path("ca.crt")),
        client_names=frozenset({NAME}),
        http2=h2,
        drain_s=0.5,
        reload_every_s=0.02,
    )
    async with serving(app_of(*routes), listen) as port:
        yield port


@pytest.mark.parametrize("h2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("how", HOWS)
async def test_clients_of_an_authority_that_is_rotated_out_are_strangers(
    how: str, h2: bool, tmp_path: Path
) -> None:
    parties = [Party() for _ in range(3)]
    files = Files(tmp_path, how)
    files.serve_as(parties[0])
    async with served(files, h2=h2) as port:
        before = parties[0]
        for at in (1, 2, 0, 1):
            line = await asyncio.to_thread(Line, port, before, h2=h2)
            files.serve_as(parties[at])
            await until(lambda at=at: asked(port, parties[at], "/act", h2=h2) == "200")  # type: ignore[misc]
            found = [await asyncio.to_thread(asked, port, each, "/act", h2=h2) for each in parties]
            assert [answer == "200" for answer in found] == [each is parties[at] for each in parties]
            assert await asyncio.to_thread(asked, port, None, "/act", h2=h2) == "403"
            await until(lambda line=line: not line.is_open())  # type: ignore[misc]
            line.close()
            before = parties[at]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_on_either_event_loop(loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path) -> None:
    async def rotated() -> None:
        before, after = Party(), Party()
        files = Files(tmp_path)
        files.serve_as(before)
        async with served(files) as port:
            line = await asyncio.to_thread(Line, port, before)
            files.serve_as(after)
            await until(lambda: asked(port, before, "/act") == CUT)
            await until(lambda: not line.is_open())
            line.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(rotated())


async def test_an_authority_that_joins_ends_nobodys_connection_and_one_that_leaves_its_clients(
    tmp_path: Path,
) -> None:
    before, after = Party(), Party()
    files = Files(tmp_path)
    files.serve_as(before)
    async with served(files) as port:
        line = await asyncio.to_thread(Line, port, before)
        assert await asyncio.to_thread(line.ask, "/act") == "200"
        files.serve_as(before, before, after)
        await until(lambda: asked(port, after, "/act") == "200")
        assert await asyncio.to_thread(line.ask, "/act") == "200"
        files.serve_as(after, after)
        await until(lambda: not line.is_open())
        line.close()


@pytest.mark.parametrize("h2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_an_answer_in_progress_is_given_and_one_that_takes_too_long_is_not(
    h2: bool, tmp_path: Path
) -> None:
    before, after = Party(), Party()
    files, hold = Files(tmp_path), threading.Event()
    files.serve_as(before)
    async with served(files, h2=h2, hold=hold) as port:
        for given in (True, False):
            line = await asyncio.to_thread(Line, port, before, h2=h2)
            answer = asyncio.create_task(asyncio.to_thread(line.ask, "/slow"))
            await asyncio.sleep(0.05)
            files.serve_as(after)
            await until(lambda: asked(port, before, "/act", h2=h2) == CUT)
            if given:
                hold.set()
                assert await answer == "200"
                hold.clear()
            else:
                assert await answer == CUT
            await until(lambda line=line: not line.is_open())  # type: ignore[misc]
            line.close()
            hold.set() if not given else files.serve_as(before)
            await until(lambda given=given: not given or asked(port, before, "/act") == "200")  # type: ignore[misc]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_the_trust_that_began_it(version: ssl.TLSVersion, tmp_path: Path) -> None:
    before, after = Party(), Party()
    files = Files(tmp_path)
    files.serve_as(before)
    context = client_context(before)
    context.maximum_version = version

    def resumed(session: ssl.SSLSession | None) -> tuple[str, ssl.SSLSession | None]:
        try:
            line = Line(port, before, context=context, session=session)
        except OSError:
            return CUT, None
        with contextlib.closing(line):
            return line.ask("/act"), line.tls.session

    async with served(files) as port:
        answer, session = await asyncio.to_thread(resumed, None)
        assert answer == "200"
        files.serve_as(after)
        await until(lambda: asked(port, after, "/act") == "200")
        assert (await asyncio.to_thread(resumed, session))[0] == CUT


SPOILT: dict[str, tuple[str, Callable[[Party], str] | None]] = {
    "half of the certificate": ("tls.crt", lambda other: other.certificate[:200]),
    "no certificate": ("tls.crt", None),
    "an empty key": ("tls.key", lambda _: ""),
    "the key of another": ("tls.key", lambda other: other.key),
    "half of the CA": ("ca.crt", lambda other: other.pem[:200]),
    "no CA": ("ca.crt", None),
    "an empty CA": ("ca.crt", lambda _: ""),
}


@pytest.mark.parametrize("what", SPOILT)
async def test_files_that_cannot_be_used_leave_the_last_in_force_and_are_told(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, content = SPOILT[what]
    party, other = Party(), Party()
    files = Files(tmp_path, "in place")
    files.serve_as(party)
    async with served(files) as port:
        if content is None:
            files.path(name).unlink()
        else:
            files.put(name, content(other))
        await until(lambda: "certificates not reloaded, the last ones stay" in caplog.text)
        assert await asyncio.to_thread(asked, port, party, "/act") == "200"
        assert await asyncio.to_thread(asked, port, other, "/act") == CUT
        files.serve_as(other)
        await until(lambda: asked(port, other, "/act") == "200")
        assert await asyncio.to_thread(asked, port, party, "/act") == CUT


async def test_an_authority_is_withdrawn_although_the_new_key_is_of_another_certificate(
    tmp_path: Path,
) -> None:
    before, after = Party(), Party()
    files = Files(tmp_path)
    files.serve_as(before)
    async with served(files) as port:
        files.put("tls.key", after.key)
        files.put("ca.crt", after.pem)
        await until(lambda: asked(port, after, "/act") == "200")
        assert await asyncio.to_thread(asked, port, before, "/act") == CUT
