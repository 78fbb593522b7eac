"""A pod for which a queue had cards held, in kube-scheduler's eyes; and a cluster without Kueue."""

from __future__ import annotations

from gpuslice.core.hold import NOBODY, Hold, HoldKind
from gpuslice.core.model import Placement
from tests.integration.extender_rig import cluster, rig


async def test_what_is_held_for_a_queued_pod_is_its_own_alone() -> None:
    async with rig(cluster(n1=(15, 1), n2=(4, 1))) as extender:
        own, other = extender.api.add_pod("own", 10), extender.api.add_pod("other", 10)
        await extender.caught_up()
        ledger, placer = extender.extender.ledger, extender.extender.placer
        pod = ledger.pods[own["metadata"]["uid"]]
        assert pod.request is not None
        placement = placer.choose_cards("n1", pod.request, pod)
        assert isinstance(placement, Placement)
        assert ledger.hold_tentatively(Hold(pod, placement, HoldKind.ADMITTED, NOBODY)) is None
        assert (await extender.filter(other, "n1", "n2"))["NodeNames"] == []
        labels = {"kueue.x-k8s.io/podset": "main"}
        unseen = {**own, "metadata": {**own["metadata"], "uid": "another", "labels": labels}}
        assert "not shown this pod yet" in (await extender.filter(unseen, "n1", "n2"))["Error"]
        assert (await extender.filter(own, "n1", "n2"))["NodeNames"] == ["n1"]
        assert await extender.bind(own) == ""


async def test_card_fit_without_kueue_changes_nothing() -> None:
    async with rig(cluster(n1=(15, 1)), card_fit=True) as extender:
        assert await extender.add_and_bind("a") == "0"
