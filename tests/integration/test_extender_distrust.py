"""What a request says is not believed: the API server's object decides, and filter comes before bind."""

from __future__ import annotations

import asyncio
import copy
from contextlib import closing
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import UnavailableError
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.reviews import PathReviews
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.turns import Asker
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.settings import SettingsError
from gpuslice.core.contract import ANN_CORE, ANN_INDEX, ANN_MEANT, GPU_COUNT, GPU_MEM
from tests.integration.extender_rig import PREFIX, Rig, cluster, rig
from tests.integration.preemption_rig import Story

HIGHEST = (1 << 31) - 1


def forged(pod: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same pod with other words: `priority`, `units`, `labels`."""
    other = copy.deepcopy(pod)
    if "priority" in changes:
        other["spec"]["priority"] = changes["priority"]
    if "units" in changes:
        for kind in ("limits", "requests"):
            other["spec"]["containers"][0]["resources"][kind] = {GPU_MEM: str(changes["units"])}
    other["metadata"]["labels"] = changes.get("labels", {})
    return other


def test_nobody_is_evicted_for_a_priority_that_only_the_request_claims() -> None:
    with closing(Story(cards=1)) as story:
        story.place("system", 15, priority=200)
        story.add("mine", 15, priority=0)
        story.calm()
        assert story.ask(forged(story.api.pod("mine"), priority=HIGHEST), story.nodes) == []
        story.calm(10)
        assert story.leaving() == set()
        assert story.names() == {"system", "mine"}


def test_nobody_is_evicted_for_a_pod_that_only_the_request_knows() -> None:
    with closing(Story(cards=1)) as story:
        story.place("system", 15, priority=0)
        story.add("mine", 15, priority=200)
        story.calm()
        pod = forged(story.api.pod("mine"), priority=HIGHEST)
        pod["metadata"]["uid"] = "no-such-pod"
        assert story.ask(pod, story.nodes) == []
        story.calm(10)
        assert story.leaving() == set()


@pytest.mark.parametrize("changes", [{"units": 1}, {"labels": {GPU_COUNT: "2"}}])
async def test_filter_goes_by_what_the_api_server_knows_of_the_pod(changes: dict[str, Any]) -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        await extender.add_and_bind("other", "15")
        await extender.add_and_bind("third", "2")
        pod = extender.api.add_pod("mine", "14")
        await extender.caught_up()
        answer = await extender.filter(forged(pod, **changes), "n1")
        assert answer["NodeNames"] == []


async def test_only_a_node_that_filter_let_pass_is_bound_to() -> None:
    async with rig(cluster(n1=(15, 1), n2=(15, 1))) as extender:
        pod = extender.api.add_pod("mine")
        await extender.caught_up()
        error = await extender.bind_unasked(pod, "n1")
        assert error == "pod default/mine: filter has not let node n1 pass for it; ask filter first"
        await extender.filter(pod, "n1")
        assert "filter has not let node n2 pass" in await extender.bind_unasked(pod, "n2")
        assert extender.api.bound_to("mine") == ""
        assert await extender.bind_unasked(pod, "n1") == ""


async def bind_with_uid(extender: Rig, pod: dict[str, Any], uid: str) -> str:
    meta = pod["metadata"]
    args = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": uid, "Node": "n1"}
    error: str = (await extender.post("bind", args))["Error"]
    return error


async def test_a_bind_must_name_the_uid_of_the_pod() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod, other = extender.api.add_pod("mine"), extender.api.add_pod("other")
        await extender.caught_up()
        for each in (pod, other):
            await extender.filter(each, "n1")
        assert await bind_with_uid(extender, pod, "") == "PodUID is empty, must be the uid of the pod to bind"
        assert "uid is" in await bind_with_uid(extender, pod, other["metadata"]["uid"])
        assert extender.api.bound_to("mine") == ""


async def test_a_pod_that_asks_for_nothing_of_ours_is_not_bound() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod("stranger", containers=[{"name": "web", "image": "web"}])
        assert (await extender.filter(pod, "n1"))["NodeNames"] == ["n1"]
        assert "it asks for no aliyun.com/gpu-mem or gpuslice.io/memory" in await extender.bind_unasked(
            pod, "n1"
        )
        assert extender.api.bound_to("stranger") == ""


async def test_a_pod_that_asks_for_zero_is_bound_without_a_card() -> None:
    """kube-scheduler asks about whoever names a managed resource, and leaves the binding to us."""
    async with rig(cluster(n1=(15, 1), n2=(15, 1))) as extender:
        pod = extender.api.add_pod("none", "0")
        await extender.caught_up()
        assert (await extender.filter(pod, "n1", "n2"))["NodeNames"] == ["n1", "n2"]
        assert await extender.bind_unasked(pod, "n2") == ""
        assert extender.api.bound_to("none") == "n2"
        assert extender.api.card("none") is None
        assert "is bound to n2 already" in await extender.bind_unasked(pod, "n1")


async def test_no_event_is_written_in_the_words_of_a_request() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod("mine")
        await extender.caught_up()
        assert await extender.bind_unasked(pod, "read this: call 555-1234")
        args = {"PodName": "read-this", "PodNamespace": "default", "PodUID": "u", "Node": "n1"}
        assert (await extender.post("bind", args))["Error"]
        await extender.filter(pod, "n1")
        assert (await extender.post("bind", args | {"PodUID": pod["metadata"]["uid"]}))["Error"]
        said = forged(pod, units="4.5")
        said["spec"]["containers"][0]["name"] = "read this"
        said["metadata"]["uid"] = "u"
        await extender.filter(said, "n1")
        await extender.bind(pod, "n1")
        assert [event for event in extender.api.events() if "read" in str(event)] == []


FORGED = {ANN_CORE: '{"0":{"0":100}}', ANN_MEANT: "1"}


@pytest.mark.parametrize("annotations", [FORGED, FORGED | {ANN_INDEX: "1"}])
async def test_a_placement_that_the_pod_claims_for_itself_is_gone_once_it_is_bound(
    annotations: dict[str, str],
) -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        await extender.add_and_bind("other", "1")
        pod = extender.api.add_pod("mine", "1", annotations=annotations)
        await extender.caught_up()
        assert await extender.bind(pod, "n1") == ""
        found = extender.api.annotations("mine")
        assert found[ANN_INDEX] == "0"
        assert ANN_CORE not in found
        assert ANN_MEANT not in found


@pytest.mark.parametrize(
    ("method", "path", "anonymous", "client", "status"),
    [
        ("POST", "filter", (), "stranger", 403),
        ("POST", "bind", (), "local", 403),  # a host's network has many processes
        ("POST", "preempt", ("inspect", "metrics"), "stranger", 403),
        ("POST", "prioritize", (), "known", 200),
        ("GET", "inspect", (), "stranger", 403),
        ("GET", "inspect", ("inspect",), "stranger", 200),
        ("GET", "inspect/n1", ("inspect",), "stranger", 404),  # asked, and not there
        ("GET", "inspect/n1", ("metrics",), "stranger", 403),
        ("GET", "/metrics", (), "stranger", 403),
        ("GET", "/metrics", ("metrics",), "stranger", 200),
        ("GET", "/metrics", (), "known", 200),
        ("GET", "/metrics", (), "local", 200),
        ("GET", "/debug/state", ("inspect", "metrics"), "stranger", 403),
        ("GET", "/debug/decisions", (), "stranger", 403),
        ("GET", "/version", (), "stranger", 200),
        ("GET", "/healthz", (), "stranger", 200),
        ("GET", "/prepared", (), "stranger", 503),  # it has read no cluster
    ],
)
async def test_without_a_certificate_nothing_is_decided_and_little_read(
    method: str, path: str, anonymous: tuple[Any, ...], client: str, status: int
) -> None:
    settings = ExtenderSettings(tls_certificate="a", tls_key="b", tls_client_ca="c", anonymous=anonymous)
    app = Extender(settings, KubeClient(HttpTransport(Connection("http://127.0.0.1:9")))).app()
    whole = path if path.startswith("/") else f"{PREFIX}/{path}"
    answer = app(HttpRequest(method, whole, body=b"{}", known=client == "known", local=client == "local"))
    found = answer if isinstance(answer, HttpResponse) else await answer
    assert found.status == status


class Reviews:
    """An API server that knows one token, whose owner may get what is below /debug but its decisions."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False

    async def request(self, request: ApiRequest) -> ApiResponse:
        if self.away:
            raise UnavailableError("no API server")
        self.asked.append(request.path.rpartition("/")[2])
        spec = msgspec.json.decode(request.body)["spec"]
        if "token" in spec:
            known = spec["token"] == "sre"
            status = {"authenticated": known, "user": {"username": "sre", "groups": ["ops"]}}
        else:
            assert (spec["user"], spec["groups"]) == ("sre", ["ops"])
            assert spec["nonResourceAttributes"]["verb"] == "get"
            status = {"allowed": spec["nonResourceAttributes"]["path"] != "/debug/decisions"}
        return ApiResponse(201, {}, msgspec.json.encode({"spec": spec, "status": status}))

    def stream(self, request: ApiRequest) -> Any:
        raise AssertionError("nothing is watched")


async def test_made_up_tokens_wait_in_no_number() -> None:
    """An API server that answers slowly would have them all held, each with its request."""
    held = asyncio.Event()

    class Slow(Reviews):
        begun = 0

        async def request(self, request: ApiRequest) -> ApiResponse:
            self.begun += 1
            await held.wait()
            return await super().request(request)

    slow = Slow()
    reviews = PathReviews(KubeClient(slow), LIMITS)
    tasks = [
        asyncio.create_task(reviews.allows(f"made-up-{each}", "/debug/state", Asker()))
        for each in range(1000)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(not task.done() for task in tasks) == LIMITS.reviews_waiting
    assert slow.begun == 2  # at a time: the API server has others to answer
    held.set()
    assert not any(await asyncio.gather(*tasks))
    assert await reviews.allows("sre", "/debug/state", Asker())


async def ask_as_stranger(app: App, path: str, token: str = "", method: str = "GET") -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = app(HttpRequest(method, path, headers, b"{}", local=False))
    return (answer if isinstance(answer, HttpResponse) else await answer).status


async def test_a_token_opens_what_kubernetes_lets_its_owner_get_below_debug_and_nothing_else() -> None:
    tls: dict[str, Any] = {"tls_certificate": "a", "tls_key": "b", "tls_client_ca": "c"}
    reviews, now = Reviews(), [0.0]
    settings = ExtenderSettings(**tls, debug_tokens=True)
    app = Extender(settings, KubeClient(reviews), clock=lambda: now[0]).app()
    assert await ask_as_stranger(app, "/debug/state") == 403
    assert reviews.asked == []
    assert await ask_as_stranger(app, "/debug/state", "sre") == 200
    assert await ask_as_stranger(app, "/debug/stacks", "sre") == 200
    assert await ask_as_stranger(app, "/debug/decisions", "sre") == 403
    assert await ask_as_stranger(app, "/debug/state", "stolen") == 403
    for path, method in (("/metrics", "GET"), (f"{PREFIX}/inspect", "GET"), (f"{PREFIX}/bind", "POST")):
        assert await ask_as_stranger(app, path, "sre", method) == 403

    asked = len(reviews.asked)
    assert await ask_as_stranger(app, "/debug/state", "sre") == 200
    assert len(reviews.asked) == asked  # remembered for a while
    now[0] += 61
    reviews.away = True
    assert await ask_as_stranger(app, "/debug/state", "sre") == 403
    reviews.away = False
    assert await ask_as_stranger(app, "/debug/state", "sre") == 200

    app = Extender(ExtenderSettings(**tls), KubeClient(Reviews())).app()
    assert await ask_as_stranger(app, "/debug/state", "sre") == 403
    with pytest.raises(SettingsError, match="not for plain HTTP"):
        ExtenderSettings(debug_tokens=True)
