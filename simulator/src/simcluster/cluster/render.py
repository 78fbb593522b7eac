"""Objects as the client asked to see them: whole, metadata only, or as rows of a table."""

from __future__ import annotations

import re
from typing import Any, Protocol

import msgspec

from simcluster.cluster.events_view import to_events_group
from simcluster.cluster.request import JSON, Object, Request
from simcluster.cluster.resources import Resource
from simcluster.cluster.store import Entry
from simcluster.cluster.tables import Printer, definitions, printer_of

_META = "meta.k8s.io/v1"


class Renderer(Protocol):
    """``bookmark_type`` is the kind a bookmark is sent as."""

    content_type: str
    bookmark_type: Object

    def one(self, entry: Entry) -> bytes: ...

    def many(self, entries: list[Entry], metadata: Object) -> bytes: ...

    def watched(self, entry: Entry) -> bytes: ...


def renderer_for(resource: Resource, request: Request, now_s: float) -> Renderer:
    """By the Accept header: the first form we know; plain JSON when it names none."""
    for option in request.accept.split(","):
        if "as=Table" in option:
            version = "v1beta1" if "v=v1beta1" in option else "v1"
            return TableRenderer(resource, version, request.query.get("includeObject", "Metadata"), now_s)
        if "as=PartialObjectMetadata" in option:
            return MetadataRenderer()
        if re.match(r"\s*(application/json|application/\*|\*/\*)", option):
            break
    return ObjectRenderer(resource)


class ObjectRenderer:
    """Whole objects; the stored bytes are used as they are."""

    content_type = JSON

    def __init__(self, resource: Resource) -> None:
        self.bookmark_type: Object = {"kind": resource.kind, "apiVersion": resource.api_version}
        self._head = msgspec.json.encode(self.bookmark_type)[:-1] + b","
        self._list_kind = f"{resource.kind}List"
        self._is_events_group = resource.group == "events.k8s.io"

    def one(self, entry: Entry) -> bytes:
        return self._head + self._raw(entry)[1:]

    watched = one

    def many(self, entries: list[Entry], metadata: Object) -> bytes:
        head = self.bookmark_type | {"kind": self._list_kind, "metadata": metadata}
        items = b",".join(self._raw(entry) for entry in entries)
        return msgspec.json.encode(head)[:-1] + b',"items":[' + items + b"]}"

    def _raw(self, entry: Entry) -> bytes:
        return msgspec.json.encode(to_events_group(entry.obj)) if self._is_events_group else entry.raw


class MetadataRenderer:
    """Only the metadata, for clients that track ownership."""

    content_type = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
    bookmark_type: Object = {"kind": "PartialObjectMetadata", "apiVersion": _META}  # noqa: RUF012 - never changed

    def one(self, entry: Entry) -> bytes:
        return msgspec.json.encode(_partial(entry.obj))

    watched = one

    def many(self, entries: list[Entry], metadata: Object) -> bytes:
        head = {"kind": "PartialObjectMetadataList", "apiVersion": _META, "metadata": metadata}
        return msgspec.json.encode(head | {"items": [_partial(entry.obj) for entry in entries]})


def _partial(obj: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": _META, "metadata": obj["metadata"]}


class TableRenderer:
    """Rows with the columns kubectl prints; a watch names the columns once."""

    content_type = JSON

    def __init__(self, resource: Resource, version: str, include: str, now_s: float) -> None:
        self.bookmark_type: Object = {"kind": "Table", "apiVersion": f"meta.k8s.io/{version}"}
        self._resource = resource
        self._printer: Printer = printer_of(resource)
        self._include = include
        self._now_s = now_s
        self._columns_sent = False

    def one(self, entry: Entry) -> bytes:
        metadata = {"resourceVersion": entry.obj["metadata"]["resourceVersion"]}
        return self._table([entry], metadata, with_columns=True)

    def many(self, entries: list[Entry], metadata: Object) -> bytes:
        return self._table(entries, metadata, with_columns=True)

    def watched(self, entry: Entry) -> bytes:
        metadata = {"resourceVersion": entry.obj["metadata"]["resourceVersion"]}
        table = self._table([entry], metadata, with_columns=not self._columns_sent)
        self._columns_sent = True
        return table

    def _table(self, entries: list[Entry], metadata: Object, with_columns: bool) -> bytes:
        columns = definitions(self._printer) if with_columns else None
        table = self.bookmark_type | {"metadata": metadata, "columnDefinitions": columns}
        return msgspec.json.encode(table | {"rows": [self._row(entry.obj) for entry in entries]})

    def _row(self, obj: Object) -> Object:
        row: Object = {"cells": self._printer.row(obj, self._now_s)}
        if shown := self._shown(obj):
            row["object"] = shown
        return row

    def _shown(self, obj: Object) -> Any:
        match self._include:
            case "None":
                return None
            case "Object":
                return {"kind": self._resource.kind, "apiVersion": self._resource.api_version} | obj
        return _partial(obj)
