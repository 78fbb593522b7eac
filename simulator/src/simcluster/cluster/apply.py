"""Server-side apply: a manager's configuration of an object, merged field by field with those of others."""

from __future__ import annotations

from typing import Any

from simcluster.cluster import managed
from simcluster.cluster.body import Body, check_type, decode_object, parse_body
from simcluster.cluster.errors import ApiError, Cause, bad_request
from simcluster.cluster.fieldset import Path, encode, item_key, leaves, path_text, set_element
from simcluster.cluster.managed import WriteOptions
from simcluster.cluster.request import Object, Request
from simcluster.cluster.resources import Resource
from simcluster.cluster.schema import Field, Message, Schema
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry

Conflict = tuple[Object, Path]
"""The other manager's entry, and the field that both set."""


def read_configuration(api: ApiState, resource: Resource, request: Request) -> Body:
    """The body of an apply, which must name its manager and no owners. Raises ApiError."""
    if not request.query.get("fieldManager"):
        why = "fieldManager: Required value: is required for apply patch"
        raise bad_request(f"PatchOptions.meta.k8s.io is invalid: {why}")
    raw = parse_body(api.schema, request)
    check_type(resource, raw)
    if (raw.get("metadata") or {}).get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    return decode_object(api.schema, resource, raw, request.query.get("fieldValidation", "Warn"))


def begun(api: ApiState, resource: Resource, config: Object, options: WriteOptions) -> Object:
    """The configuration as a new object, all of which is its manager's."""
    paths = set(leaves(api.schema, resource.schema, config))
    owners = [managed.owner_entry(api, resource, options, paths)]
    return config | {"metadata": config["metadata"] | {"managedFields": owners}}


def merged(
    api: ApiState, resource: Resource, current: Entry, config: Object, options: WriteOptions
) -> Object:
    """The live object with the configuration applied, and the resulting managers."""
    live = current.copy()
    wanted = leaves(api.schema, resource.schema, config)
    held = leaves(api.schema, resource.schema, live)
    entries: list[Object] = live["metadata"].get("managedFields") or []
    others = [entry for entry in entries if not managed.is_applier(entry, options)]
    conflicts: list[Conflict] = []
    for entry in others:
        shared = managed.fields_of(entry) & wanted.keys()
        conflicts += [(entry, path) for path in sorted(shared) if held.get(path) != wanted[path]]
    if conflicts and not options.force:
        raise _conflict_error(conflicts)
    lost = {path for _, path in conflicts}
    others = [
        entry | {"fieldsV1": encode(left)} for entry in others if (left := managed.fields_of(entry) - lost)
    ]
    mine = next((entry for entry in entries if managed.is_applier(entry, options)), {})
    owned_by_others = {path for entry in others for path in managed.fields_of(entry)}
    dropped = managed.fields_of(mine) - wanted.keys() - owned_by_others
    message = api.schema.message(resource.schema)
    result = _Merge(api.schema).message(message, _removed(api.schema, message, live, dropped), config)
    own = managed.owner_entry(api, resource, options, set(wanted))
    result["metadata"]["managedFields"] = [own, *others]
    # A resourceVersion or uid in the configuration is a condition; without one, there is none
    for key in ("resourceVersion", "uid"):
        if key in config["metadata"]:
            result["metadata"][key] = config["metadata"][key]
    return result


def _conflict_error(conflicts: list[Conflict]) -> ApiError:
    causes = []
    for entry, path in conflicts:
        part = f' with subresource "{entry["subresource"]}"' if entry.get("subresource") else ""
        who = f'"{entry["manager"]}"{part} using {entry["apiVersion"]}'
        causes.append(Cause(path_text(path), "FieldManagerConflict", f"conflict with {who}"))
    if len(causes) == 1:
        message = f"Apply failed with 1 conflict: {causes[0].message}: {causes[0].field}"
    else:
        groups: dict[str, list[str]] = {}
        for cause in causes:
            groups.setdefault(cause.message.removeprefix("conflict "), []).append(cause.field)
        parts = [
            f"conflicts {who}:" + "".join(f"\n- {field}" for field in fields)
            for who, fields in groups.items()
        ]
        message = f"Apply failed with {len(causes)} conflicts: " + "\n".join(parts)
    return ApiError(409, "Conflict", message, {"causes": [cause.to_dict() for cause in causes]})


class _Merge:
    """Merges a configuration into a live object; changes neither."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def message(self, message: Message, live: Object, config: Object) -> Object:
        result = dict(live)
        for name, value in config.items():
            field = message.fields.get(name)
            result[name] = self._field(field, live.get(name), value) if field else value
        return result

    def _field(self, field: Field, live: Any, config: Any) -> Any:
        if config == {}:
            return live or config
        if not live or field.atomic:
            return config
        if field.shape == "map":
            return live | config
        if field.shape == "list":
            return self._list(field, live, config)
        if field.is_message and not self._schema.message(field.type).atomic:
            return self.message(self._schema.message(field.type), live, config)
        return config

    def _list(self, field: Field, live: list[Any], config: list[Any]) -> list[Any]:
        if field.is_set:
            return [*live, *(item for item in config if item not in live)]
        if not field.map_keys:
            return config
        message = self._schema.message(field.type)
        wanted = {item_key(field, item): item for item in config}
        result = [
            self.message(message, item, wanted.pop(key)) if (key := item_key(field, item)) in wanted else item
            for item in live
        ]
        return [*result, *wanted.values()]


def _removed(schema: Schema, message: Message, obj: Object, paths: set[Path]) -> Object:
    """``obj`` without the fields at ``paths``."""
    below: dict[str, set[Path]] = {}
    for path in paths:
        below.setdefault(path[0].removeprefix("f:"), set()).add(path[1:])
    result = dict(obj)
    for name, rest in below.items():
        field = message.fields.get(name)
        if field is None or name not in result:
            continue
        if () in rest:
            del result[name]
        else:
            left = _removed_inside(schema, field, result[name], rest)
            if left or (field.is_message and field.shape == "one"):
                result[name] = left
            else:
                del result[name]
    return result


def _removed_inside(schema: Schema, field: Field, value: Any, paths: set[Path]) -> Any:
    if field.shape == "map":
        gone = {path[0].removeprefix("f:") for path in paths}
        return {key: item for key, item in value.items() if key not in gone}
    if field.shape == "list":
        if not field.map_keys:
            gone = {path[0] for path in paths}
            return [item for item in value if set_element(item) not in gone]
        result: list[Any] = []
        for item in value:
            rest = {path[1:] for path in paths if path[0] == item_key(field, item)}
            if () not in rest:
                result.append(_removed(schema, schema.message(field.type), item, rest) if rest else item)
        return result
    return _removed(schema, schema.message(field.type), value, paths)
