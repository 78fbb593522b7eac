"""The console in front of a simulated cluster: what it answers, to whom, and what it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.web.app import Router, get, post
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer
from gpuslice.adapters.web.serve import Listen, serving
from gpuslice.apps.console.access import TokenAccess, Viewer
from tests import HANG_S
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.integration.console_rig import V100, Rig, console, node, sample

__all__ = ["shell"]

TIME = re.compile(r"(?:at|since) [-0-9]{10}T[0-9:]{8}Z")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def read(http: aiohttp.ClientSession, rig: Rig, path: str, **headers: str) -> Any:
    async with http.get(f"{rig.url}api/v1/{path}", headers=headers) as answer:
        return await answer.json(content_type=None)


async def until(ask: Callable[[], Any], holds: Callable[[Any], bool], pause_s: float = 0.02) -> Any:
    """Ask until it holds; the deadline ends a hang."""
    async with asyncio.timeout(HANG_S):
        while not holds(found := await ask()):  # noqa: ASYNC110
            await asyncio.sleep(pause_s)  # the next answer may be another
    return found


def by(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(row for row in rows if row["name"] == name)


async def test_the_whole_and_then_what_changed(http: aiohttp.ClientSession) -> None:
    async with console([node("n1", 2, V100)], [api_pod("waits", "40")]) as rig:
        whole = await until(lambda: read(http, rig, "cluster"), lambda found: "nodes" in found)
        assert whole["full"]
        assert whole["nodes"][0]["cards"] == [[0, 15, 16130, 0, 0], [1, 15, 16130, 0, 0]]
        (row,) = (await until(lambda: read(http, rig, "cluster"), lambda found: "waiting" in found))[
            "waiting"
        ]
        assert row["why"].startswith("It will never fit here: it asks for 40 units")
        assert row["never"]

        since = (await read(http, rig, "cluster"))["version"]
        coming = asyncio.create_task(read(http, rig, f"cluster?since={since}"))
        await rig.client.delete(PODS, "waits", "default", grace_s=0)
        changes = await asyncio.wait_for(coming, HANG_S)
        assert not changes["full"]
        assert changes["gone"]["pods"] == ["default/waits"]
        assert "nodes" not in changes


async def test_each_view_tells_what_the_commands_tell(http: aiohttp.ClientSession, shell: Shell) -> None:
    async with sample() as rig:
        ready = lambda found: "podUsage" in found and len(found.get("waiting", [])) == 13  # noqa: E731
        found = await until(lambda: read(http, rig, "cluster"), ready)
        assert by(found["podUsage"], "over-its-limit")["refused"] == 14
        assert by(found["podUsage"], "over-its-limit")["suggest"] == [5, 5376, True]
        assert by(found["nodes"], "gpu-a3")["sick"] == [3]
        assert by(found["quotas"], "gpus") == {
            "namespace": "research",
            "name": "gpus",
            "of": "units",
            "hard": "60",
            "used": "57",
        }
        assert "did you mean aliyun.com/gpu-mem?" in by(found["waiting"], "misspelt")["why"]

        (shell.folder / "config").write_text(rig.server.kubeconfig())
        for name in ("research/train-0", "vision/over-its-limit"):
            told = await shell("gpuslice", "explain", name)
            row = by(found["waiting"], name.partition("/")[2])
            for sentence in (row["why"], *row["help"]):
                if (
                    "refused" not in sentence and "Ask for" not in sentence
                ):  # the exporter is not behind its API
                    for part in TIME.split(sentence):  # the command says how long ago
                        assert part in told.out

        pod = await read(http, rig, "pod?namespace=vision&name=over-its-limit")
        assert [step["step"] for step in pod["way"] if step["done"]] == [
            "created",
            "decided",
            "bound",
            "allocated",
            "started",
        ]
        assert pod["way"][-1]["again"] == 14
        assert pod["neighbours"] == [{"pod": "vision/segment-6b4-aa1", "units": 5}]
        assert pod["suggestion"] == {"units": 5, "limitMiB": 5376, "more": True}
        assert pod["history"]["used"] == [3183]
        assert (await read(http, rig, "pod?namespace=vision&name=nobody"))["error"]

        health = await read(http, rig, "health")
        told = await shell("gpuslice", "doctor", "-o", "json")
        doctors = {(each["where"], each["what"]) for each in json.loads(told.out)["findings"]}
        shown = {(where, each["what"]) for each in health["findings"] for where in each["wheres"]}
        assert shown <= doctors
        trains = next(each for each in health["findings"] if "pod research/train-0" in each["wheres"])
        assert len(trains["wheres"]) == 9, "they wait for the same"
        assert trains["what"].startswith("has been waiting since 20")
        assert trains["fix"] == "gpuslice explain NAMESPACE/POD"
        assert any("XID 79" in each["what"] for each in health["findings"])

        advice = await read(http, rig, "advice")
        assert advice["resizes"][0]["pod"] == "over-its-limit"
        assert advice["namespaces"][0] == {"namespace": "notebooks", "mib": 21478}
        assert advice["cards"]


async def test_nothing_but_get_is_answered_and_the_path_is_the_key(http: aiohttp.ClientSession) -> None:
    async with console([node("n1", 1, V100)]) as rig:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            async with http.request(method, f"{rig.url}api/v1/cluster") as answer:
                assert answer.status == 405
        root = "/".join(rig.url.split("/")[:3])
        async with http.get(f"{root}/api/v1/cluster") as answer:
            assert answer.status == 404
        for host in ("evil.example", "[", "[evil]"):
            async with http.get(f"{rig.url}api/v1/cluster", headers={"Host": host}) as answer:
                assert answer.status == 421, host
        async with http.get(rig.url) as answer:
            assert answer.status == 200
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        async with http.get(rig.url.rstrip("/"), allow_redirects=False) as answer:
            assert answer.status == 308
            assert rig.url.endswith(answer.headers["Location"])
        for path in ("metrics", "healthz", "readyz", "livez", "version", "debug/stacks", "", "static/x.js"):
            async with http.get(f"{root}/{path}") as answer:
                assert answer.status == 404, path
            async with http.get(f"{rig.url}{path}", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421, path
            async with http.get(f"{root}/{path}", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421, path
    async with console([node("n1", 1, V100)], access="token") as rig:
        while not rig.console.state.synced:
            await rig.console.rows.newer_than(rig.console.rows.number)
        async with http.get(f"{rig.url}metrics") as answer:
            assert "gpuslice_console_nodes 1" in await answer.text()
        async with http.get(f"{rig.url}healthz") as answer:
            assert answer.status == 200


async def test_an_api_server_that_is_gone_is_told_and_what_was_known_stays(
    http: aiohttp.ClientSession,
) -> None:
    async with console([node("n1", 1, V100)]) as rig:
        await until(lambda: read(http, rig, "cluster"), lambda found: found["cluster"]["synced"])
        await rig.server.__aexit__(None, None, None)
        lost = lambda found: {"nodes", "pods"} <= found["cluster"]["problems"].keys()  # noqa: E731
        found = await until(lambda: read(http, rig, "cluster"), lost)
        assert found["nodes"]


async def test_it_asks_the_api_server_by_watches_alone(http: aiohttp.ClientSession) -> None:
    async with console([node("n1", 1, V100)], [api_pod("waits", "40")]) as rig:
        await until(lambda: read(http, rig, "cluster"), lambda found: "waiting" in found)
        rig.asked.clear()
        for view in ("cluster", "health", "advice") * 3:
            await read(http, rig, view)
        assert rig.asked == []
        await read(http, rig, "pod?namespace=default&name=waits")
        assert rig.asked == ["GET /api/v1/namespaces/default/events"]


@contextlib.asynccontextmanager
async def reviewer(allowed: set[tuple[str, str, str]], asked: list[dict[str, Any]]) -> AsyncIterator[int]:
    """An API server that knows the token "good" of anna, who may what `allowed` says: resource, namespace."""

    def tokens(request: HttpRequest) -> HttpResponse:
        token = json.loads(request.body)["spec"]["token"]
        user = {"username": "anna", "groups": ["nlp"]}
        return json_answer({"metadata": {}, "status": {"authenticated": token == "good", "user": user}}, 201)

    def rights(request: HttpRequest) -> HttpResponse:
        spec = json.loads(request.body)["spec"]
        asked.append(spec)
        place = spec["resourceAttributes"]
        key = (spec["user"], place["resource"], place.get("namespace", ""))
        return json_answer({"metadata": {}, "status": {"allowed": key in allowed}}, 201)

    routes = [
        post("/apis/authentication.k8s.io/v1/tokenreviews", tokens),
        post("/apis/authorization.k8s.io/v1/subjectaccessreviews", rights),
        get("/version", lambda _: json_answer({})),
    ]
    async with serving(Router(routes), Listen(0, "127.0.0.1", drain_s=0.1)) as port:
        yield port


async def test_a_token_sees_what_it_may_list() -> None:
    now = [0.0]
    asked: list[dict[str, Any]] = []
    allowed = {("anna", "pods", "nlp"), ("anna", "nodes", "")}
    async with (
        reviewer(allowed, asked) as port,
        HttpTransport(Connection(f"http://127.0.0.1:{port}")) as transport,
    ):
        access = TokenAccess(KubeClient(transport), LIMITS, lambda: now[0])
        shown = HttpRequest("GET", "/", {"authorization": "Bearer good"})
        for wrong in ({}, {"authorization": "Basic good"}, {"authorization": "Bearer bad"}):
            assert await access.viewer(HttpRequest("GET", "/", wrong), ["nlp"]) is None
        viewer = await access.viewer(shown, ["nlp", "vision"])
        assert viewer is not None
        assert (viewer.name, viewer.everything, viewer.nodes) == ("anna", False, True)
        assert (viewer.sees("nlp"), viewer.sees("vision"), viewer.sees("unheard-of")) == (True, False, False)
        assert asked[0]["groups"] == ["nlp"]
        count = len(asked)
        await access.viewer(shown, ["nlp", "vision"])
        assert len(asked) == count  # remembered for a while
        allowed.clear()
        now[0] += 61
        viewer = await access.viewer(shown, ["nlp", "vision"])
        assert viewer is not None
        assert not viewer.sees("nlp")


async def test_in_a_cluster_a_token_must_be_shown(http: aiohttp.ClientSession) -> None:
    async with console([node("n1", 1, V100)], access="token", base_path="/gpus") as rig:
        assert rig.url.endswith("/gpus/")
        async with http.get(f"{rig.url}api/v1/cluster") as answer:
            assert answer.status == 401
        found = await read(http, rig, "cluster", Authorization="Bearer any")
        assert found["cluster"]["viewer"] == "system:admin"
        async with http.get(rig.url) as answer:
            assert answer.status == 200


async def test_advise_prints_what_the_console_shows(shell: Shell) -> None:
    await shell.has([node("n1", 1, V100)])
    told = await shell("gpuslice", "advise")
    assert told.code == 0, told.err
    assert told.out.startswith("Nothing to advise: the peak of 0 pods is known")
    assert "is the exporter installed?" in told.err


async def test_a_request_asks_a_few_questions_however_many_namespaces_there_are() -> None:
    now, asked = [0.0], list[dict[str, Any]]()
    names = [f"team-{number:03}" for number in range(300)]
    allowed = {("anna", "pods", name) for name in names[280:]}
    async with (
        reviewer(allowed, asked) as port,
        HttpTransport(Connection(f"http://127.0.0.1:{port}")) as transport,
    ):
        access = TokenAccess(KubeClient(transport), LIMITS, lambda: now[0])
        shown = HttpRequest("GET", "/", {"authorization": "Bearer good"})

        async def looked(request: HttpRequest = shown) -> Viewer:
            before = len(asked)
            viewer = await access.viewer(request, names)
            assert viewer is not None
            assert len(asked) - before <= LIMITS.reviews_each + 2
            return viewer

        one = HttpRequest("GET", "/api/v1/pod?namespace=team-299&name=p", dict(shown.headers))
        assert (await looked(one)).sees("team-299")
        rounds = 1
        while not (await looked()).complete:
            rounds += 1
        assert rounds <= len(names) // LIMITS.reviews_each + 1
        viewer = await looked()
        assert {name for name in names if viewer.sees(name)} == set(names[280:])
        for _ in range(3):  # what is seen is asked again first, and stays
            now[0] += LIMITS.namespace_lasts_s + 1
            viewer = await looked()
            assert sum(map(viewer.sees, names)) >= LIMITS.reviews_each
            while not (await looked()).complete:
                pass
            assert {name for name in names if viewer.sees(name)} == set(names[280:])
        allowed.clear()
        now[0] += LIMITS.namespace_lasts_s + 1
        viewer = await looked()
        assert not any(map(viewer.sees, names))


async def test_a_viewer_is_let_in_beside_any_number_of_made_up_tokens() -> None:
    """Of those that wait the newest is next: the flood waits behind itself."""
    begun: list[str] = []
    doors: dict[str, asyncio.Event] = {}

    class Slow:
        async def request(self, request: ApiRequest) -> ApiResponse:
            spec = json.loads(request.body)["spec"]
            if "token" not in spec:
                return ApiResponse(201, {}, b'{"metadata":{},"status":{"allowed":true}}')
            begun.append(spec["token"])
            await doors.setdefault(spec["token"], asyncio.Event()).wait()
            status = {"authenticated": spec["token"] == "good", "user": {"username": "anna"}}
            return ApiResponse(201, {}, json.dumps({"metadata": {}, "status": status}).encode())

        def stream(self, request: ApiRequest) -> Any:
            raise AssertionError("nothing is watched")

    access = TokenAccess(KubeClient(Slow()), LIMITS)

    async def view(token: str) -> Viewer | None:
        try:
            return await access.viewer(HttpRequest("GET", "/", {"authorization": f"Bearer {token}"}), [])
        except KubeError:
            return None

    strangers = [asyncio.create_task(view(f"made-up-{number}")) for number in range(2000)]
    await asyncio.sleep(0)
    known = asyncio.create_task(view("good"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(not task.done() for task in strangers) < LIMITS.reviews_waiting
    assert len(begun) == LIMITS.reviews_at_once
    doors[begun[0]].set()  # one turn ends, and the next is the viewer's
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun[LIMITS.reviews_at_once :] == ["good"]
    doors["good"].set()
    viewer = await known
    assert viewer is not None
    assert viewer.name == "anna"
    for task in strangers:
        task.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
