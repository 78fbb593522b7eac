"""Admission policies: ValidatingAdmissionPolicy and MutatingAdmissionPolicy, whose expressions are CEL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from simcluster.cluster.cel import CelError, compiled, evaluate
from simcluster.cluster.decode import Decoder
from simcluster.cluster.errors import ApiError, Cause, forbidden, invalid
from simcluster.cluster.patch import json_patch
from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource
from simcluster.cluster.review import Review, matches, namespace_of
from simcluster.cluster.schema import Schema
from simcluster.cluster.store import Store

GROUP = "admissionregistration.k8s.io"


def mutate_by_policies(store: Store, schema: Schema, review: Review) -> Review:
    """The review with what the policies made of its object; ApiError if one fails."""
    for policy, binding in _bound(store, "mutatingadmissionpolicies", review):
        try:
            known = _known(store, policy, review)
            for mutation in (known and policy["spec"].get("mutations")) or []:
                if "jsonPatch" not in mutation:
                    raise CelError(f"patchType {mutation.get('patchType')} is not simulated")
                operations = evaluate(mutation["jsonPatch"]["expression"], known or {})
                changed = json_patch(review.typed(review.obj), operations)
                bare = {key: value for key, value in changed.items() if key not in ("apiVersion", "kind")}
                review = replace(review, obj=Decoder(schema).object(review.resource.schema, bare))
        except (CelError, ApiError) as error:
            if policy["spec"].get("failurePolicy") != "Ignore":
                raise _denied(policy, binding, review, str(error)) from error
    return review


def validate_by_policies(store: Store, review: Review) -> None:
    """ApiError 422 if a policy denies what is reviewed."""
    for policy, binding in _bound(store, "validatingadmissionpolicies", review):
        if "Deny" not in (binding["spec"].get("validationActions") or []):
            continue
        try:
            known = _known(store, policy, review)
            failed = [
                _message(each, known)
                for each in (known and policy["spec"].get("validations")) or []
                if evaluate(each["expression"], known or {}) is not True
            ]
        except CelError as error:
            failed = [] if policy["spec"].get("failurePolicy") == "Ignore" else [str(error)]
        if failed:
            raise _denied(policy, binding, review, failed[0])


def under_review(review: Review) -> dict[str, Any]:
    """What conditions may name."""
    return {
        "request": review.request(),
        "object": review.typed(review.obj),
        "oldObject": review.typed(review.old) if review.old else None,
    }


def conditions_hold(spec: Object, known: Mapping[str, Any]) -> bool:
    """Of a policy or webhook. Where one is false, none fails. Raises CelError."""
    failed: CelError | None = None
    for each in spec.get("matchConditions") or ():
        try:
            if evaluate(each["expression"], known) is not True:
                return False
        except CelError as error:
            failed = error
    if failed is not None:
        raise failed
    return True


def check_expressions(resource: Resource, obj: Object) -> None:
    """ApiError 422 where an expression of a policy does not compile."""
    if resource.group != GROUP or not resource.kind.endswith("AdmissionPolicy"):
        return
    for path, expression in _expressions(obj.get("spec") or {}, "spec"):
        try:
            compiled(expression)
        except CelError as error:
            message = f"Invalid value: {expression!r}: compilation failed: {error}"
            causes = [Cause(path, "FieldValueInvalid", message)]
            raise invalid(resource.kind, GROUP, obj["metadata"]["name"], causes) from error


def _expressions(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in ("expression", "messageExpression") and isinstance(item, str):
                yield f"{path}.{key}", item
            yield from _expressions(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _expressions(item, f"{path}[{number}]")


def _bound(store: Store, plural: str, review: Review) -> Iterator[tuple[Object, Object]]:
    """Policies with each of their bindings that matches, in the order of their names."""
    policies = store.shelf(f"{plural}.{GROUP}").items
    if not policies or review.resource.group == GROUP:
        return
    bindings = store.shelf(f"{plural.removesuffix('ies')}ybindings.{GROUP}").items.values()
    by_policy: dict[str, list[Object]] = {}
    for entry in sorted(bindings, key=lambda entry: entry.key):
        by_policy.setdefault(entry.obj["spec"].get("policyName", ""), []).append(entry.obj)
    for key in sorted(policies):
        policy = policies[key].obj
        rules = policy["spec"].get("matchConstraints") or {}
        if not matches(rules.get("resourceRules"), rules, review, store):
            continue
        for binding in by_policy.get(policy["metadata"]["name"], []):
            narrower = binding["spec"].get("matchResources") or {}
            if matches(narrower.get("resourceRules"), narrower, review, store):
                yield policy, binding


def _known(store: Store, policy: Object, review: Review) -> dict[str, Any] | None:
    """What an expression may name; None where the policy's conditions do not hold. Raises CelError.

    A variable without a value is missing: only who names it fails.
    """
    known = under_review(review) | {"namespaceObject": namespace_of(store, review), "variables": {}}
    if not conditions_hold(policy["spec"], known):
        return None
    for variable in policy["spec"].get("variables") or []:
        with contextlib.suppress(CelError):
            known["variables"][variable["name"]] = evaluate(variable["expression"], known)
    return known


def _message(validation: Object, known: Mapping[str, Any] | None) -> str:
    if "messageExpression" in validation:
        with contextlib.suppress(CelError):  # then, as of the API server, the plain message or the expression
            return str(evaluate(validation["messageExpression"], known or {}))
    return str(validation.get("message") or f"failed expression: {validation['expression']}")


def _denied(policy: Object, binding: Object, review: Review, why: str) -> ApiError:
    kind = "MutatingAdmissionPolicy" if "mutations" in policy["spec"] else "ValidatingAdmissionPolicy"
    names = policy["metadata"]["name"], binding["metadata"]["name"]
    said = f"{kind} '{names[0]}' with binding '{names[1]}' denied request: {why}"
    resource = review.resource
    error = forbidden(resource.plural, resource.group, str(review.obj["metadata"].get("name", "")), said)
    return ApiError(422, "Invalid", error.message, error.details)
