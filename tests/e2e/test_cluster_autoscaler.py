"""How many nodes the real cluster-autoscaler adds and removes for pods that ask for parts of cards.

Without our part (`off`), and told by CapacityBuffers or by pods that never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.e2e import cluster_autoscaler as rig
from tests.e2e import control_plane
from tests.e2e.autoscaler_scenarios import CLAIMS_ALONE, PLAIN, SCENARIOS, Scenario, changed
from tests.e2e.claims_rig import API, CLAIMS, CLASS, request
from tests.e2e.cluster import Object, extender, scheduler_arguments, shipped_configuration
from tests.e2e.cluster_autoscaler import Scaled
from tests.e2e.control_plane import ControlPlane
from tests.e2e.marks import WHERE_CLAIMS_ARE_KNOWN
from tests.e2e.node import Api, until

pytestmark = [
    *WHERE_CLAIMS_ARE_KNOWN,
    pytest.mark.skipif(bool(rig.missing()), reason=rig.missing()),
]


@pytest.fixture(scope="module", params=["off", "buffers", "pods"])
def how(request: pytest.FixtureRequest) -> str:
    """The extender's setting `autoscaling`."""
    return str(request.param)


@pytest.fixture(scope="module")
def plane(how: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    flags = control_plane.claim_flags()
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("plane")
        made = stack.enter_context(
            control_plane.api_server(folder, without=("TaintNodesByCondition",), flags=flags)
        )
        with closing(Api(made)) as api:
            api.create(f"{API}/deviceclasses", CLASS)
            if how == "buffers":
                rig.serve_buffers(api)
        ours = stack.enter_context(extender(made, f"--autoscaling={how}"))
        arguments = scheduler_arguments(shipped_configuration(ours.url))
        stack.enter_context(control_plane.scheduler(made, flags=flags, **arguments))
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_autoscaler_makes_as_many_nodes_as_the_page_says(
    scenario: Scenario, how: str, plane: ControlPlane
) -> None:
    with closing(Api(plane)) as api:
        scaled = Scaled(api, scenario.groups, scenario.name)
        nodes = {f"n{number}": group for number, group in enumerate(scenario.nodes)}
        scaled.start(nodes, scenario.held)
        before, _ = scaled.state()
        flags = rig.QUICK if scenario.removes else ("--scale-down-enabled=false",)
        buffers = rig.WITH_BUFFERS if how == "buffers" else ()
        with rig.cluster_autoscaler(plane, scaled, "--expander=least-waste", *flags, *buffers) as port:
            scaled.add(scenario.pods)
            found = rig.outcome(scaled, port, before, scenario.quiet)
        scaled.clear()
    assert found == (scenario.alone if how == "off" else scenario.right)


@pytest.mark.timeout(600)
def test_claims_of_parts_of_cards_are_counted_card_by_card(how: str, plane: ControlPlane) -> None:
    if how != "off":
        pytest.skip("nothing is asked for claims, in whatever way")
    with closing(Api(plane)) as api:
        scaled = Scaled(api, [PLAIN], "claims", claims=True)
        scaled.start({"n0": "plain"}, [])
        before, _ = scaled.state()
        for name in ("first", "second"):
            api.create(CLAIMS, claim(name, "12Gi"))
            api.create(rig.PODS, claiming(name))
        until(lambda: scaled.state()[1] == 0, "both cards are used")
        with rig.cluster_autoscaler(plane, scaled, "--scale-down-enabled=false") as port:
            api.create(CLAIMS, claim("third", "6Gi"))
            api.create(rig.PODS, claiming("third"))
            found = rig.outcome(scaled, port, before)
        scaled.clear()
    assert found == CLAIMS_ALONE


@pytest.mark.timeout(600)
def test_claims_start_no_node_where_there_is_none(how: str, plane: ControlPlane) -> None:
    """The provider's template has no ResourceSlices."""
    if how != "off":
        pytest.skip("nothing is asked for claims, in whatever way")
    with closing(Api(plane)) as api:
        scaled = Scaled(api, [PLAIN], "claims from zero", claims=True)
        with rig.cluster_autoscaler(plane, scaled, "--scale-down-enabled=false") as port:
            api.create(CLAIMS, claim("alone", "6Gi"))
            api.create(rig.PODS, claiming("alone"))
            found = rig.outcome(scaled, port, Counter())
        scaled.clear()
    assert found == changed(1)


def claim(name: str, memory: str) -> Object:
    spec = {"devices": {"requests": [request("card", memory)]}}
    return {"kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def claiming(name: str) -> Object:
    container = {"name": "main", "image": "image", "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimName": name}]
    spec = {"schedulerName": "gpuslice-scheduler", "containers": [container], "resourceClaims": claims}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
