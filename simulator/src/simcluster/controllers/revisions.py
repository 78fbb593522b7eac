"""ControllerRevisions: the templates a StatefulSet or DaemonSet has had, for ``kubectl rollout undo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Create, delete, patch
from simcluster.controllers.ownership import controller_reference, template_hash

Object = Mapping[str, Any]

LABEL = "controller-revision-hash"


def revision_name(owner: Object) -> str:
    """The name of the revision that the spec's template is."""
    return f"{owner['metadata']['name']}-{template_hash(owner['spec']['template'])}"


def record(owner: Object, kind: str, label: str, held: Sequence[Object], in_use: set[str]) -> list[Action]:
    """The present template as the newest revision; surplus old ones that no pod uses are deleted."""
    name = revision_name(owner)
    newest = max((item.get("revision", 0) for item in held), default=0)
    known = next((item for item in held if item["metadata"]["name"] == name), None)
    if known is None:
        number = newest + 1
        template = owner["spec"]["template"]
        labels = {**((template.get("metadata") or {}).get("labels") or {}), LABEL: label}
        metadata = {
            "name": revision_name(owner),
            "labels": labels,
            "ownerReferences": [controller_reference(owner, "apps/v1", kind)],
        }
        data = {"spec": {"template": {**template, "$patch": "replace"}}}
        body = {"metadata": metadata, "revision": number, "data": data}
        return [Create("ControllerRevision", body, owner["metadata"]["namespace"])]
    actions: list[Action] = []
    if known["revision"] != newest:
        actions.append(patch("ControllerRevision", known, {"revision": newest + 1}))
    idle = [item for item in held if item["metadata"]["name"] not in in_use | {name}]
    surplus = max(len(idle) - owner["spec"].get("revisionHistoryLimit", 10), 0)
    oldest = sorted(idle, key=lambda item: int(item.get("revision", 0)))
    return actions + [delete("ControllerRevision", item) for item in oldest[:surplus]]


def template_of(revision: Object) -> Object:
    """The pod template in a revision."""
    template = revision["data"]["spec"]["template"]
    return {key: value for key, value in template.items() if key != "$patch"}
