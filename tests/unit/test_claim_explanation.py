"""What explain and doctor say of claims, worked out from the cluster's objects alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import convert

from gpuslice.adapters.kube.objects import Node, Pod, ResourceClaim
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.annotations import encode_cards
from gpuslice.core.claim_shape import claim_shape, template_spec
from gpuslice.core.claims import Pool
from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, LABEL_CLAIMED, NODE_GPUS
from gpuslice.diagnosis.claims import Claims, claims_of
from gpuslice.diagnosis.cluster import Cluster
from gpuslice.diagnosis.doctor import claims as doctor_claims
from gpuslice.diagnosis.doctor import plugins as doctor_plugins
from gpuslice.diagnosis.doctor import pods as doctor_pods
from gpuslice.diagnosis.doctor.facts import Facts, Level
from gpuslice.diagnosis.explain.rule import PodExplanation, explained
from gpuslice.diagnosis.explain.words import pod_document
from tests.builders import api_node, api_pod, make_card

Json = dict[str, Any]
OF_CLAIMS = {"cgpu": "true", "gpuslice.io/mode": "claims"}


def claim_node(name: str = "n1", *units: int, **labels: str) -> Node:
    cards = tuple(make_card(index, each, node=name) for index, each in enumerate(units))
    annotations = {NODE_GPUS: encode_cards(cards)}
    return convert(api_node(name, 0, 0, annotations=annotations, labels={**OF_CLAIMS, **labels}), Node)


def slice_of(node: str, *units: int, sick: dict[int, str] | None = None) -> Json:
    cards = tuple(make_card(index, each, node=node) for index, each in enumerate(units))
    devices = Pool(node, cards, unhealthy=sick or {}).devices({})
    return {"spec": {"driver": CLAIM_DRIVER, "nodeName": node, "devices": devices}}


def claiming(name: str, template: str = "gpuslice-4", claim: str = "", **more: Any) -> Json:
    """A pod as the API server rewrites it; `claim` is the one that was made for it."""
    more = {"labels": {LABEL_CLAIMED: "true"}, **more}
    pod = api_pod(name, containers=[{"name": "main", "image": "image"}], **more)
    pod["spec"]["resourceClaims"] = [{"name": "gpuslice", "resourceClaimTemplateName": template}]
    if claim:
        pod["status"]["resourceClaimStatuses"] = [{"name": "gpuslice", "resourceClaimName": claim}]
    return pod


def template(name: str = "gpuslice-4") -> Json:
    shape = claim_shape(name)
    assert shape is not None
    return {"metadata": {"name": name, "namespace": "default"}, "spec": template_spec(shape, "GiB")}


def claim(
    name: str, template_name: str = "gpuslice-4", given: str = "", to: str = "", on: str = "n1"
) -> Json:
    """`given`: memory of card 0 of node `on`; `to`: the pod that has it."""
    made: Json = {
        "metadata": {"name": name, "namespace": "default"},
        "spec": template(template_name)["spec"]["spec"],
    }
    if given:
        result = {"request": "c0", "driver": CLAIM_DRIVER, "pool": on, "device": "gpu-0"}
        results = [{**result, "consumedCapacity": {"memory": given}}]
        users = [{"resource": "pods", "name": to, "uid": f"uid-{to}"}] if to else []
        made["status"] = {"allocation": {"devices": {"results": results}}, "reservedFor": users}
    return made


TEMPLATES = (template(),)


def known(
    nodes: list[Node],
    pods: Sequence[Json],
    claims: Sequence[Json] = (),
    slices: Sequence[Json] = (),
    templates: Sequence[Json] = TEMPLATES,
) -> Claims:
    return claims_of(
        nodes,
        [convert(each, Pod) for each in pods],
        [convert(each, ResourceClaim) for each in claims],
        slices,
        templates,
    )


def told(pod: Json, nodes: list[Node], claims: Claims | None) -> PodExplanation:
    return explained(convert(pod, Pod), Cluster(nodes=nodes, claims=claims, partial=True))


# -- explain ---------------------------------------------------------------------------------------------


def test_a_claim_that_fits_nowhere_is_explained_as_a_request_is() -> None:
    nodes, waits = [claim_node("n1", 15)], claiming("waits", "gpuslice-8", "claim-2")
    holder = claiming("holds", "gpuslice-8", "claim-1", node="n1")
    claims = [claim("claim-1", "gpuslice-8", "8Gi", "holds"), claim("claim-2", "gpuslice-8")]
    found = told(waits, nodes, known(nodes, [holder, waits], claims, [slice_of("n1", 15)]))
    assert found.explanation is not None
    (only,) = found.explanation.classes
    assert (only.reason, only.most, only.best) == ("Insufficient GPU Memory in one device", 7, "n1")
    assert found.claims == ("claim-2",)
    assert pod_document(found)["request"]["units"] == 8


def test_a_pod_that_has_its_claim_is_told_its_card_and_its_neighbours() -> None:
    nodes = [claim_node("n1", 15)]
    pods = [claiming(name, claim=f"claim-{name}", node="n1", phase="Running") for name in ("a", "b")]
    claims = [claim("claim-a", given="4Gi", to="a"), claim("claim-b", given="4Gi", to="b")]
    found = told(pods[0], nodes, known(nodes, pods, claims, [slice_of("n1", 15)]))
    assert pod_document(found)["gpus"] == {"0": 4}
    assert found.neighbours == (("default/b", 4),)
    assert found.hints == ()


def test_a_pod_whose_claim_kube_scheduler_made_is_told_its_card() -> None:
    nodes = [claim_node("n1", 15)]
    pod = api_pod("a", containers=[{"name": "main", "image": "image"}], node="n1", phase="Running")
    pod["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "made"}
    claims = [claim("made", given="4Gi", to="a")]
    found = told(pod, nodes, known(nodes, [pod], claims, [slice_of("n1", 15)]))
    assert (found.claims, pod_document(found)["gpus"]) == (("made",), {"0": 4})


@pytest.mark.parametrize(
    ("templates", "claim_name", "claims", "sentence"),
    [
        (
            [],
            "",
            [],
            "waits for ResourceClaimTemplate default/gpuslice-4; Deployment gpuslice-claims makes it",
        ),
        ([template()], "", [], "has not been made from template gpuslice-4 yet: kube-controller-manager"),
        (
            [template()],
            "c",
            [claim("c", given="4Gi")],
            "claim c is allocated, and kube-scheduler binds the pod",
        ),
        ([template()], "c", [claim("c", given="4Gi", to="other")], "shares claim c with pod other"),
    ],
)
def test_what_a_claim_waits_for_comes_first(
    templates: list[Json], claim_name: str, claims: list[Json], sentence: str
) -> None:
    nodes, pod = [claim_node("n1", 15)], claiming("p", claim=claim_name)
    found = told(pod, nodes, known(nodes, [pod], claims, [slice_of("n1", 15)], templates))
    assert sentence in found.hints[0]


def test_a_template_of_the_impossible_is_the_pods_problem() -> None:
    nodes, pod = [claim_node("n1", 15)], claiming("p", "gpuslice-5-x2")
    found = told(pod, nodes, known(nodes, [pod], [], [slice_of("n1", 15)], []))
    assert "must be a multiple of 2" in found.pod.problem
    assert "recreate the pod" in found.hints[0]


def test_an_unchanged_pod_beside_nodes_of_claims_is_told_how_to_have_their_cards() -> None:
    nodes = [claim_node("n1", 15), claim_node("n2", 15)]
    found = told(api_pod("old", "4"), nodes, None)
    assert found.hints == (
        "2 nodes give cards out by claims alone: to have a part of one there, label the pod's namespace "
        "gpuslice.io/claims=true and recreate the pod.",
    )


def test_a_claiming_pod_beside_other_nodes_is_told_so() -> None:
    shared = convert(api_node("old", 15, 1), Node)
    found = told(claiming("p"), [shared], known([shared], [claiming("p")]))
    assert found.explanation is not None
    assert [each.reason for each in found.explanation.classes] == ["Gives no cards out by claims"]
    assert "No node gives its cards out by claims" in found.hints[-1]


def test_a_sick_card_of_a_node_of_claims_is_no_room() -> None:
    nodes, pod = [claim_node("n1", 15)], claiming("p", claim="c")
    found = told(pod, nodes, known(nodes, [pod], [claim("c")], [slice_of("n1", 15, sick={0: "Xid 79"})]))
    assert found.explanation is not None
    assert not found.explanation.fits


def test_a_pod_with_claims_of_something_else_is_none_of_ours() -> None:
    pod = api_pod("p", containers=[{"name": "main", "image": "image"}])
    pod["spec"]["resourceClaims"] = [{"name": "nic", "resourceClaimName": "nic"}]
    nodes = [claim_node("n1", 15)]
    other: Json = {"metadata": {"name": "nic", "namespace": "default"}}
    other["spec"] = {"devices": {"requests": [{"name": "nic", "exactly": {"deviceClassName": "nic"}}]}}
    assert known(nodes, [pod], [other]).of(convert(pod, Pod)) is None
    assert told(pod, nodes, known(nodes, [pod], [other])).claims == ()


def test_who_names_no_amount_wants_a_whole_card() -> None:
    whole = claim("c")
    whole["spec"]["devices"] = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": CLAIM_CLASS}}]}
    nodes, pod = [claim_node("n1", 15)], claiming("p", "mine", "c")
    found = known(nodes, [pod], [whole], [slice_of("n1", 15)]).of(convert(pod, Pod))
    assert found is not None
    assert found.pod.request is not None
    assert found.pod.request.units == 15


# -- doctor ----------------------------------------------------------------------------------------------


def agent(node: str, ready: bool = True) -> Pod:
    pod = api_pod(f"agent-{node}", containers=[{"name": "agent", "image": "image"}], node=node)
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
    return convert(pod, Pod)


def facts(nodes: list[Node], pods: Sequence[Json] = (), slices: Sequence[Json] = (), **more: Any) -> Facts:
    plugins = more.pop("plugins", [agent(node.metadata.name) for node in nodes])
    found = [convert(each, Pod) for each in pods]
    return Facts(nodes=nodes, pods=found, plugins=plugins, claims=known(nodes, pods, [], slices), **more)


def test_a_node_of_claims_that_offers_them_is_well_and_counts_as_sharing() -> None:
    well = facts([claim_node("n1", 15)], slices=[slice_of("n1", 15)])
    assert not [*doctor_claims.nodes_of_claims(well), *doctor_plugins.somewhere(well)]


def test_a_node_that_waits_for_pods_of_the_other_kind_names_them() -> None:
    found = facts([claim_node("n1", 15)], [api_pod("old", "4", node="n1")], plugins=[agent("n1", False)])
    (finding,) = doctor_claims.nodes_of_claims(found)
    assert finding.level is Level.WARNING
    assert "waits for default/old to end, which holds parts of its cards there" in finding.what


@pytest.mark.parametrize(
    ("plugins", "what"),
    [
        ([], "no device plugin runs there"),
        ([agent("n1", False)], "device plugin agent-n1 is not ready there"),
        ([agent("n1")], "its agent publishes none"),
    ],
)
def test_a_node_of_claims_that_offers_none_is_told_why(plugins: list[Pod], what: str) -> None:
    (finding,) = doctor_claims.nodes_of_claims(facts([claim_node("n1", 15)], plugins=plugins))
    assert finding.level is Level.ERROR
    assert what in finding.what


@pytest.mark.parametrize(("version", "is_told"), [("v1.33.13", True), ("v1.34.9", False), ("", False)])
def test_a_kubelet_that_is_too_old_for_claims_is_named(version: str, is_told: bool) -> None:
    """As while a cluster is upgraded: such a kubelet does not register the agent as a driver."""
    node = claim_node("n1", 15)
    node.status.node_info = {"kubeletVersion": version}
    (finding,) = doctor_claims.nodes_of_claims(facts([node], plugins=[agent("n1", False)]))
    assert (f"which its kubelet {version} does not know" in finding.what) is is_told


def test_cards_that_are_given_out_both_ways_are_an_error() -> None:
    both = facts([claim_node("n1", 15)], [api_pod("old", "4", node="n1")], [slice_of("n1", 15)])
    (finding,) = doctor_claims.both_kinds(both)
    assert finding.level is Level.ERROR
    assert "cards are given out twice" in finding.what


@pytest.mark.parametrize("labels", [{"cgpu": "true"}, OF_CLAIMS])
def test_a_card_that_another_driver_gives_out_by_claims_is_an_error(labels: dict[str, str]) -> None:
    cards = tuple(make_card(index, 15, node="n1") for index in range(2))
    amounts = (30, 2) if labels is not OF_CLAIMS else (0, 0)
    document = api_node("n1", *amounts, annotations={NODE_GPUS: encode_cards(cards)}, labels=labels)
    devices = [{"name": "gpu-0", "attributes": {"uuid": {"string": cards[1].uuid}}}]
    others = {"spec": {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": devices}}
    ours = {"spec": {**others["spec"], "driver": CLAIM_DRIVER}}
    elsewhere = {"spec": {**others["spec"], "nodeName": "n2"}}
    found = Facts(nodes=[convert(document, Node)], device_slices=[elsewhere, ours, others])
    (finding,) = doctor_claims.drivers_of_others(found)
    assert finding.level is Level.ERROR
    assert finding.what.startswith("shares card 1, which driver gpu.nvidia.com gives out by claims")
    whole = convert({**document, "metadata": {**document["metadata"], "labels": {"cgpu": "false"}}}, Node)
    assert not list(doctor_claims.drivers_of_others(Facts(nodes=[whole], device_slices=[others])))


def test_the_class_and_the_limits_of_the_controller_manager_are_looked_at() -> None:
    nodes = [claim_node("n1", 15)]
    (missing,) = doctor_claims.device_class(facts(nodes))
    assert f"no DeviceClass {CLAIM_CLASS}" in missing.what
    there = {"metadata": {"name": CLAIM_CLASS}}
    assert not list(doctor_claims.device_class(facts(nodes, classes=[there])))

    def manager(*command: str) -> Json:
        return {"metadata": {"name": "kcm"}, "spec": {"containers": [{"command": list(command)}]}}

    (slow,) = doctor_claims.claims_made_slowly(facts(nodes, managers=[manager("kube-controller-manager")]))
    assert "at most 10 claims a second (--kube-api-qps=20)" in slow.what
    fast = facts(nodes, managers=[manager("kube-controller-manager", "--kube-api-qps=200")])
    assert not list(doctor_claims.claims_made_slowly(fast))


def test_a_claim_that_waits_long_is_found_with_its_reason() -> None:
    pod = claiming("p")
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    nodes = [claim_node("n1", 15)]
    waits = Facts(
        nodes=nodes, pods=[convert(pod, Pod)], claims=known(nodes, [pod], [], [slice_of("n1", 15)], [])
    )
    (finding,) = doctor_pods.waiting(waits)
    assert "its claim waits for ResourceClaimTemplate default/gpuslice-4" in finding.what
    assert pod_view(convert(pod, Pod)).request is None
