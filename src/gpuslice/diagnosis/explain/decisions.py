"""Who bound a pod, and why there: the extender's log line about it, read with the user's permissions.

The extender also keeps the last thousand of them behind ``/debug/decisions``, which is for operators; its log
is for anybody who may read logs in its namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.errors import printable
from gpuslice.core.words import counted

EXTENDERS = "app=gpushare,component=gpushare-schd-extender"
DECIDED = "bind decided"
LINES = 5000
"""Of each replica's log, the last ones."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to bind a pod. `passed`: nodes that filter left to choose from; `error`: why not."""

    time: str
    event: str
    uid: str
    node: str
    cards: Mapping[str, int] = msgspec.field(default_factory=dict)
    policy: str = ""
    passed: int = 0
    nominated: bool = False
    replica: str = ""
    seconds: float = 0.0
    error: str = ""


_DECODER = msgspec.json.Decoder(Decision)


async def read_decision(client: KubeClient, uid: str) -> Decision | None:
    """The last decision about this pod; None if there is none, or the log may not be read."""
    found: list[Decision] = []
    try:
        for pod in await client.all(PODS, labels=EXTENDERS):
            path = f"{PODS.path(pod.metadata.namespace)}/{pod.metadata.name}/log?tailLines={LINES}"
            found += decisions_in((await client.read(path)).splitlines(), uid)
    except KubeError:
        pass  # other replicas' logs are still useful
    return max(found, key=lambda each: each.time, default=None)


def decisions_in(lines: Iterable[bytes], uid: str) -> list[Decision]:
    """The decisions about a pod in a log's lines."""
    found = []
    wanted = uid.encode()
    for line in lines:
        if wanted not in line:
            continue
        try:
            decision = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue  # another line, or an incomplete one
        if decision.event == DECIDED and decision.uid == uid:
            found.append(decision)
    return found


def sentence_of(decision: Decision) -> str:
    """The decision in words."""
    by = f"by {printable(decision.replica) or 'the extender'}, after {decision.seconds:g} s"
    if decision.error:
        return f"The last bind, {printable(decision.time)} {by}, failed: {printable(decision.error)}"
    chosen = "nominated before" if decision.nominated else f"of {counted(decision.passed, 'node')} that fit"
    return f"Bound {printable(decision.time)} {by}: {chosen}, by policy {printable(decision.policy)}."
