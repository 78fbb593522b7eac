"""One write under review, and which webhooks and policies look at it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource
from simcluster.cluster.selector import selects
from simcluster.cluster.store import Store
from simcluster.cluster.users import ADMINISTRATOR


@dataclass(frozen=True, slots=True)
class Review:
    """``old`` is None for a creation. ``user`` is the userInfo of who writes."""

    resource: Resource
    operation: str
    old: Object | None
    obj: Object
    user: Object
    dry_run: bool = False
    subresource: str = ""

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"].get("namespace", ""))

    def typed(self, obj: Object) -> Object:
        return {"kind": self.resource.kind, "apiVersion": self.resource.api_version} | obj

    def request(self) -> Object:
        """The part of an AdmissionReview's request that policies see, too."""
        resource = self.resource
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        where = {"group": resource.group, "version": resource.version, "resource": resource.plural}
        part = {"subResource": self.subresource} if self.subresource else {}
        return {
            "kind": kind,
            "resource": where,
            **part,
            "requestKind": kind,
            "requestResource": where,
            "name": self.obj["metadata"].get("name", ""),
            "namespace": self.namespace,
            "operation": self.operation,
            "userInfo": self.user or ADMINISTRATOR,
            "dryRun": self.dry_run,
            "options": {},
        }


def matches(rules: Iterable[Object] | None, selectors: Object, review: Review, store: Store) -> bool:
    """Whether one of the rules is about such a write (None: of any), and the two selectors select it."""
    if rules is not None and not any(_rule_matches(rule, review) for rule in rules):
        return False
    labels = _labels(namespace_of(store, review) or {"metadata": {}})
    if not selects(selectors.get("namespaceSelector") or {}, labels):
        return False
    objects = [item for item in (review.obj, review.old) if item is not None]
    return any(selects(selectors.get("objectSelector") or {}, _labels(item)) for item in objects)


def namespace_of(store: Store, review: Review) -> Object | None:
    """The Namespace that the object is in, or is; None for other objects of the cluster."""
    if review.resource.store == "namespaces":
        return review.obj
    entry = store.get("namespaces", ("", review.namespace))
    return entry.obj if entry else None


def _rule_matches(rule: Object, review: Review) -> bool:
    resource = review.resource
    scope = "Namespaced" if resource.namespaced else "Cluster"
    name = f"{resource.plural}/{review.subresource}" if review.subresource else resource.plural
    wanted = {name, "*/*", f"*/{review.subresource}" if review.subresource else "*"}
    return (
        not {review.operation, "*"}.isdisjoint(rule.get("operations") or [])
        and not {resource.group, "*"}.isdisjoint(rule.get("apiGroups") or [""])
        and not {resource.version, "*"}.isdisjoint(rule.get("apiVersions") or [])
        and not wanted.isdisjoint(rule.get("resources") or [])
        and rule.get("scope", "*") in ("*", scope)
    )


def _labels(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}
