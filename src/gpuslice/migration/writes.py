"""The writes of a migration: each object is changed, deleted and stored, or recreated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES, Resource
from gpuslice.core.contract import ANN_MIGRATION, SYSTEM_NAMESPACE
from gpuslice.core.errors import ContractError
from gpuslice.migration.reader import RECORD, recorded
from gpuslice.migration.systems import JOBS, Object


@dataclass(frozen=True, slots=True)
class Change:
    """One object to be written: by `operations` (a JSON Patch), or deleted (`kept`), or recreated (`made`).

    `ended`: a pod that is deleted and that its owner recreates.
    """

    where: str
    what: tuple[str, ...]
    resource: Resource[Object]
    namespace: str
    name: str
    version: str = ""
    operations: tuple[Object, ...] = ()
    kept: Object | None = None  # the object that is deleted
    made: Object | None = None  # the object that is recreated
    ended: bool = False


class Step(msgspec.Struct, frozen=True):
    """One step of a JSON Patch, as stored in an annotation."""

    op: Literal["add", "remove"]
    path: str
    value: Any = msgspec.UNSET


class WayBack(msgspec.Struct, frozen=True, omit_defaults=True):
    """What reverts a change of an object: the value of its annotation.

    `what`: the same in words. `earlier`: the way back of the previous change, by the same system or another.
    """

    system: str = msgspec.field(name="from")
    steps: tuple[Step, ...] = msgspec.field(name="undo")
    what: tuple[str, ...] = ()
    earlier: WayBack | None = None


def way_back_of(thing: Object) -> WayBack | None:
    """None if nothing was changed. Raises `ContractError`."""
    text = (thing["metadata"].get("annotations") or {}).get(ANN_MIGRATION)
    try:
        return msgspec.json.decode(text, type=WayBack) if text is not None else None
    except msgspec.DecodeError as error:
        must_be = "as `gpuslice migrate` wrote it: undo by hand what was changed, and take it off"
        raise ContractError(f'annotations["{ANN_MIGRATION}"]', text, must_be) from error


async def carry_out(
    client: KubeClient, system: str, changes: Iterable[Change]
) -> AsyncIterator[tuple[Change, str]]:
    """Each change after it was tried, and why it could not be made; "" if it was.

    Raises `KubeError` if the API server is unreachable or rejects all writes: the rest is left for another
    run.
    """
    for change in changes:
        resource, name, namespace = change.resource, change.name, change.namespace
        try:
            if change.kept is not None:
                await _remember(client, system, change)
                await _delete(client, change)
            elif change.ended:
                await _delete(client, change)
            elif change.made is not None:
                with contextlib.suppress(AlreadyExistsError):  # created by an interrupted run
                    await client.create(resource, change.made, namespace)
            else:
                version = change.version
                await client.json_patch(
                    resource, name, change.operations, namespace, resource_version=version
                )
        except (UnavailableError, ForbiddenError):
            raise
        except KubeError as error:
            # the API server does not say which test of a patch failed; those of a node concern only its
            # labels
            tested = change.resource.kind == NODES.kind and isinstance(error, InvalidError)
            changed = "it was changed by somebody else meanwhile: run the same command again"
            yield change, changed if tested or isinstance(error, ConflictError) else str(error)
        else:
            yield change, ""


def unchanged(resource: Resource[Object], thing: Object) -> tuple[str, tuple[Object, ...]]:
    """What a patch of `thing` requires: this resourceVersion, and these tests at its beginning.

    For a node only the labels: kubelet writes its status all the time, so any version would be outdated.
    """
    if resource.kind != NODES.kind:
        return thing["metadata"].get("resourceVersion", ""), ()
    labels = thing["metadata"].get("labels")
    return "", ({"op": "test", "path": "/metadata/labels", "value": labels},) if labels else ()


async def _delete(client: KubeClient, change: Change) -> None:
    """With what it owns; nothing is wrong where it is gone already."""
    with contextlib.suppress(NotFoundError):
        await client.delete(change.resource, change.name, change.namespace, propagation="Background")


async def _remember(client: KubeClient, system: str, change: Change) -> None:
    assert change.kept is not None
    kept = {name: value for name, value in change.kept.items() if name != "status"}
    meta = change.kept["metadata"]
    lasting = ("name", "namespace", "labels", "annotations")
    kept["metadata"] = {name: meta[name] for name in lasting if meta.get(name)}
    kept |= {"apiVersion": change.resource.api_version, "kind": change.resource.kind}
    if change.resource.kind == "Service":
        kept["spec"] = {k: v for k, v in kept["spec"].items() if k not in ("clusterIP", "clusterIPs")}
    if change.resource == JOBS:  # fields that the server added belong to the first object
        kept["spec"] = {k: v for k, v in kept["spec"].items() if k not in ("selector", "manualSelector")}
        (kept["spec"].get("template") or {}).get("metadata", {}).pop("labels", None)
    key = f"{system}.{change.resource.kind}.{change.name}".lower()
    document = {"metadata": {"name": RECORD, "namespace": SYSTEM_NAMESPACE}, "data": {}}
    if not await recorded(client):
        with contextlib.suppress(AlreadyExistsError):
            await client.create(CONFIG_MAPS.as_dict(), document, SYSTEM_NAMESPACE)
    await client.merge_patch(
        CONFIG_MAPS.as_dict(), RECORD, {"data": {key: json.dumps(kept)}}, SYSTEM_NAMESPACE
    )


def place_of(thing: Object) -> tuple[str, str]:
    """Namespace (or "") and name."""
    return thing["metadata"].get("namespace", ""), thing["metadata"]["name"]


def key_of(thing: Object) -> str:
    """NAMESPACE/NAME, or NAME alone."""
    return "/".join(part for part in place_of(thing) if part)
