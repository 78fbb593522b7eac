"""A cluster that grants service accounts what the chart's roles say and no more, and remembers what was used.

Who asks is told by ``Impersonate-User``, as an administrator may; whoever shows none is one, and may do all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request, Response, json_response
from simcluster.cluster.writes import Steps
from tests.chart import CHART, NAMED, documents, printed
from tests.tools import find

IMPERSONATE = "Impersonate-User"
RELEASE_NAMESPACE = "kube-system"
WRITES = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Grant(NamedTuple):
    """One verb on one resource. `namespace`: "" for all. `name`: of the one object, "" for any."""

    group: str
    resource: str
    verb: str
    namespace: str = ""
    name: str = ""

    def allows(self, asked: Grant) -> bool:
        """Whether a request is for this. Nobody names the object that he makes."""
        return (
            all(has in ("*", wants) for has, wants in zip(self[:3], asked[:3], strict=True))
            and self.namespace in {"", asked.namespace}
            and self.name in {"", asked.name}
        )


def asked(request: Request) -> Grant | None:
    """What the API server's authorizer sees of a request; None where it is for no resource."""
    parts = request.path.strip("/").split("/")
    if parts[0] not in {"api", "apis"} or len(parts) < (3 if parts[0] == "api" else 4):
        return None
    group, parts = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else ""
    parts = parts[2:] if namespace else parts
    name = parts[1] if len(parts) > 1 else ""
    reads = "get" if name else "watch" if request.flag("watch") else "list"
    return Grant(group, "/".join(parts[::2]), WRITES.get(request.method, reads), namespace, name)


def rendered(*values: str, version: str = "1.36.0") -> list[dict[str, Any]]:
    """The chart's objects as they are in a cluster of a version, or of today."""
    command = [str(find("helm")), "template", "x", str(CHART), f"--kube-version={version}", *NAMED]
    command += [f"--namespace={RELEASE_NAMESPACE}", *(f"--set={each}" for each in values)]
    return documents(printed(*command))


def grants_of(objects: Iterable[dict[str, Any]]) -> dict[str, set[Grant]]:
    """By service account, what the roles that are bound to it say."""
    roles: dict[tuple[str, str, str], Any] = {}
    found: defaultdict[str, set[Grant]] = defaultdict(set)
    bindings = []
    for each in objects:
        place = each["kind"].removesuffix("Binding"), each["metadata"].get("namespace", "")
        if "roleRef" in each:
            bindings.append((*place, each))
        elif each["kind"].endswith("Role"):
            roles[(*place, each["metadata"]["name"])] = each["rules"]
    for kind, namespace, binding in bindings:
        rules = roles.get(
            (kind, namespace, binding["roleRef"]["name"]), ()
        )  # others' roles are not ours to judge
        for subject in binding["subjects"]:
            found[subject["name"]] |= {grant for rule in rules for grant in _grants(rule, namespace)}
    return dict(found)


def _grants(rule: Mapping[str, Any], namespace: str) -> Iterator[Grant]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                for name in rule.get("resourceNames", [""]):
                    yield Grant(group, resource, verb, namespace, name)


REVIEW = Grant("authorization.k8s.io", "subjectaccessreviews", "create")


class GuardedCluster(Cluster):
    """`used` and `refused` are what each account asked for."""

    def __init__(self, grants: Mapping[str, set[Grant]]) -> None:
        super().__init__()
        self.used: defaultdict[str, set[Grant]] = defaultdict(set)
        self.refused: defaultdict[str, set[Grant]] = defaultdict(set)
        self._grants = grants

    def steps(self, request: Request) -> Steps:
        account = request.headers.get(IMPERSONATE.lower(), "")
        wanted = asked(request) if account else None
        if wanted is not None:
            allowing = [each for each in sorted(self._grants[account]) if each.allows(wanted)]
            if not allowing:
                self.refused[account].add(wanted)
                yield from ()
                return _forbidden(account, wanted)
            self.used[account].add(allowing[0])  # the widest: another one would be needless
        answer: Response = yield from super().steps(request)
        return self._reviewed(answer) if asked(request) == REVIEW else answer

    def _reviewed(self, answer: Response) -> Response:
        """An access review of an account or of nobody, by what the roles say."""
        review = msgspec.json.decode(answer.body)
        *_, namespace, account = review["spec"]["user"].split(":")
        ours = namespace == RELEASE_NAMESPACE or account == "nobody"
        if ours and (wanted := review["spec"].get("resourceAttributes")):
            resource = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
            namespace, name = wanted.get("namespace", ""), wanted.get("name", "")
            right = Grant(wanted.get("group", ""), resource, wanted["verb"], namespace, name)
            allowed = any(each.allows(right) for each in self._grants.get(account, ()))
            review["status"] = {"allowed": allowed}
        return json_response(review, answer.status)


def _forbidden(account: str, wanted: Grant) -> Response:
    message = f"{account} cannot {wanted.verb} {wanted.resource} {wanted.namespace}/{wanted.name}"
    body = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": message, "code": 403}
    return json_response(msgspec.to_builtins(body), 403)
