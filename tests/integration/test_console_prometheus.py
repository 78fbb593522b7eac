"""The console in front of a real Prometheus: below a path, with a password, and what it then shows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import bcrypt
import pytest
import trustme
import yaml

from gpuslice.adapters.web.app import Router, get
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer
from gpuslice.adapters.web.serve import Listen, serving
from gpuslice.diagnosis.prometheus import Prometheus, PrometheusError
from gpuslice_demo.ports import free_port
from tests import HANG_S
from tests.integration.console_rig import HOLDERS, V100, console, exporter_page, exporters, sample_nodes
from tests.integration.console_rig import held as holding
from tests.integration.test_console import http, read, until
from tests.tools import find

__all__ = ["http"]
PASSWORD = b"s3cret/@"
PAUSE_S = 0.25  # Prometheus scrapes and evaluates once a second; each question costs both a bit
ALERT = {
    "alert": "GpuCardFull",
    "expr": "gpuslice_gpu_memory_used_bytes > 0",
    "labels": {"severity": "critical"},
    "annotations": {"summary": "A card is full.", "description": "Look at it."},
}


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[str]:
    """Its URL, below a path and with a user; it scrapes each second."""
    port = free_port()
    files = {
        "prometheus.yaml": {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": "e", "honor_labels": True, "static_configs": [{"targets": targets}]}
            ],
        },
        "rules.yaml": {"groups": [{"name": "g", "rules": [ALERT, {**ALERT, "alert": "OfOthers"}]}]},
        "web.yaml": {"basic_auth_users": {"anna": bcrypt.hashpw(PASSWORD, bcrypt.gensalt(4)).decode()}},
    }
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content))
    process = await asyncio.create_subprocess_exec(
        find("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--web.config.file={folder / 'web.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.external-url=http://127.0.0.1/metrics/db",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://anna:s3cret%2F%40@127.0.0.1:{port}/metrics/db/"
    finally:
        process.terminate()
        await process.wait()


async def test_all_of_use_comes_from_a_prometheus_below_a_path_with_a_password(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    find("prometheus")
    page = exporter_page("gpu-a1", V100, HOLDERS)
    pods = [holding(each, datetime.now(UTC)) for each in HOLDERS if each.node == "gpu-a1"]
    async with exporters({"gpu-a1": page}) as found:
        target = f"127.0.0.1:{found[0]['metadata']['annotations']['prometheus.io/port']}"
        async with (
            prometheus(tmp_path, [target]) as url,
            console(sample_nodes(), pods, prometheus_url=url, usage_interval_s=1.0) as rig,
        ):
            seen = await until(lambda: read(http, rig, "cluster"), lambda told: "podUsage" in told, PAUSE_S)
            assert seen["cluster"]["history"] == "prometheus"
            assert {row["name"] for row in seen["podUsage"]} == {pod["metadata"]["name"] for pod in pods}

            about = "pod?namespace=nlp&name=embed-0"
            enough = lambda pod: any(pod["history"]["used"]) and any(pod["history"]["sm"])  # noqa: E731
            history = (await until(lambda: read(http, rig, about), enough, PAUSE_S))["history"]
            assert history["source"] == "prometheus"
            assert history["used"][-1] == pytest.approx(0.31 * 4301, abs=2)
            assert history["sm"][-1] == 12

            teams = await until(lambda: read(http, rig, "teams"), lambda told: told["hours"], PAUSE_S)
            assert teams["span"] == 86400
            by_name = {row["namespace"]: row for row in teams["hours"]}
            assert by_name["nlp"]["held"] > by_name["nlp"]["used"] > 0

            alerted = lambda told: any(each["state"] == "firing" for each in told["alerts"])  # noqa: E731
            health = await until(lambda: read(http, rig, "health"), alerted, PAUSE_S)
            assert {each["name"] for each in health["alerts"]} == {"GpuCardFull"}
            first = health["alerts"][0]
            assert (first["severity"], first["what"]) == ("critical", "A card is full.")
            assert first["where"].startswith("node gpu-a1, gpu ")


async def test_a_prometheus_that_refuses_is_told_of_without_its_password(tmp_path: Path) -> None:
    find("prometheus")
    async with prometheus(tmp_path, []) as url:
        right, wrong = Prometheus(url), Prometheus(url.replace("s3cret", "guessed"))
        async with asyncio.timeout(HANG_S):
            while True:  # it starts
                with contextlib.suppress(PrometheusError):
                    assert await asyncio.to_thread(right.alerts) == []
                    break
                await asyncio.sleep(0.1)
        with pytest.raises(PrometheusError, match="401") as told:
            await asyncio.to_thread(wrong.alerts)
        assert "guessed" not in str(told.value)


async def test_a_token_from_a_file_goes_to_a_prometheus_whose_authority_is_known(tmp_path: Path) -> None:
    authority, token = trustme.CA(), tmp_path / "token"
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "tls.pem"))
    shown: list[str] = []

    def answer(request: HttpRequest) -> HttpResponse:
        shown.append(request.headers.get("authorization", ""))
        return json_answer({"status": "success", "data": {"alerts": []}})

    pem = str(tmp_path / "tls.pem")
    listen = Listen(0, "127.0.0.1", certificate=pem, key=pem, drain_s=0.1)
    async with serving(Router([get("/api/v1/alerts", answer)]), listen) as port:
        url = f"https://127.0.0.1:{port}"
        known = Prometheus(url, str(token), str(tmp_path / "ca.crt"))
        for words in ("first\n", "second"):  # a token is renewed while the process runs
            token.write_text(words)
            assert await asyncio.to_thread(known.alerts) == []
        assert shown == ["Bearer first", "Bearer second"]
        with pytest.raises(PrometheusError, match="certificate verify failed"):
            await asyncio.to_thread(Prometheus(url, str(token)).alerts)
        with pytest.raises(PrometheusError, match="authority: No such file"):
            await asyncio.to_thread(Prometheus(url, str(token), f"{tmp_path}/authority").alerts)
        token.unlink()
        with pytest.raises(PrometheusError, match="token: No such file"):
            await asyncio.to_thread(known.alerts)
    assert len(shown) == 2
