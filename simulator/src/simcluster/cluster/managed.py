"""managedFields: who set which field last, kept with every write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simcluster.cluster.fieldset import Path, decode, encode, leaves
from simcluster.cluster.metadata import same_content
from simcluster.cluster.moment import format_time
from simcluster.cluster.request import Object, Request
from simcluster.cluster.resources import Resource
from simcluster.cluster.state import ApiState
from simcluster.cluster.users import user_of

APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Who writes what: ``manager`` for field ownership, ``user`` for policies and webhooks.

    ``subresource`` is empty for the whole object.
    """

    manager: str
    user: Object
    operation: str = "Update"
    subresource: str = ""
    dry_run: bool = False
    force: bool = False


def options_of(request: Request, subresource: str = "") -> WriteOptions:
    manager = request.query.get("fieldManager") or request.user_agent.split("/")[0]
    operation = "Apply" if request.content_type == APPLY else "Update"
    dry_run = "All" in request.query.get("dryRun", "")
    return WriteOptions(manager, user_of(request), operation, subresource, dry_run, request.flag("force"))


def same(old: Object, new: Object) -> bool:
    """Whether a write changes nothing worth storing: neither content nor ownership."""
    return same_content(old, new) and _untimed(old) == _untimed(new)


def _untimed(obj: Object) -> list[Object]:
    entries = obj["metadata"].get("managedFields") or []
    return [{key: value for key, value in entry.items() if key != "time"} for entry in entries]


def record(api: ApiState, resource: Resource, old: Object | None, new: Object, options: WriteOptions) -> None:
    """Writes the new ``metadata.managedFields`` into ``new``. What apply computed stays."""
    metadata = new["metadata"]
    if not api.tracks_managers:
        metadata.pop("managedFields", None)
        return
    if options.operation == "Apply":
        return
    given = metadata.get("managedFields")
    held = given if given is not None else ((old or {}).get("metadata") or {}).get("managedFields")
    entries = [] if held == [{}] else list(held or [])
    if old is None or not same_content(old, new):
        entries = _updated(api, resource, old, new, options, entries)
    if entries:
        metadata["managedFields"] = entries
    else:
        metadata.pop("managedFields", None)


def _updated(  # noqa: PLR0917 - one write seen from all sides
    api: ApiState,
    resource: Resource,
    old: Object | None,
    new: Object,
    options: WriteOptions,
    entries: list[Object],
) -> list[Object]:
    before = leaves(api.schema, resource.schema, old) if old else {}
    after = leaves(api.schema, resource.schema, new)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    removed = before.keys() - after.keys()
    if "status" in resource.subresources and options.subresource != "status":
        changed = {path for path in changed if path[0] != "f:status"}
    if not changed and not removed:
        return entries
    mine = owner_entry(api, resource, options, set())
    kept: list[Object] = []
    owned = changed
    for entry in entries:
        fields = decode(entry.get("fieldsV1") or {})
        identity: tuple[str, ...] = ("manager", "operation", "apiVersion", "subresource")
        if all(entry.get(key) == mine.get(key) for key in identity):
            owned = owned | (fields - removed)
        elif left := fields - changed - removed:
            kept.append(entry if left == fields else entry | {"fieldsV1": encode(left)})
    return [*kept, mine | {"fieldsV1": encode(owned)}] if owned else kept


def owner_entry(api: ApiState, resource: Resource, options: WriteOptions, paths: set[Path]) -> Object:
    entry: Object = {
        "manager": options.manager,
        "operation": options.operation,
        "apiVersion": resource.api_version,
        "time": format_time(api.now_s()),
        "fieldsType": "FieldsV1",
        "fieldsV1": encode(paths),
    }
    return entry | ({"subresource": options.subresource} if options.subresource else {})


def is_applier(entry: Object, options: WriteOptions) -> bool:
    """Whether the entry is what this manager applied before."""
    return (
        entry.get("operation") == "Apply"
        and entry.get("manager") == options.manager
        and entry.get("subresource", "") == options.subresource
    )


def fields_of(entry: Object) -> set[Path]:
    fields: Any = entry.get("fieldsV1") or {}
    return decode(fields)
