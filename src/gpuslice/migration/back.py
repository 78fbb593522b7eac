"""The way back of a migration: changed objects by the annotations that they carry, and deleted objects."""

from __future__ import annotations

import msgspec

from gpuslice.adapters.kube.resources import NODES, Resource
from gpuslice.core.contract import AMOUNT_NAMES, ANN_MIGRATION, SYSTEM_NAMESPACE
from gpuslice.core.errors import ContractError
from gpuslice.core.form import escaped
from gpuslice.migration.plan import Note, Plan, drain
from gpuslice.migration.reader import RECORD, Planned, ours
from gpuslice.migration.systems import Object, System, limits_of
from gpuslice.migration.writes import (
    Change,
    key_of,
    place_of,
    unchanged,
    way_back_of,
)


def plan_back(system: System, cluster: Planned) -> Plan:
    """What has to be done now to go back to `system`: everything that carries a way back, and deleted
    objects.
    """
    changes: list[Change] = []
    waits: list[Note] = []
    by_hand: list[Note] = []

    def holds_ours(pod: Object) -> bool:
        return not limits_of(pod).isdisjoint(AMOUNT_NAMES)

    things = [(NODES.as_dict(), node) for node in cluster.nodes]
    for resource, thing in (*things, *cluster.workloads):
        where = f"{'node' if resource.kind == 'Node' else resource.kind} {key_of(thing)}"
        try:
            step = _way_back(resource, thing, system.name, where)
        except ContractError as error:
            by_hand.append(Note(where, str(error)))
            continue
        if isinstance(step, Change) and resource.kind == "Node":
            step = drain(system, thing, cluster.pods, holds_ours) or step
        if isinstance(step, Change):
            changes.append(step)
        elif step is not None:
            waits.append(step)
    resources = {resource.kind: resource for resource, _ in system.owned}
    for key, text in sorted(cluster.recorded.items()):
        if key.split(".")[0] != system.name:
            continue
        try:
            kept = msgspec.json.decode(text, type=_Kept)
            resource, thing = resources[kept.kind], msgspec.json.decode(text)
        except (msgspec.DecodeError, KeyError):
            what = f"{key} is not as `gpuslice migrate` wrote it: make again by hand what was deleted"
            by_hand.append(Note(f"ConfigMap {SYSTEM_NAMESPACE}/{RECORD}", what))
            continue
        where = f"{kept.kind} {key_of(thing)}"
        found = cluster.owned.get((resource, thing["metadata"]["name"]))
        if found is not None and ours(found):
            what = "ours has its name: helm uninstall gpuslice's release, then run this again"
            waits.append(Note(where, what))
        elif found is None:
            changes.append(Change(where, ("is recreated",), resource, *place_of(thing), made=thing))
    return Plan(tuple(changes), tuple(waits), tuple(by_hand))


class _Meta(msgspec.Struct):
    name: str


class _Kept(msgspec.Struct):
    """What must be known about a deleted object to recreate it."""

    kind: str
    metadata: _Meta


def _way_back(resource: Resource[Object], thing: Object, system: str, where: str) -> Change | Note | None:
    """Over all runs that came from `system`, the last one first; what was done before them stays recorded."""
    left = way_back_of(thing)
    last, operations, what = left, list[Object](), list[str]()
    absent = set[str]()
    while left is not None and left.system == system:
        for step in left.steps:
            if step.op == "remove" and step.path in absent:
                continue  # a later run had set it again
            (absent.add if step.op == "remove" else absent.discard)(step.path)
            operations.append(msgspec.to_builtins(step))
        what += left.what or [f"{step.op} {step.path}" for step in left.steps]
        left = left.earlier
    if last is None or not operations:
        while left is not None and left.system != system:
            left = left.earlier
        if last is None or left is None:
            return None
        first = f"gpuslice migrate --from {last.system} --undo --apply first"
        return Note(where, f"it came from {last.system} since: {first}")
    note: Object = {"op": "remove", "path": f"/metadata/annotations/{escaped(ANN_MIGRATION)}"}
    if left is not None:
        note |= {"op": "add", "value": msgspec.json.encode(left).decode()}
    version, tests = unchanged(resource, thing)
    words = tuple(dict.fromkeys(what))
    steps = (*tests, *operations, note)
    return Change(where, words, resource, *place_of(thing), version=version, operations=steps)
