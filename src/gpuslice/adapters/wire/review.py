"""The JSON of admission: AdmissionReview v1 (k8s.io/api/admission/v1), and the pod in it as a plain value.

Only what matters for the decision is decoded; what a patch writes back whole (environment, affinity, amounts)
is kept as it is.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from gpuslice.adapters.limits import LIMITS, Limits
from gpuslice.adapters.wire.errors import UNREADABLE, MalformedError
from gpuslice.core.errors import InvalidRequestError, shown
from gpuslice.core.form import ContainerForm, Operation, PodForm

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
T = TypeVar("T")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')


class _Wire(msgspec.Struct, gc=False, rename="camel", kw_only=True):
    pass


class _Resources(_Wire):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None
    claims: list[dict[str, Any]] | None = None


class _Container(_Wire):
    name: str = ""
    resources: _Resources | None = None
    env: list[dict[str, Any]] | None = None
    env_from: list[Any] | None = None
    restart_policy: str | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    volume_devices: list[dict[str, Any]] | None = None
    termination_message_path: str = ""


class _Spec(_Wire):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    ephemeral_containers: list[_Container] | None = None
    scheduler_name: str = ""
    runtime_class_name: str | None = None
    node_name: str = ""
    node_selector: dict[str, str] | None = None
    affinity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] | None = None
    resource_claims: list[dict[str, Any]] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None
    scheduling_group: dict[str, Any] | None = None


class _Metadata(_Wire):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Pod(_Wire):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _User(_Wire):
    username: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _Resource(_Wire):
    group: str = ""
    version: str = ""
    resource: str = ""


POD_PARTS = frozenset({"", "status", "ephemeralcontainers", "resize"})


class AdmissionRequest(_Wire):
    """One write under review. `object` and `old_object` are pods only if `has_pod`."""

    uid: str
    operation: str = ""
    namespace: str = ""
    name: str = ""
    resource: _Resource = msgspec.field(default_factory=_Resource)
    sub_resource: str = ""
    user_info: _User = msgspec.field(default_factory=_User)
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_pod(self) -> bool:
        return self.what == "pods"

    @property
    def has_pod(self) -> bool:
        """Also a part of one that is written for itself; a Binding has annotations that become the pod's."""
        whole, _, part = self.what.partition("/")
        return (whole == "pods" and part in POD_PARTS) or self.what in ("pods/binding", "bindings")

    @property
    def what(self) -> str:
        """The resource, with its subresource behind a slash; "" if it is not of the core group."""
        return "/".join(filter(None, (self.resource.resource, self.sub_resource))) * (not self.resource.group)

    @property
    def adds_containers(self) -> bool:
        """Whether it adds ephemeral containers to a pod."""
        return self.what == "pods/ephemeralcontainers"


class _Review(_Wire):
    api_version: str = ""
    kind: str = ""
    request: AdmissionRequest | None = None


_REVIEW = msgspec.json.Decoder(_Review)
_POD = msgspec.json.Decoder(_Pod)
_DOCUMENT: msgspec.json.Decoder[dict[str, Any] | None] = msgspec.json.Decoder(dict[str, Any] | None)


def decode_review(body: bytes, limits: Limits = LIMITS) -> AdmissionRequest:
    """The request of an AdmissionReview. Raises `MalformedError`."""
    if _values(body, limits.values) > limits.values:
        raise MalformedError(f"the AdmissionReview has more than {limits.values} values")
    try:
        review = _REVIEW.decode(body)
    except UNREADABLE as error:
        raise MalformedError(f"the AdmissionReview cannot be read: {error}") from error
    if review.kind != KIND or review.api_version != API_VERSION or review.request is None:
        given = f"{review.kind or 'no kind'} of {review.api_version or 'no apiVersion'}"
        raise MalformedError(f"this is {shown(given)}, must be {KIND} of {API_VERSION} with a request")
    return review.request


def _values(document: bytes, enough: int) -> int:
    """The number of values in a JSON document, or more than `enough`; commas in strings do not count."""
    if (values := document.count(b",")) <= enough:
        return values
    values = end = 0
    for text in _STRING.finditer(document):
        values += document.count(b",", end, text.start())
        end = text.end()
        if values > enough:
            return values
    return values + document.count(b",", end)


def document_of(raw: msgspec.Raw, limits: Limits = LIMITS) -> dict[str, Any]:
    """Any object of a review, empty where there is none. Raises as `pod_form`."""
    return _decoded(_DOCUMENT, raw, "object", limits) or {}


def pod_form(raw: msgspec.Raw, limits: Limits = LIMITS) -> PodForm:
    """A pod of a review. Raises `MalformedError`, and `InvalidRequestError` for an excessive one.

    A review that fails may be ignored; a pod that is denied is not.
    """
    pod = _decoded(_POD, raw, "pod", limits)
    meta, spec = pod.metadata, pod.spec
    return PodForm(
        containers=(
            *_forms("initContainers", spec.init_containers or ()),
            *_forms("containers", spec.containers or ()),
        ),
        labels=meta.labels or {},
        annotations=meta.annotations or {},
        scheduler=spec.scheduler_name,
        runtime_class=spec.runtime_class_name or "",
        node=spec.node_name,
        node_selector=spec.node_selector or {},
        affinity=spec.affinity or {},
        tolerations=tuple(spec.tolerations or ()),
        terminating=meta.deletion_timestamp is not None,
        claims=tuple(spec.resource_claims or ()),
        gates=tuple(spec.scheduling_gates or ()),
        in_group=bool(spec.scheduling_group),
        ephemeral=tuple(_forms("ephemeralContainers", spec.ephemeral_containers or ())),
    )


def _decoded(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, what: str, limits: Limits) -> T:
    if (values := _values(bytes(raw), limits.object_values)) > limits.object_values:
        raise InvalidRequestError(f"the {what}'s size", f"{values} values", f"at most {limits.object_values}")
    try:
        return decoder.decode(raw)
    except UNREADABLE as error:
        raise MalformedError(f"the {what} cannot be read: {error}") from error


def _forms(shelf: str, containers: Sequence[_Container]) -> Iterator[ContainerForm]:
    for index, each in enumerate(containers):
        resources = each.resources or _Resources()
        yield ContainerForm(
            shelf=shelf,
            index=index,
            name=each.name,
            limits=resources.limits or {},
            requests=resources.requests or {},
            env=tuple(each.env or ()),
            env_from=bool(each.env_from),
            sidecar=each.restart_policy == "Always",
            claims=tuple(resources.claims or ()),
            volume_mounts=tuple(each.volume_mounts or ()),
            volume_devices=tuple(each.volume_devices or ()),
            termination_message_path=each.termination_message_path,
        )


def answer(
    uid: str, *, denial: str = "", operations: Sequence[Operation] = (), warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """The AdmissionReview to return: a denial with its message, or a yes with the changes."""
    response: dict[str, Any] = {"uid": uid, "allowed": not denial}
    if denial:
        response["status"] = {"code": 422, "reason": "Invalid", "message": denial}
    elif operations:
        patch = msgspec.json.encode([each.document() for each in operations])
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
    if warnings:
        response["warnings"] = [each[:240] for each in warnings]
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}
