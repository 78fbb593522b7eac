"""Bindings that fail, time out, repeat or meet another leader: nothing is doubled, leaked or lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.main import RESOLVE_EVERY_S
from gpuslice.core.contract import ANN_CORE, ANN_INDEX, ANN_POD_UNITS
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.faults import Fault
from tests import HANG_S
from tests.builders import api_pod, make_placement
from tests.integration.extender_rig import Refused, Rig, cluster, rig, running_extender, until

PATCH = {"method": "PATCH", "path": ".*/pods/p"}
BINDING = {"method": "POST", "path": ".*/binding"}
GET = {"method": "GET", "path": ".*/pods/p"}
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/gpushare-schd-extender"


def fault(extender: Rig, target: dict[str, str], **how: object) -> None:
    extender.api.cluster.add_fault(Fault(**target, **how))  # type: ignore[arg-type]


async def free(extender: Rig) -> int:
    await extender.caught_up()
    state = extender.extender.ledger.state("n1")
    assert state is not None
    return state.left[0]


async def test_a_repeated_bind_says_yes_again() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        answers = [await extender.bind(pod) for _ in range(3)]
        await extender.caught_up()
        answers.append(await extender.bind(pod))
        assert answers == ["", "", "", ""]
        assert await free(extender) == 11


async def test_the_same_bind_twice_at_once_binds_once() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        assert await asyncio.gather(*(extender.bind(pod) for _ in range(5))) == [""] * 5
        assert await free(extender) == 11


async def test_a_bound_pod_is_not_bound_elsewhere() -> None:
    async with rig(cluster(n1=(15, 1), n2=(15, 1))) as extender:
        pod = extender.api.add_pod()
        assert await extender.bind(pod) == ""
        assert await extender.bind(pod, "n2") == "pod default/p is bound to n1 already, not to n2"


async def test_a_stale_uid_is_named() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        actual = pod["metadata"]["uid"]
        assert await extender.bind(pod, uid="other") == (
            f"The pod p in ns default's uid is {actual}, and it's not equal with expected other"
        )
        assert await free(extender) == 15


async def test_a_missing_pod_is_named() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        assert 'pods "p" not found' in await extender.bind(api_pod())


async def test_a_bind_that_does_not_fit_says_what_would() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod("p", "8")
        await extender.filter(pod, "n1")
        extender.api.add_pod("q", "8", nodeName="n1")  # not by us, who have promised p the card
        await extender.caught_up()
        error = await extender.bind_unasked(pod)
        assert error.startswith(
            "The node n1 can't place the pod p in ns default: Insufficient GPU Memory in one"
        )
        assert "the most free on one card of n1 is 7 of 15 (card 0)" in error
        await until(lambda: bool(extender.api.events("GPUBindFailed")))
        assert extender.api.events("GPUBindFailed")[0]["message"] == error


async def test_failed_binds_can_be_answered_as_the_vendor_does() -> None:
    async with rig(cluster(n1=(15, 1)), bind_errors_as_500=True) as extender:
        pod = extender.api.add_pod("p", "16")["metadata"]
        args = {"PodName": "p", "PodNamespace": "default", "PodUID": pod["uid"], "Node": "n1"}
        async with extender.session.post(f"{extender.url}/gpushare-scheduler/bind", json=args) as answer:
            assert answer.status == 500
            assert (await answer.json())["Error"]


@pytest.mark.parametrize("code", [403, 409, 422, 429, 500, 503])
async def test_a_no_drops_the_reservation(code: int) -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        fault(extender, BINDING, code=code, times=4 if code == 409 else 1)
        error = await extender.bind(pod)
        assert error
        assert await free(extender) == 15
        assert extender.api.card() is None
        assert extender.api.bound_to() == ""
        extender.api.cluster.faults.clear()
        assert await extender.bind(pod) == ""
        assert await free(extender) == 11


@pytest.mark.parametrize("units", ["4", "15"])  # beside others, and as one that fills the card by itself
async def test_one_conflict_is_retried(units: str) -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod("p", units)
        fault(extender, BINDING, code=409, times=1)
        assert await extender.bind(pod) == ""
        assert extender.api.card() == "0"


async def test_a_pod_changed_by_others_meanwhile_is_read_again() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        await extender.caught_up()
        extender.api.cluster.drop_watches("pods")
        extender.api.patch("/api/v1/namespaces/default/pods/p", {"metadata": {"labels": {"a": "b"}}})
        assert await extender.bind(pod) == ""


@pytest.mark.parametrize("code", [500, 503, 504])
async def test_a_binding_that_took_effect_without_an_answer_counts(code: int) -> None:
    """A timeout is not a no."""
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        fault(extender, BINDING, code=code, times=1, after=True)
        assert await extender.bind(pod) == ""
        assert await free(extender) == 11


@pytest.mark.parametrize("after", [True, False])
async def test_the_page_of_a_proxy_is_no_answer_to_a_binding(after: bool) -> None:
    """Its status 200 does not say that the API server was asked."""
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod()
        fault(extender, BINDING, code=200, times=1, after=after)
        said = await extender.bind(pod)
        assert said == "" if after else "Please log in" in said
        assert await free(extender) == (11 if after else 15)
        assert extender.api.pod()["spec"].get("nodeName", "") == ("n1" if after else "")


async def test_a_pod_is_bound_with_one_write_and_one_look_at_the_lease_covers_all_that_wait() -> None:
    async with rig(cluster(n1=(15, 1)), leader_elect=True, lease_identity="a") as extender:
        pods = [extender.api.add_pod(f"p{number}", "1") for number in range(9)]
        await extender.caught_up()
        assert await extender.bind(pods[0]) == ""
        writes = Fault(method="PUT|PATCH|POST", times=1000)
        extender.api.cluster.faults.add(writes)
        extender.api.cluster.add_fault(Fault(method="GET", path=LEASE, code=503))  # no further look is needed
        for pod in pods[1:]:
            assert await extender.bind(pod) == ""
        assert writes.times == 1000 - 8


async def test_annotations_of_another_placement_are_taken_off() -> None:
    """A Binding can only add: what its own annotations do not overwrite would stay."""
    async with rig(cluster(n1=(15, 1))) as extender:
        claims = {ANN_INDEX: "7", ANN_POD_UNITS: "1", ANN_CORE: '{"0":{"7":50}}', "mine": "stays"}
        pod = extender.api.add_pod(annotations=claims)
        fault(extender, PATCH, code=504, times=1, after=True)
        assert "injected fault" in await extender.bind(pod)
        assert await free(extender) == 15
        assert await extender.bind(pod) == ""
        written = extender.api.annotations()
        assert ANN_CORE not in written
        assert (written[ANN_INDEX], written[ANN_POD_UNITS], written["mine"]) == ("0", "4", "stays")
        assert await free(extender) == 11


async def test_no_bind_begins_while_the_pod_is_asked_about() -> None:
    """Else its cards would be free for others while its Binding is on its way."""
    api = cluster(n1=(15, 1))
    async with rig(api) as extender:
        pod = api.add_pod("p")
        await extender.caught_up()
        binder, ledger = extender.extender.binder, extender.extender.ledger
        seen = ledger.pod_named("default", "p")
        assert seen is not None
        assert ledger.assume(seen, make_placement("n1", 4, 0)) is None
        fault(extender, PATCH, code=503, times=1)
        asking = asyncio.create_task(binder.resolve_waiting({seen.uid}))
        await until(lambda: not api.cluster.faults.active[0].times)
        binding = asyncio.create_task(extender.bind(pod))
        await asking
        assert api.bound_to() == ""
        assert await binding == ""
        assert await free(extender) == 11


async def test_an_outcome_that_cannot_be_learned_keeps_the_cards_until_it_can() -> None:
    async with rig(cluster(n1=(15, 1)), bind_timeout_s=0.3) as extender:
        pod = extender.api.add_pod()
        fault(extender, BINDING, code=504, times=1, after=True)
        fault(extender, GET, code=503)
        assert "has not said within 0.3 s whether it is bound to n1" in await extender.bind(pod)
        allocation = extender.extender.ledger.holds.of(pod["metadata"]["uid"])
        assert allocation is not None
        assert await free(extender) == 11
        extender.api.cluster.faults.clear()
        async with asyncio.timeout(HANG_S):
            while "ask again" in (
                answer := await extender.bind(pod)
            ):  # joins the call that is still settling
                pass
        assert answer == ""


async def test_a_pod_that_keeps_changing_is_not_asked_about_without_a_pause() -> None:
    async with rig(cluster(n1=(15, 1)), bind_timeout_s=1.0) as extender:
        pod = extender.api.add_pod()
        fault(extender, BINDING, code=503)
        call = asyncio.create_task(extender.bind(pod))
        conflicts = Fault(method="PATCH", path=PATCH["path"], code=409, times=1000)
        extender.api.cluster.faults.add(conflicts)
        assert "has not said within 1 s" in await call
        assert conflicts.times is not None
        assert 1 <= 1000 - conflicts.times <= 5
        extender.api.cluster.faults.clear()


async def test_a_placement_that_no_watch_shows_is_asked_about() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        binder, ledger = extender.extender.binder, extender.extender.ledger
        kept = extender.api.add_pod("kept")
        lost = extender.api.add_pod("lost")
        await extender.caught_up()
        extender.api.cluster.add_fault(Fault(method="GET", path="/api/v1/pods", code=503))
        extender.api.cluster.drop_watches("pods")
        assert await extender.bind(kept) == ""
        assert await extender.bind(lost) == ""
        extender.api.delete_pod("lost")
        waiting = await binder.resolve_waiting(set())
        assert waiting == {kept["metadata"]["uid"], lost["metadata"]["uid"]}
        await binder.resolve_waiting(waiting)
        assert ledger.holds.of(lost["metadata"]["uid"]) is None
        allocation = ledger.holds.of(kept["metadata"]["uid"])
        assert allocation is not None
        assert allocation.is_bound


async def test_a_pod_that_cannot_be_asked_about_keeps_no_other_from_being_so() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        binder, ledger = extender.extender.binder, extender.extender.ledger
        names = ("first", "second")
        pods = [extender.api.add_pod(name) for name in names]
        await extender.caught_up()
        for name in names:
            seen = ledger.pod_named("default", name)
            assert seen is not None
            assert ledger.assume(seen, make_placement("n1", 4, 0)) is None
        fault(extender, {"path": ".*/pods/first"}, code=503)
        asking = asyncio.create_task(binder.resolve_waiting({pod["metadata"]["uid"] for pod in pods}))
        await until(lambda: ledger.holds.of(pods[1]["metadata"]["uid"]) is None, RESOLVE_EVERY_S / 2)
        assert ledger.holds.of(pods[0]["metadata"]["uid"]) is not None
        extender.api.cluster.faults.clear()
        await asking
        assert await free(extender) == 15


async def test_a_binding_that_a_dead_leader_may_have_sent_does_nothing_after_the_first_answer() -> None:
    api = cluster(n1=(15, 1))
    pod, gated = api.add_pod("p"), api.add_pod("gated", schedulingGates=[{"name": "others"}])
    async with rig(api):
        pass
    meta = {key: pod["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": {"name": "n1"}}
    with pytest.raises(Refused, match="Precondition failed"):
        api.call("POST", "/api/v1/namespaces/default/pods/p/binding", binding)
    assert api.card("p") is None
    # nobody can have sent one for this pod
    assert api.pod("gated")["metadata"]["resourceVersion"] == gated["metadata"]["resourceVersion"]


async def test_who_finds_the_lease_taken_binds_nothing_until_it_has_taken_over_again() -> None:
    api = cluster(n1=(15, 1))
    async with rig(api, leader_elect=True, lease_identity="a") as extender:
        pods = [api.add_pod(name) for name in ("a", "b")]
        await extender.caught_up()
        before = api.pod("b")["metadata"]["resourceVersion"]
        api.patch(LEASE, {"spec": {"holderIdentity": "other"}})
        assert "not the leader" in await extender.bind(pods[0])
        api.patch(LEASE, {"spec": {"holderIdentity": ""}})
        await until(lambda: not extender.extender.not_ready())
        assert await extender.bind(pods[0]) == ""
        assert api.pod("b")["metadata"]["resourceVersion"] != before


async def test_a_process_does_not_take_the_lease_of_another_with_its_name_for_its_own() -> None:
    api = cluster(n1=(15, 1))
    async with rig(api, leader_elect=True, lease_identity="a") as extender:
        pod = api.add_pod()
        await extender.caught_up()
        api.patch(LEASE, {"spec": {"acquireTime": "2030-01-01T00:00:00.000000Z"}})
        assert "not the leader" in await extender.bind(pod)


async def test_a_lease_that_cannot_be_read_delays_binds_and_refuses_none() -> None:
    async with rig(cluster(n1=(15, 1)), leader_elect=True, lease_identity="a") as extender:
        pod = extender.api.add_pod()
        await extender.caught_up()
        fault(extender, {"method": "GET", "path": LEASE}, code=504, times=2)
        assert await extender.bind(pod) == ""
        assert await free(extender) == 11


async def test_before_the_cluster_is_read_nothing_is_decided() -> None:
    api = cluster(n1=(15, 1))
    api.cluster.add_fault(Fault(method="GET", path="/api/v1/pods", code=503))
    async with rig(api, wait=False) as extender:
        assert (await extender.get("/readyz"))[0] == 503
        assert (await extender.get("/healthz"))[0] == 200
        assert (await extender.filter(api_pod(), "n1"))["Error"] == "the cluster has not been read yet"
        assert await extender.bind(api_pod()) == "the cluster has not been read yet"


async def test_of_two_replicas_one_is_ready_and_the_other_takes_over() -> None:
    api = cluster(n1=(15, 1))
    lease = {"leader_elect": True, "lease_duration_s": 1.5, "policy": "binpack"}
    async with contextlib.AsyncExitStack() as outer:
        server = await outer.enter_async_context(ApiServer(api.cluster))
        async with contextlib.AsyncExitStack() as inner:
            old, _ = await inner.enter_async_context(
                running_extender(server.url, lease_identity="a", **lease)
            )
            await until(lambda: not old.not_ready())
            new, _ = await outer.enter_async_context(
                running_extender(server.url, lease_identity="b", **lease)
            )
            await until(lambda: new.watch.synced)
            meta = api.add_pod("p", "10")["metadata"]
            args = BindingArgs("p", "default", meta["uid"], "n1")
            assert new.not_ready() == "not the leader, that is a"
            refused = "pod default/p: this extender is not the leader; ask the one that is ready"
            assert await new.binder.bind(args) == refused
            assert await old.binder.bind(args) == ""
        await until(lambda: not new.not_ready())
        state = new.ledger.state("n1")
        assert state is not None
        assert state.left == (5,)
        meta = api.add_pod("q", "6")["metadata"]
        assert "the most free on one card of n1 is 5" in await new.binder.bind(
            BindingArgs("q", "default", meta["uid"], "n1")
        )
