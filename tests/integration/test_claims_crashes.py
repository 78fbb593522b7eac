"""The driver of claims killed at each of its writes: whatever is left, kubelet's next question puts it right.

A hook on the interpreter's audit events counts everything that changes the file system. A run that dies at
the n-th change finds that change and all later ones refused, as a process that was killed makes none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as pb
from gpuslice.adapters.region.limits import read_limits
from gpuslice.adapters.region.reader import read_region
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.dra.driver import ClaimDriver
from gpuslice.apps.agent.dra.prepared import PreparedClaims
from gpuslice.apps.agent.folders import Folders
from gpuslice.core.mode import Rules
from gpuslice.core.model import Card, Node, NodeMode
from tests.integration.agent_bench import NODE, uuid
from tests.integration.claims_rig import result
from tests.unit.kube_wire import ScriptedTransport, answer

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink"}
UID = "11111111-2222-3333-4444-555555555555"
CLAIM = pb.Claim(namespace="default", name="c", uid=UID)


class KilledError(BaseException):
    """The process is no more."""


class _Killer:
    """Counts changes while `armed`; from number `at` on none is made."""

    def __init__(self) -> None:
        self.root = ""
        self.at = 0
        self.count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.root:
            return
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (writes or event in CHANGES) and str(arguments[0]).startswith(self.root):
            self.count += 1
            if self.at and self.count >= self.at:
                raise KilledError


KILLER = _Killer()
sys.addaudithook(KILLER)


@contextmanager
def killed_at(root: Path, number: int) -> Iterator[None]:
    """Dies at that change below `root`; 0: never."""
    KILLER.root, KILLER.at, KILLER.count = str(root), number, 0
    try:
        yield
    finally:
        KILLER.root = ""


class Machine:
    """One node's disk, and agents that come and go on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot = "first"
        self.uuids = (uuid(0), uuid(1))  # of the cards that the driver has, in its order
        self.library = folder / "libgpuslice.so"
        folder.mkdir()
        self.library.write_bytes(b"the library")
        Folders(folder / "root", boot="").library.install(str(self.library))

    def driver(self, *claims: Any) -> ClaimDriver:
        """A new process; the API server answers with `claims`, then nothing."""
        folders = Folders(self.folder / "root", boot=self.boot)
        folders.library.install(str(self.library))
        cards = tuple(Card(index, each, 16130, 15) for index, each in enumerate(self.uuids))
        state = AllocationState(Node(NODE, cards))
        state.rules = Rules(NodeMode.CLAIMS, divides_compute=True)
        return ClaimDriver(
            KubeClient(ScriptedTransport(*claims, *claims)),
            state,
            folders,
            PreparedClaims(self.folder / "root", self.folder / "cdi", folders),
            unit=lambda: "GiB",
            cdi_kind="",
            obstacle=lambda: "",
            unhealthy=dict,
        )

    async def prepare(self, claim: Any = None, uid: str = UID) -> pb.NodePrepareResourceResponse:
        request = pb.NodePrepareResourcesRequest(claims=[pb.Claim(namespace="default", name="c", uid=uid)])
        return (await self.driver(claim or document()).node_prepare_resources(request)).claims[uid]

    async def unprepare(self) -> pb.NodeUnprepareResourceResponse:
        request = pb.NodeUnprepareResourcesRequest(claims=[CLAIM])
        return (await self.driver().node_unprepare_resources(request)).claims[UID]

    # -- what is there ----------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Everything of claims outside the trash."""
        root = self.folder / "root"
        places = (*root.glob("containers/claim-*"), *root.glob("claims/*"), *(self.folder / "cdi").glob("*"))
        return sorted(str(path.relative_to(self.folder)) for path in places)

    def check_prepared(self) -> None:
        (record,) = self.driver().prepared.all()
        assert record.boot == self.boot
        assert self.driver().prepared.in_place(record.allocation)
        folders = sorted((self.folder / "root" / "containers").glob("claim-*"))
        limits = [read_limits(each / "etc" / "limits") for each in folders]
        assert [[limit.uuid for limit in each or ()] for each in limits] == [[uuid(0)], [uuid(0), uuid(1)]]
        assert [[inside.name for inside in (each / "var").iterdir()] for each in folders] == [["region"]] * 2
        assert all(read_region(each / "var" / "region") is None for each in folders)


def document(uid: str = UID, *results: Any) -> Any:
    """A claim; of two requests, one of them of two cards, unless `results` are given."""
    results = results or (
        result("4Gi", request="a"),
        result("2Gi", request="b", share="s2"),
        result("2Gi", card=1, request="b", share="s3"),
    )
    status = {"allocation": {"devices": {"results": list(results)}}}
    return answer({"metadata": {"name": "c", "namespace": "default", "uid": uid}, "status": status})


async def changes(machine: Machine, step: Any) -> int:
    with killed_at(machine.folder, 0):
        await step()
    return KILLER.count


async def die(machine: Machine, step: Any, number: int) -> None:
    with killed_at(machine.folder, number), pytest.raises(KilledError):
        await step()


async def test_killed_at_any_write_of_preparing(tmp_path: Path) -> None:
    """Asked again, it is prepared; let go instead, nothing is left. Both by a new process."""
    reference = Machine(tmp_path / "reference")
    total = await changes(reference, reference.prepare)
    assert total > 10
    reference.check_prepared()
    answered = await reference.prepare()
    for number in range(1, total + 1):
        machine = Machine(tmp_path / f"again-{number}")
        await die(machine, machine.prepare, number)
        assert await machine.prepare() == answered
        machine.check_prepared()
        machine = Machine(tmp_path / f"away-{number}")
        await die(machine, machine.prepare, number)
        assert not (await machine.unprepare()).error
        assert machine.left() == []


async def test_killed_at_any_write_of_letting_go(tmp_path: Path) -> None:
    reference = Machine(tmp_path / "reference")
    await reference.prepare()
    total = await changes(reference, reference.unprepare)
    assert total > 3
    for number in range(1, total + 1):
        machine = Machine(tmp_path / f"again-{number}")
        await machine.prepare()
        await die(machine, machine.unprepare, number)
        assert not (await machine.unprepare()).error
        assert machine.left() == []
        assert (await machine.prepare()).devices
        machine.check_prepared()


async def test_killed_at_any_write_after_a_reboot(tmp_path: Path) -> None:
    """The machine went down with a claim prepared; /var/run is empty, and regions hold what was."""

    async def rebooted(name: str) -> Machine:
        machine = Machine(tmp_path / name)
        await machine.prepare()
        for region in machine.folder.glob("root/containers/claim-*/var"):
            (region / "region").write_bytes(b"of the last run")
        for file in (machine.folder / "cdi").iterdir():
            file.unlink()
        machine.boot = "second"
        return machine

    machine = await rebooted("reference")
    total = await changes(machine, machine.prepare)
    machine.check_prepared()
    for number in range(1, total + 1):
        machine = await rebooted(f"again-{number}")
        await die(machine, machine.prepare, number)
        assert (await machine.prepare()).devices
        machine.check_prepared()


async def test_what_a_crash_left_half_prepared_is_cleared_away(tmp_path: Path) -> None:
    """kubelet never comes back for it: the claim was deleted meanwhile."""
    reference = Machine(tmp_path / "reference")
    total = await changes(reference, reference.prepare)
    gone = answer({"kind": "Status", "reason": "NotFound", "code": 404}, 404)
    for number in range(1, total + 1):
        machine = Machine(tmp_path / f"left-{number}")
        await die(machine, machine.prepare, number)
        await machine.driver(gone).forget_vanished()
        assert machine.left() == [], number


async def test_a_claim_stays_on_its_card_whatever_index_that_has_after_a_reload_of_the_driver(
    tmp_path: Path,
) -> None:
    """The first card is lost: the second, of which a claim holds 2 units, is gpu-0 now."""
    machine = Machine(tmp_path / "machine")
    await machine.prepare()
    machine.uuids = (uuid(1), uuid(2))
    error = (await machine.prepare()).error
    assert error.startswith(f"claim default/c was prepared on card {uuid(0)}, and gpu-0 is now {uuid(1)},")
    other = UID.replace("1", "9")
    too_much = await machine.prepare(document(other, result("14Gi")), other)
    assert "card 0 of node n1 has 15 units, and prepared claims with this one would hold 16" in too_much.error
    assert not (await machine.prepare(document(other, result("13Gi")), other)).error
