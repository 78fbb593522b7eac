"""Label and field selectors, from their query strings and from objects' ``selector`` fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from simcluster.cluster.errors import bad_request
from simcluster.cluster.request import Object

Labels = Mapping[str, str]
Matcher = Callable[[Object], bool]
Test = Callable[[Labels], bool]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s*\((.*)\)$")
_EQUAL = re.compile(r"^([^=!\s]+)\s*(==|=|!=)\s*(.*)$")
_KEY = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.\-/]*[A-Za-z0-9])?$")

# Field labels that may be selected on, besides metadata.name and metadata.namespace.
_FIELDS: dict[str, tuple[str, ...]] = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "secrets": ("type",),
    "services": ("spec.clusterIP", "spec.type"),
    "jobs.batch": ("status.successful",),
    "replicasets.apps": ("status.replicas",),
    "resourceslices.resource.k8s.io": ("spec.nodeName", "spec.driver"),
    "events": (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "regarding.kind",
        "regarding.namespace",
        "regarding.name",
        "regarding.uid",
        "reason",
        "reportingComponent",
        "reportingController",
        "source",
        "type",
    ),
}
_EVENT_ALIASES = {
    "regarding": "involvedObject",
    "reportingController": "reportingComponent",
    "source": "source.component",
}


def _split_outside_parentheses(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def parse_labels(text: str) -> list[Test]:
    """Tests that must all hold, from ``a=b,c!=d,e in (f,g),h,!i``; ApiError 400 if it cannot be read."""
    return [_label_test(part) for part in _split_outside_parentheses(text)]


def _label_test(part: str) -> Test:
    if match := _SET.match(part):
        key, operator, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        return _in_test(key, values, operator == "in")
    if match := _EQUAL.match(part):
        key, operator, value = match.groups()
        return _in_test(key, {value}, operator != "!=")
    key = part.removeprefix("!")
    if not _KEY.match(key):
        raise bad_request(f"unable to parse requirement: found '{part}', expected: a label selector")
    return (lambda labels: key not in labels) if part.startswith("!") else (lambda labels: key in labels)


def _in_test(key: str, values: set[str], wanted: bool) -> Test:
    if wanted:
        return lambda labels: labels.get(key) in values
    return lambda labels: labels.get(key) not in values


def selects(selector: Object | None, labels: Labels) -> bool:
    """Whether a LabelSelector object selects these labels; ``None`` selects nothing, ``{}`` everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression_holds(item, labels) for item in selector.get("matchExpressions") or [])


def _expression_holds(expression: Object, labels: Labels) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return False


def selector_text(selector: Object | None) -> str:
    """A LabelSelector as kubectl prints it: ``app=x,tier in (a,b)``."""
    if not selector:
        return "<none>"
    parts = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for item in selector.get("matchExpressions") or []:
        values = ",".join(sorted(item.get("values") or []))
        text = {
            "In": f"{item['key']} in ({values})",
            "NotIn": f"{item['key']} notin ({values})",
            "Exists": item["key"],
            "DoesNotExist": f"!{item['key']}",
        }
        parts.append(text[item["operator"]])
    return ",".join(parts) or "<none>"


def parse_fields(store: str, text: str) -> list[Matcher]:
    """Tests over whole objects, from ``spec.nodeName=a,status.phase!=Failed``."""
    return [_field_test(store, part) for part in _split_outside_parentheses(text)]


def _field_test(store: str, part: str) -> Matcher:
    match = _EQUAL.match(part)
    if match is None:
        raise bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
    path, operator, value = match.groups()
    supported = ("metadata.name", "metadata.namespace", *_FIELDS.get(store, ()))
    if path not in supported:
        raise bad_request(f'field label not supported: "{path}"')
    keys = tuple(_EVENT_ALIASES.get(path.split(".")[0], path.split(".")[0]).split(".")) + tuple(
        path.split(".")[1:]
    )
    wanted = operator != "!="
    return lambda obj: (_field_value(obj, keys) == value) is wanted


def _field_value(obj: Object, keys: tuple[str, ...]) -> str:
    value: Any = obj
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return (
            "0"
            if keys[-1] in ("successful", "replicas")
            else "false"
            if keys[-1] in ("unschedulable", "hostNetwork")
            else ""
        )
    return str(value)


def build_matcher(store: str, query: Mapping[str, str]) -> Matcher | None:
    """What ``labelSelector`` and ``fieldSelector`` ask for, or None if they ask for everything."""
    labels = parse_labels(query.get("labelSelector", ""))
    fields = parse_fields(store, query.get("fieldSelector", ""))
    if not labels and not fields:
        return None

    def matches(obj: Object) -> bool:
        own = obj["metadata"].get("labels") or {}
        return all(test(own) for test in labels) and all(test(obj) for test in fields)

    return matches
