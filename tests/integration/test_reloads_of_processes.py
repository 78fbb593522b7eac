"""Each process follows its own files: certificates, authorities of clients, passwords."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path

import bcrypt

from gpuslice.adapters.web.app import get
from gpuslice.adapters.web.messages import text_answer
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.apps.exporter.web import serve_all
from gpuslice.apps.webhook.main import Webhook
from gpuslice.apps.webhook.settings import WebhookSettings
from tests.contract.test_kube_reloads import replace_by
from tests.integration.console_rig import console
from tests.integration.reload_rig import CUT, Files, Line, Party, asked, until
from tests.integration.test_extender_hostile import victim
from tests.integration.test_web_serve import app_of


async def test_the_extender_follows_its_files(tmp_path: Path) -> None:
    parties = [Party() for _ in range(3)]
    async with victim(tmp_path) as extender:
        for before, at in ((0, 0), (0, 1), (1, 2), (2, 0)):
            lines: list[Line] = []
            if before != at:
                lines = [
                    await asyncio.to_thread(Line, extender.port, parties[before], h2=h2)
                    for h2 in (False, True)
                ]
            for name, content in (
                ("tls.crt", parties[at].certificate),
                ("tls.key", parties[at].key),
                ("ca.crt", parties[at].pem),
            ):
                replace_by(tmp_path / name, content, "by rename")
            for h2 in (True, False):
                for number, party in enumerate(parties):

                    def as_the_file_says(
                        party: Party = party, known: bool = number == at, h2: bool = h2
                    ) -> bool:
                        return asked(extender.port, party, "/debug/decisions", h2=h2) == (
                            "200" if known else CUT
                        )

                    await until(as_the_file_says)
            for line in lines:
                await until(lambda line=line: not line.is_open())  # type: ignore[misc]
                line.close()
            assert await asyncio.to_thread(served_by, extender.port) == parties[at].certificate.strip()


def served_by(port: int) -> str:
    return ssl.get_server_certificate(("localhost", port)).strip()


async def test_the_exporter_follows_its_web_config(tmp_path: Path) -> None:
    files = Files(tmp_path)
    a, b = Party(), Party()
    names = {name: str(files.path(name)) for name in ("tls.crt", "tls.key", "ca.crt")}
    config = files.path("web.yaml")

    def say(trusted: Party | None, **users: str) -> None:
        text = f"tls_server_config: {{cert_file: {names['tls.crt']}, key_file: {names['tls.key']}"
        if trusted is not None:
            files.serve_as(trusted)
            text += f", client_ca_file: {names['ca.crt']}, client_auth_type: RequireAndVerifyClientCert"
        hashed = {
            name: bcrypt.hashpw(word.encode(), bcrypt.gensalt(4)).decode() for name, word in users.items()
        }
        lines = "".join(f"  {name}: {word}\n" for name, word in hashed.items())
        files.put("web.yaml", f"{text}}}\nbasic_auth_users:\n{lines}" if users else text + "}\n")

    def answer(party: Party | None, word: str = "") -> str:
        pair = base64.b64encode(f"me:{word}".encode()).decode()
        return asked(port, party, "/metrics", headers=f"Authorization: Basic {pair}\r\n" if word else "")

    say(a)
    settings = ExporterSettings(address="127.0.0.1:0", web_config_file=str(config))
    app = app_of(get("/x", lambda _: text_answer("x")))
    async with serve_all(settings, ProcessMetrics(), app, app) as port:
        assert await asyncio.to_thread(answer, a) == "200"
        for one, other in ((b, a), (a, b)):
            line = await asyncio.to_thread(Line, port, other)
            say(one)
            await until(lambda one=one: answer(one) == "200")  # type: ignore[misc]
            assert await asyncio.to_thread(answer, other) == CUT
            await until(lambda line=line: not line.is_open())  # type: ignore[misc]
            line.close()
        for old, new in (("none", "first"), ("first", "second"), ("second", "first")):
            say(a, me=new)
            await until(lambda old=old: answer(a, old) == "401")  # type: ignore[misc]
            assert await asyncio.to_thread(answer, a, new) == "200"
        for content in (
            "",
            "tls_server_config: {cert_file: gone.crt, key_file: gone.key}",
            "nonsense: 1",
            "[",
        ):
            files.put("web.yaml", content)
            await asyncio.sleep(1.5)
            assert await asyncio.to_thread(answer, a, "first") == "200"
            assert await asyncio.to_thread(answer, None, "first") != "200"
            say(a, me="first")
            await until(lambda: answer(a, "first") == "200")


async def test_the_webhook_and_the_console_show_the_certificate_of_the_file(tmp_path: Path) -> None:
    async def rotated(files: Files, port: int) -> None:
        for party in (Party(), Party(), first):
            files.serve_as(party)
            await until(lambda party=party: served_by(port) == party.certificate.strip())  # type: ignore[misc]

    first = Party()
    folders = [Files(tmp_path / name) for name in ("webhook", "console")]
    pairs = []
    for files in folders:
        files.folder.mkdir()
        files.serve_as(first)
        pairs.append({"tls_certificate": str(files.path("tls.crt")), "tls_key": str(files.path("tls.key"))})
    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    process = Webhook(WebhookSettings(host="127.0.0.1", port=0, **pairs[0]))  # type: ignore[arg-type]
    running = asyncio.create_task(process.run(stopped, port.set_result))
    async with console(port=0, access="token", **pairs[1]) as rig:  # type: ignore[arg-type]
        number = int(rig.url.rpartition(":")[2].strip("/"))
        await asyncio.gather(rotated(folders[0], await port), rotated(folders[1], number))
    stopped.set_result(None)
    await running
