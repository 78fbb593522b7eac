"""The Kubernetes API: one method for each verb, each answer decoded or raised.

Nothing is retried here: whether a repeat is right is for the caller to know (see `errors`). Objects are
addressed by a `Resource`, which also says what they are decoded to.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gpuslice.adapters.kube import requests
from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, InvalidError
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import Listing, ListMetadata, WatchEvent
from gpuslice.adapters.kube.resources import Resource
from gpuslice.adapters.kube.transport import Transport

T = TypeVar("T")
U = TypeVar("U")


class KubeClient:
    """Speaks to one API server. `manager` names us in managedFields."""

    def __init__(self, transport: Transport, *, manager: str = "gpuslice") -> None:
        self._transport = transport
        self._manager = manager

    def over(self, wrap: Callable[[Transport], Transport]) -> KubeClient:
        """The same client with something between it and the wire."""
        return KubeClient(wrap(self._transport), manager=self._manager)

    # -- reading --------------------------------------------------------------------------------------

    async def get(self, resource: Resource[T], name: str, namespace: str = "") -> T:
        return await self._decoded(resource.type, ApiRequest("GET", resource.path(namespace, name)))

    async def minor_version(self) -> int:
        """Of the server's Kubernetes: 36 for 1.36, 0 where it says something else."""
        said = await self._decoded(dict[str, str], ApiRequest("GET", "/version"))
        digits = re.match(r"\d+", said.get("minor", ""))
        return int(digits[0]) if digits else 0

    async def list(
        self,
        resource: Resource[T],
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        page: int = requests.PAGE,
    ) -> Listing[T]:
        """All objects, fetched in pages. `labels` and `fields` are selectors as kubectl takes them.

        GoneError when the list changed so long ago that its pages expired; start again, without pages.
        """
        return await self.list_as(resource, _unchanged, namespace, labels=labels, fields=fields, page=page)

    async def all(
        self, resource: Resource[T], namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> Sequence[T]:
        """The objects of `list`, where their version does not matter."""
        return (await self.list(resource, namespace, labels=labels, fields=fields)).items or ()

    async def read(self, path: str) -> bytes:
        """What the server answers under a path of its own, such as a pod's ``proxy`` or ``log``."""
        request = ApiRequest("GET", path)
        response = await self._transport.request(request)
        requests.expect_success(response, request)
        return response.body

    async def list_as(
        self,
        resource: Resource[T],
        each: Callable[[T], U],
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        page: int = requests.PAGE,
        version: str = "",
    ) -> Listing[U]:
        """What `each` makes of every object when its page has come: a whole cluster's pods at once take
        several times the memory of what is kept of them.

        With a `version` the server answers from its cache, all at once, when that is as new ("0": at once).
        """
        items: list[U] = []
        token, limit = "", 0 if version else page
        while True:
            request = requests.list_page(
                resource, namespace, labels, fields, limit=limit, token=token, version=version
            )
            answer = await self._decoded(Listing[resource.type], request)  # type: ignore[name-defined]  # known at run time
            items += map(each, answer.items or ())
            token = answer.metadata.continue_
            if not token:
                return Listing(ListMetadata(answer.metadata.resource_version), items)

    async def current_version(self, resource: Resource[Any], namespace: str = "") -> str:
        """The resourceVersion that a list would have now."""
        request = requests.list_page(resource, namespace, "", "", limit=1, token="")
        return (await self._decoded(Listing[msgspec.Raw], request)).metadata.resource_version

    async def watch(
        self,
        resource: Resource[T],
        resource_version: str,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        timeout_s: int = 300,
    ) -> AsyncGenerator[WatchEvent[T]]:
        """What changed since `resource_version`, until the server ends it after `timeout_s`.

        Use `watch.Reflector` unless every line matters as it came. A line that says ERROR is raised.
        """
        query = requests.watch_query(resource_version, labels, fields, timeout_s)
        lines = self._transport.stream(ApiRequest("GET", resource.path(namespace), query))
        read = requests.decoder(WatchEvent[resource.type])  # type: ignore[name-defined]  # known at run time
        async with contextlib.aclosing(lines) as open_lines:
            async for line in open_lines:
                yield requests.watch_event(read, line, f"watch of {resource.plural}")

    # -- writing --------------------------------------------------------------------------------------

    async def create(self, resource: Resource[T], document: Any, namespace: str = "") -> T:
        """Create it; AlreadyExistsError when the name is taken. `document` is a struct or a dict."""
        own_namespace, _, whole = requests.named(resource, document)
        path = resource.path(namespace or own_namespace)
        return await self._decoded(resource.type, requests.write("POST", path, whole))

    async def replace(
        self, resource: Resource[T], document: Any, namespace: str = "", *, subresource: str = ""
    ) -> T:
        """Write the whole object; ConflictError when the resourceVersion in it is not the current one."""
        own_namespace, name, whole = requests.named(resource, document)
        path = resource.path(namespace or own_namespace, name, subresource)
        return await self._decoded(resource.type, requests.write("PUT", path, whole))

    async def merge_patch(
        self,
        resource: Resource[T],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        uid: str = "",
        resource_version: str = "",
        subresource: str = "",
    ) -> T:
        """Change the fields in `patch`; None deletes one.

        ConflictError when the object has another `uid` or `resource_version` than given.
        """
        document = requests.with_preconditions(patch, uid, resource_version)
        path = resource.path(namespace, name, subresource)
        return await self._guarded(
            resource.type, requests.write("PATCH", path, document, requests.MERGE_PATCH)
        )

    async def json_patch(
        self,
        resource: Resource[T],
        name: str,
        operations: Sequence[Mapping[str, Any]],
        namespace: str = "",
        *,
        uid: str = "",
        resource_version: str = "",
        subresource: str = "",
    ) -> T:
        """Apply RFC 6902 `operations`; ConflictError when `uid` or `resource_version` differ."""
        document = requests.guarded_operations(operations, uid, resource_version)
        path = resource.path(namespace, name, subresource)
        return await self._guarded(
            resource.type, requests.write("PATCH", path, document, requests.JSON_PATCH)
        )

    async def patch_status(
        self,
        resource: Resource[T],
        name: str,
        status: Mapping[str, Any],
        namespace: str = "",
        *,
        uid: str = "",
    ) -> T:
        """Merge `status` into the object's status."""
        patch = {"status": status}
        return await self.merge_patch(resource, name, patch, namespace, uid=uid, subresource="status")

    async def add_condition(
        self,
        resource: Resource[T],
        name: str,
        condition: Mapping[str, Any],
        namespace: str = "",
        *,
        uid: str = "",
    ) -> T:
        """Set one condition of a built-in kind's status; those of other types stay as they are."""
        document = requests.with_preconditions({"status": {"conditions": [condition]}}, uid, "")
        path = resource.path(namespace, name, "status")
        request = requests.write("PATCH", path, document, requests.STRATEGIC_PATCH)
        return await self._guarded(resource.type, request)

    async def apply(
        self,
        resource: Resource[T],
        document: Any,
        namespace: str = "",
        *,
        force: bool = False,
        subresource: str = "",
    ) -> T:
        """Server-side apply: we own what is in `document`, and what we left out since is removed.

        ConflictError when somebody else owns a field, unless `force`.
        """
        own_namespace, name, whole = requests.named(resource, document)
        path = resource.path(namespace or own_namespace, name, subresource)
        query = {"fieldManager": self._manager, "force": "true" if force else "false"}
        request = requests.write("PATCH", path, whole, requests.APPLY_PATCH, query)
        return await self._guarded(resource.type, request)

    async def delete(
        self,
        resource: Resource[Any],
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        resource_version: str = "",
        grace_s: int | None = None,
        propagation: str = "",
        dry_run: bool = False,
    ) -> None:
        """Delete it; ConflictError when it is not the object with `uid` and `resource_version` any more."""
        path = resource.path(namespace, name)
        await self._call(
            requests.deletion(
                path, uid, resource_version, grace_s=grace_s, propagation=propagation, dry_run=dry_run
            )
        )

    async def bind(
        self,
        namespace: str,
        name: str,
        node: str,
        *,
        uid: str = "",
        resource_version: str = "",
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Bind a pod to a node; `annotations` are set on the pod in the same step.

        AlreadyExistsError when it has a node already, ConflictError when it is another pod than `uid`, has
        changed since `resource_version` or is being deleted: they look alike on the wire but call for
        different reactions.
        """
        request = requests.binding(
            namespace, name, uid, node, resource_version=resource_version, annotations=annotations
        )
        try:
            await self._call(request)
        except ConflictError as error:
            if "already assigned" in error.status.message:
                raise AlreadyExistsError(str(error), error.status) from error
            raise

    # -- the wire -------------------------------------------------------------------------------------

    async def _call(self, request: ApiRequest) -> Any:
        query = request.query
        if request.method in ("POST", "PUT", "PATCH"):
            query = {"fieldManager": self._manager, **query}
        headers = {"Accept": requests.JSON, **request.headers}
        response = await self._transport.request(
            ApiRequest(request.method, request.path, query, headers, request.body)
        )
        requests.expect_object(response, request)
        return response

    async def _decoded(self, kind: type[T], request: ApiRequest) -> T:
        return requests.decode(kind, await self._call(request), request)

    async def _guarded(self, kind: type[T], request: ApiRequest) -> T:
        try:
            return await self._decoded(kind, request)
        except InvalidError as error:
            # of a patch with another uid kube-apiserver says that metadata.uid cannot be changed
            if error.status.names_field("metadata.uid"):
                raise ConflictError(str(error), error.status) from error
            raise


def _unchanged(item: T) -> T:
    return item
