"""``gpuslice keep-off``: keeps a DaemonSet off the nodes that share their cards, or lets it back.

NVIDIA's device plugin, installed by its own chart, gives out whole cards wherever it runs. A node affinity
keeps it away from nodes whose label says that they share. What was there before is kept in an annotation, and
comes back as it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import ConflictError
from gpuslice.adapters.kube.resources import DICT, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.apps.agent.settings import KeepOffSettings
from gpuslice.core.contract import LABEL_SCHEDULE
from gpuslice.core.mode import SCHEDULES

_log = logging.getLogger(__name__)

DAEMON_SETS = Resource("apps/v1", "daemonsets", "DaemonSet", DICT)
BEFORE = "gpuslice.io/affinity-before"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
TRIES = 5

Json = Mapping[str, Any]


def kept_off(affinity: Json | None, label: str) -> dict[str, Any]:
    """The affinity with which a pod runs as before, except on nodes that share their cards."""
    found = dict(affinity or {})
    node = dict(found.get("nodeAffinity") or {})
    required = dict(node.get(REQUIRED) or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = []
    for term in terms:  # they are alternatives
        own = term.get("matchExpressions") or []
        missing = [each for each in _not_shared(label) if each not in own]
        required["nodeSelectorTerms"].append({**term, "matchExpressions": [*own, *missing]})
    return {**found, "nodeAffinity": {**node, REQUIRED: required}}


def _not_shared(label: str) -> Sequence[Json]:
    shared = sorted(SCHEDULES - {"default"})
    return (
        {"key": label, "operator": "NotIn", "values": ["true"]},
        {"key": LABEL_SCHEDULE, "operator": "NotIn", "values": shared},
    )


def let_back(affinity: Json | None, before: Json | None, label: str) -> Json | None:
    """The affinity as it was, where nobody has changed it since; else without the expressions of ours."""
    if affinity == kept_off(before, label):
        return before
    found = dict(affinity or {})
    node = dict(found.get("nodeAffinity") or {})
    required = dict(node.get(REQUIRED) or {})
    terms = [dict(term) for term in required.get("nodeSelectorTerms") or []]
    for term in terms:
        expressions = [each for each in term.get("matchExpressions") or [] if each not in _not_shared(label)]
        term.pop("matchExpressions", None)
        if expressions:
            term["matchExpressions"] = expressions
    if not terms or not all(terms):  # a term of ours alone: any node would do
        node.pop(REQUIRED, None)
    else:
        node[REQUIRED] = {**required, "nodeSelectorTerms": terms}
    found.pop("nodeAffinity", None)
    if node:
        found["nodeAffinity"] = node
    return found or None


async def keep_off(client: KubeClient, settings: KeepOffSettings) -> str:
    """Change the DaemonSet, unless it is so already; answers what was done. Raises `KubeError`."""
    namespace, _, name = settings.daemon_set.partition("/")
    found = await client.get(DAEMON_SETS, name, namespace)
    meta, spec = found["metadata"], found["spec"]["template"]["spec"]
    note = (meta.get("annotations") or {}).get(BEFORE)
    now = spec.get("affinity")
    if settings.back:
        if note is None:
            return f"DaemonSet {settings.daemon_set} was not kept off any node."
        wanted, note = let_back(now, json.loads(note), settings.node_label), None
    else:
        wanted = kept_off(now, settings.node_label)
        if wanted == now:
            return f"DaemonSet {settings.daemon_set} is kept off nodes that share their cards already."
        note = json.dumps(now) if note is None else note
    patch = {
        "metadata": {"resourceVersion": meta["resourceVersion"], "annotations": {BEFORE: note}},
        "spec": {"template": {"spec": {"affinity": _difference(now, wanted)}}},
    }
    await client.merge_patch(DAEMON_SETS, name, patch, namespace)
    if settings.back:
        return f"DaemonSet {settings.daemon_set} may run on every node again as before."
    return f"DaemonSet {settings.daemon_set} is kept off nodes that share their cards from now on."


def _difference(now: Any, wanted: Any) -> Any:
    """The merge patch from one to the other: what is gone must be said."""
    if not isinstance(now, Mapping) or not isinstance(wanted, Mapping):
        return wanted
    gone = {key: None for key in now if key not in wanted}
    return gone | {key: _difference(now.get(key), value) for key, value in wanted.items()}


def start(settings: KeepOffSettings) -> None:
    """The whole command."""

    async def main() -> None:
        async with HttpTransport(connect(os.environ, kubeconfig=settings.kubeconfig)) as transport:
            client = KubeClient(transport, manager="gpuslice-keep-off")
            for left in reversed(range(TRIES)):
                try:
                    _log.info(await keep_off(client, settings))
                    return
                except ConflictError:  # somebody changed it meanwhile: look again
                    if not left:
                        raise

    configure_logs("info")
    asyncio.run(main())
