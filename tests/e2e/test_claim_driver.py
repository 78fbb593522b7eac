"""What Kubernetes' own tests of nodes ask of a driver of claims, asked of ours beside a real kubelet.

Whoever is away when a claim is to be prepared or let go, it is done once they are back. The tests share one
node and run in order; each leaves it empty.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gpuslice.adapters.kubelet.podresources import PodResources
from gpuslice.core.contract import CLAIM_DRIVER
from gpuslice.core.units import limit_bytes
from tests.e2e import control_plane
from tests.e2e.claims_rig import (
    CLAIMS,
    HEALTH_SINCE,
    UNHEALTHY_FILE,
    claim,
    claiming,
    claims_cluster,
    devices,
    leave_no_claims,
    missing,
    prepared,
    request,
    using,
)
from tests.e2e.kubelet_rig import (
    CARD_MIB,
    NODE,
    PODS,
    UNITS,
    Cluster,
    container,
    limits_of,
    pod,
    variables,
)
from tests.e2e.node import until

SHARES_TOLD_SINCE = 35  # by kubelet's pod-resources
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with claims_cluster() as found:
        until(lambda: len(devices(found)) == 2, "the cards are published")
        yield found


@pytest.fixture(autouse=True)
def leave_nothing(cluster: Cluster) -> Iterator[None]:
    yield
    leave_no_claims(cluster)


def asked(cluster: Cluster, name: str, memory: str = "4Gi", **fields: Any) -> None:
    """A pod with a claim of its own name."""
    claim(cluster, name, request("gpu", memory))
    cluster.create(claiming(name, name, using(), **fields))


def told(cluster: Cluster, name: str, reason: str) -> str:
    """The events of a pod with this reason."""
    events = cluster.api.get("namespaces/default/events")["items"]
    mine = [each for each in events if each["involvedObject"]["name"] == name and each["reason"] == reason]
    return "\n".join(each["message"] for each in mine)


def registered_again(cluster: Cluster, times: int = 1) -> None:
    wanted = "registered with kubelet"
    until(lambda: cluster.agent.log().count(wanted) >= times, "kubelet takes the driver")


def gone(cluster: Cluster, name: str) -> bool:
    return name not in {each["metadata"]["name"] for each in cluster.api.get(PODS)["items"]}


# -- whoever is away -----------------------------------------------------------------------------------------


def test_the_driver_registers_again_after_either_was_started_anew(cluster: Cluster) -> None:
    registered_again(cluster)
    known = cluster.agent.log().count("registered with kubelet")
    cluster.kubelet.stop()
    cluster.kubelet.start()
    registered_again(cluster, known + 1)
    cluster.agent.stop()
    cluster.agent.start()
    registered_again(cluster)
    until(lambda: len(devices(cluster)) == 2, "the cards are published")
    asked(cluster, "after")
    cluster.running("after")


def test_a_pod_that_came_while_kubelet_was_away_runs(cluster: Cluster) -> None:
    cluster.kubelet.stop()
    asked(cluster, "meanwhile")
    until(partial(cluster.bound, "meanwhile"), "it is bound")
    cluster.kubelet.start()
    cluster.running("meanwhile")


def test_a_claim_is_prepared_once_the_driver_is_back(cluster: Cluster) -> None:
    """Also by a kubelet that was started anew while the pod waited."""
    registered_again(cluster)
    cluster.agent.stop()
    asked(cluster, "waits")
    reason = "FailedPrepareDynamicResources"
    until(lambda: CLAIM_DRIVER in told(cluster, "waits", reason), "an event says which driver is missing")
    assert cluster.pod("waits")["status"]["phase"] == "Pending"
    cluster.kubelet.stop()
    cluster.kubelet.start()
    cluster.agent.start()
    cluster.running("waits")
    uuid_and_bytes = limits_of(cluster.said("waits"))
    assert list(uuid_and_bytes.values()) == [limit_bytes(CARD_MIB, 4, UNITS)]


def test_a_claim_is_let_go_once_the_driver_is_back(cluster: Cluster) -> None:
    """The pod stays until then, also over a new start of kubelet: its card is not free before."""
    asked(cluster, "leaves")
    cluster.running("leaves")
    (file,) = prepared(cluster)
    cluster.agent.stop()
    cluster.api.delete(f"{PODS}/leaves")

    def ended() -> bool:
        statuses = cluster.pod("leaves")["status"]["containerStatuses"]
        return all("terminated" in each["state"] for each in statuses)

    until(ended, "its container has ended")
    cluster.kubelet.stop()
    cluster.kubelet.start()
    assert not gone(cluster, "leaves")
    assert file.exists()
    cluster.agent.start()
    until(partial(gone, cluster, "leaves"), "the pod is gone")
    until(lambda: not file.exists(), "its claim is let go")


def test_a_pod_that_vanished_while_kubelet_was_away_leaves_nothing_prepared(cluster: Cluster) -> None:
    asked(cluster, "forced")
    cluster.running("forced")
    (file,) = prepared(cluster)
    cluster.kubelet.stop()
    cluster.api.delete(f"{PODS}/forced?gracePeriodSeconds=0")
    until(partial(gone, cluster, "forced"), "the API server has forgotten the pod")
    cluster.kubelet.start()
    until(lambda: not file.exists(), "kubelet has the driver let go of its claim")


# -- what a claim may be -----------------------------------------------------------------------------------


def test_a_claim_of_two_pods_is_kept_until_the_second_ends(cluster: Cluster) -> None:
    claim(cluster, "both", request("gpu", "4Gi"))
    for name in ("one", "two"):
        cluster.create(claiming(name, "both", using()))
    both = [limits_of(cluster.said(name)) for name in ("one", "two") if cluster.running(name)]
    assert both[0] == both[1]
    (file,) = prepared(cluster)
    cluster.api.delete(f"{PODS}/one")
    until(partial(gone, cluster, "one"), "the first is gone")
    assert file.exists()
    cluster.api.delete(f"{PODS}/two")
    until(lambda: not file.exists(), "the claim is let go with the second")


def test_shares_of_one_card_are_told_apart(cluster: Cluster) -> None:
    """By the ids that kube-scheduler gave: in the claims' status, and to who asks kubelet."""
    names = ("one", "two")
    for name in names:
        asked(cluster, name, "5Gi")
        cluster.running(name)

    def given() -> dict[str, str]:
        """The share of each claim, as its status tells both the allocation and what is prepared."""
        found = {}
        for name in names:
            status = cluster.api.get(f"{CLAIMS}/{name}")["status"]
            (result,) = status["allocation"]["devices"]["results"]
            (device,) = status.get("devices") or [{}]
            if result["shareID"] == device.get("shareID"):
                found[name] = result["shareID"]
        return found

    shares = until(lambda: given() if len(given()) == 2 else {}, "both claims tell what is in force")
    assert len(set(shares.values())) == 2
    listed = asyncio.run(PodResources(cluster.places.pod_resources).read(lambda _: False)).claims
    tells = control_plane.minor_version("kubelet") >= SHARES_TOLD_SINCE
    by_kubelet = shares if tells else dict.fromkeys(names, "")
    assert {each.pod: each.share_id for each in listed} == by_kubelet


def test_a_claim_of_two_cards_takes_such_as_nvlink_joins(cluster: Cluster) -> None:
    wish = request("gpu", "4Gi")
    wish["exactly"]["count"] = 2
    joined = {"requests": ["gpu"], "matchAttribute": f"{CLAIM_DRIVER}/nvlinkPeers"}
    apart = {"requests": ["gpu"], "distinctAttribute": f"{CLAIM_DRIVER}/uuid"}  # 1.34 wants to be told
    assert {each["attributes"]["nvlinkPeers"]["string"] for each in devices(cluster)} == {"0,1"}
    claim(cluster, "joined", wish, constraints=[joined, apart])
    cluster.create(claiming("joined", "joined", using()))
    cluster.running("joined")
    limits = limits_of(cluster.said("joined"))
    assert list(limits.values()) == [limit_bytes(CARD_MIB, 4, UNITS)] * 2


def test_monitoring_sees_full_cards_and_takes_nothing_of_them(cluster: Cluster) -> None:
    for name in ("one", "two"):
        asked(cluster, name, f"{UNITS}Gi")
        cluster.running(name)
    label = "resource.kubernetes.io/admin-access"
    cluster.api.patch("namespaces/default", {"metadata": {"labels": {label: "true"}}})
    watching = request("cards", "0", slots="0")
    watching["exactly"] |= {"allocationMode": "All", "adminAccess": True}
    claim(cluster, "watch", watching)
    cluster.create(claiming("watch", "watch", using()))
    cluster.running("watch")
    lines = cluster.said("watch")
    uuids = {each["attributes"]["uuid"]["string"] for each in devices(cluster)}
    assert set(variables(lines)["NVIDIA_VISIBLE_DEVICES"].split(",")) == uuids
    assert limits_of(lines) == {}
    cluster.api.patch("namespaces/default", {"metadata": {"labels": {label: None}}})


def test_a_container_of_two_claims_is_told_why_it_does_not_start(cluster: Cluster) -> None:
    for name in ("a", "b"):
        claim(cluster, name, request("gpu", "2Gi"))
    references = [{"name": name, "resourceClaimName": name} for name in ("a", "b")]
    uses = {"claims": [{"name": "a"}, {"name": "b"}]}
    cluster.create(pod("greedy", container(0, resources=uses), resourceClaims=references))
    reason = "FailedPrepareDynamicResources"
    until(lambda: "let one claim ask for all" in told(cluster, "greedy", reason), "an event says what to do")


def test_a_sick_card_is_told_to_its_pod_and_to_nobody_given(cluster: Cluster) -> None:
    """Over a new start of the driver too: kubelet then follows its health anew."""
    if control_plane.minor_version("kubelet") < HEALTH_SINCE:
        pytest.skip(f"before Kubernetes 1.{HEALTH_SINCE} the pod's status does not tell of health")
    asked(cluster, "here", "15Gi")
    cluster.running("here")

    def health() -> str:
        statuses = cluster.pod("here")["status"]["containerStatuses"][0]
        resources = [
            one for each in statuses.get("allocatedResourcesStatus", ()) for one in each["resources"]
        ]
        return resources[0]["health"] if resources else ""

    (result,) = cluster.api.get(f"{CLAIMS}/here")["status"]["allocation"]["devices"]["results"]
    index = int(result["device"].removeprefix("gpu-"))
    until(lambda: health() == "Healthy", f"its device is healthy; {health()}")
    sick = cluster.places.folder / UNHEALTHY_FILE
    sick.write_text(json.dumps({"index": [index], "uuid": []}))
    try:
        until(lambda: health() == "Unhealthy", f"its device is sick; {health()}")
        # Its taint goes another way than its health, so either may be seen first.
        until(
            lambda: [each["name"] for each in devices(cluster) if "taints" in each] == [result["device"]],
            "its taint",
        )
        cluster.agent.stop()
        until(lambda: health() == "Unknown", f"nobody tells of it; {health()}")
        cluster.agent.start()
        until(lambda: health() == "Unhealthy", f"it is told again; {health()}")
    finally:
        sick.unlink()
    until(lambda: health() == "Healthy", f"it is well again; {health()}")
    assert cluster.pod("here")["status"]["containerStatuses"][0]["restartCount"] == 0


# -- one way at a time -------------------------------------------------------------------------------------


def relabel(cluster: Cluster, mode: str | None) -> None:
    cluster.agent.stop()
    cluster.api.patch(f"nodes/{NODE}", {"metadata": {"labels": {"gpuslice.io/mode": mode}}})
    cluster.agent.start()


def test_no_card_ever_holds_pods_of_both_kinds(cluster: Cluster) -> None:
    """There and back: the other way is open when the last pod of the one before has ended, and not sooner."""
    asked(cluster, "by-claim")
    cluster.running("by-claim")
    relabel(cluster, None)
    until(lambda: not devices(cluster), "the cards are withdrawn")
    cluster.create(pod("by-plugin", container(4)))
    waits = "the device plugin waits for the claim"
    until(lambda: "claims still hold parts" in cluster.agent.log(), waits)
    assert cluster.allocatable()[0] in (None, "0")
    assert not cluster.bound("by-plugin")
    cluster.api.delete(f"{PODS}/by-claim")
    cluster.offers(2 * UNITS)
    cluster.running("by-plugin")

    relabel(cluster, "claims")
    asked(cluster, "again")
    until(lambda: CLAIM_DRIVER in cluster.agent.log(), "kubelet takes the driver, which waits for the pod")
    assert not devices(cluster)
    assert not cluster.bound("again")
    cluster.api.delete(f"{PODS}/by-plugin")
    until(lambda: len(devices(cluster)) == 2, "the cards are published")
    cluster.running("again")
    until(lambda: cluster.allocatable()[0] in (None, "0"), "kubelet's next status offers no memory")
