"""What a pod requires of a node's labels and name (`requiredDuringSchedulingIgnoredDuringExecution`).

One of the terms must be met, with all of its requirements; a term without any is met by no node. A value that
is no whole number is neither greater nor less. Source: ``component-helpers/scheduling/corev1/nodeaffinity``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

Object = Mapping[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def terms_of(affinity: Object | None) -> Sequence[Object] | None:
    """The terms of a pod's `spec.affinity`; None where it requires nothing."""
    required = ((affinity or {}).get("nodeAffinity") or {}).get(REQUIRED)
    return (required.get("nodeSelectorTerms") or ()) if required else None


def meets(affinity: Object | None, node_name: str, labels: Mapping[str, str]) -> bool:
    """Whether a pod with this `spec.affinity` may run on the node, as far as that is concerned."""
    terms = terms_of(affinity)
    return terms is None or meets_any(terms, node_name, labels)


def meets_any(terms: Iterable[Object], node_name: str, labels: Mapping[str, str]) -> bool:
    return any(unmet(term, node_name, labels) == "" for term in terms)


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector of the API chooses something with these labels; none chooses nothing."""
    if selector is None:
        return False
    plain = (selector.get("matchLabels") or {}).items()
    return all(labels.get(key) == value for key, value in plain) and all(
        _holds(each, labels) for each in selector.get("matchExpressions") or ()
    )


def unmet(term: Object, node_name: str, labels: Mapping[str, str]) -> str:
    """The first requirement that the node does not meet, in words; "" where it meets the term."""
    by_label, by_field = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not by_label and not by_field:
        return "a term without requirements"
    fields = {"metadata.name": node_name}
    pairs = [*((each, labels) for each in by_label), *((each, fields) for each in by_field)]
    for each, values in pairs:
        if not _holds(each, values):
            wanted = ", ".join(map(str, each.get("values") or ()))
            return f"{each['key']} {each.get('operator', '')}" + (f" ({wanted})" if wanted else "")
    return ""


def _holds(requirement: Object, values: Mapping[str, str]) -> bool:
    """Whether one requirement is met; by an operator that is not known, never."""
    value = values.get(requirement["key"])
    wanted: Sequence[str] = requirement.get("values") or ()
    match requirement.get("operator"):
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            with suppress(ValueError, IndexError):
                difference = int(value or "") - int(wanted[0])
                return difference > 0 if operator == "Gt" else difference < 0
    return False
