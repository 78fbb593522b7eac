"""Carries out a decision: holds the cards, binds the pod with its annotations, and learns the outcome.

    assume ──► the lease is still ours ──► POST Binding ──► yes: held until the watch shows the pod bound
                                                │ no ──► forget
                                                │ no answer ──► resolve: read the pod until it is known

A timeout is not a refusal. A Binding is conditional on the known version of its pod, so that a delayed one
has no effect once the `BindResolver` has changed the version. A new leader does that with all waiting pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.leadership import BindFence
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.pod_records import PodTraces
from gpuslice.apps.extender.subscriber import Shortcuts
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import ANN_ASSUME_TIME, EITHER_MEMORY
from gpuslice.core.hold import HoldKind
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.views import names_our_resources

_log = logging.getLogger(__name__)

CONFLICTS = 4  # how often to read the pod again after a change by somebody else
RESOLVING = ""  # instead of a node, if the pod is not being bound but resolved
# How many binds may be in progress before filter waits, since kube-scheduler decides faster than an API
# server writes: as many as ended in the last second, so that none takes much longer than that
LEAST_AT_ONCE, MOST_AT_ONCE = 16, 64
LONGEST_PAUSE_S = 2.0  # of filter, well below kube-scheduler's httpTimeout
READ_EARLY_S = 1.0


class NotBoundError(Exception):
    """This bind failed, for a reason that the pod's owner should read."""


class Binder:
    """Carries out binds, one at a time for each pod. `client` writes only as leader."""

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        shortcuts: Shortcuts,
        fence: BindFence,
        resolver: BindResolver,
        *,
        traces: PodTraces,
        timeout_s: float = 4.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._placer = placer
        self._ledger = placer.ledger
        self._shortcuts = shortcuts
        self._fence = fence
        self._resolver = resolver
        self._traces = traces
        self._timeout_s = timeout_s
        self._now_ns = now_ns
        self._running: dict[str, tuple[str, asyncio.Task[Any]]] = {}  # by uid, with the node
        self._finished = asyncio.Event()  # set whenever one of them ends
        self._finished_s: deque[float] = deque(maxlen=MOST_AT_ONCE)  # when the last of them ended

    async def bind(self, args: BindingArgs) -> str:
        """Bind the pod; returns why not, or "" when it is bound. May be repeated."""
        key = args.pod_uid or f"{args.pod_namespace}/{args.pod_name}"
        try:
            async with asyncio.timeout(self._timeout_s):
                while (running := self._running.get(key)) is not None and running[0] != args.node:
                    await asyncio.wait([running[1]])
                # join a running call for the same node; it continues if the caller has given up
                name = f"bind {args.pod_namespace}/{args.pod_name}"
                task = running[1] if running else self._run(key, args.node, self._bind(args), name)
                await asyncio.shield(task)
        except TimeoutError:
            return (
                f"pod {args.pod_namespace}/{args.pod_name}: the API server has not said within "
                f"{self._timeout_s:g} s whether it is bound to {args.node}; ask again"
            )
        except NotBoundError as error:
            return str(error)
        return ""

    async def read_early(self, namespace: str, name: str, uid: str) -> bool:
        """Make the ledger know a pod that no watch has shown yet; False if that takes too long."""
        with contextlib.suppress(NotBoundError, TimeoutError):
            async with asyncio.timeout(READ_EARLY_S):
                await self._read(BindingArgs(name, namespace, uid))
        return uid in self._ledger.pods

    def backpressure(self) -> Awaitable[None] | None:
        """What filter waits for before kube-scheduler may go on: that few binds are in progress again.

        Otherwise binds would pile up with the length of the queue, each waiting until it times out. None if
        they are few already.
        """
        if len(self._running) < self._allowed():
            return None

        async def binds_finished() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PAUSE_S):
                    while len(self._running) >= self._allowed():
                        self._finished.clear()
                        await self._finished.wait()

        return binds_finished()

    def _allowed(self) -> int:
        """How many binds may be in progress before filter waits."""
        now = asyncio.get_running_loop().time()
        while self._finished_s and self._finished_s[0] < now - 1.0:
            self._finished_s.popleft()
        return max(LEAST_AT_ONCE, len(self._finished_s))

    async def resolve_waiting(self, since: set[str]) -> set[str]:
        """Ask about placements that no watch has shown since an earlier round (`since`).

        Returns the uids that are in doubt now. Nothing is dropped without the API server's answer.
        """
        doubtful = {each.pod.uid: each for each in self._ledger.assumed()}
        async with asyncio.TaskGroup() as tasks:
            for uid in doubtful.keys() & since:
                tasks.create_task(self._resolve(doubtful[uid].pod, doubtful[uid].node))
        return set(doubtful)

    async def fence(self) -> None:
        """Ensure that no Binding which an earlier leader sent can take effect any more."""
        pods = self._ledger.pods.values()  # no Binding was sent for a pod that still has gates
        waiting = iter([pod for pod in pods if not pod.node and not pod.gates and pod.request is not None])

        async def work() -> None:
            for pod in waiting:
                await self._resolve(pod, "")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(MOST_AT_ONCE):
                tasks.create_task(work())

    async def _resolve(self, pod: Pod, node: str) -> None:
        """Resolve the pod unless a bind of it is running; none can begin meanwhile."""
        if pod.uid not in self._running:
            work = self._resolver.resolve(pod, node)
            await self._run(pod.uid, RESOLVING, work, f"resolve {pod.key}")

    def _run(self, key: str, node: str, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        def finished(task: asyncio.Task[Any]) -> None:
            del self._running[key]
            self._finished.set()
            self._finished_s.append(asyncio.get_running_loop().time())
            if not task.cancelled() and task.exception() is not None:
                _log.info("not bound", extra={"bind": task.get_name(), "reason": str(task.exception())})

        task = asyncio.create_task(work, name=name)
        self._running[key] = (node, task)
        task.add_done_callback(finished)
        return task

    # -- one pod -------------------------------------------------------------------------------------------

    async def _bind(self, args: BindingArgs) -> None:
        # the pod as the watch shows it, otherwise as the API server does
        pod = self._ledger.pod_named(args.pod_namespace, args.pod_name)
        held = self._ledger.holds.of(pod.uid) if pod is not None else None
        behind = held is not None and held.kind is HoldKind.ASSUMED  # an earlier call has bound it
        if pod is None or pod.uid != args.pod_uid or behind:
            pod = await self._read(args)
        try:
            for _ in range(CONFLICTS):
                if pod.node == args.node:
                    return
                if pod.node:
                    raise NotBoundError(f"pod {pod.key} is bound to {pod.node} already, not to {args.node}")
                if (request := pod.request) is None:
                    if pod.problem:
                        raise NotBoundError(f"pod {pod.key}: {pod.problem}")
                    await self._bind_without_cards(args)
                    return
                placement = self._placer.assume(pod, request, args.node)
                if isinstance(placement, Refusal):
                    who = f"the pod {pod.name} in ns {pod.namespace}"
                    raise NotBoundError(f"The node {args.node} can't place {who}: {placement}")
                await self._shortcuts.written(pod.uid)
                known = self._ledger.pods.get(pod.uid, pod)
                pod = known if known.version > pod.version else pod
                await self._fence.passed(pod)
                if await self._write(pod, request, placement):
                    return
                try:
                    pod = await self._read(args)
                except NotBoundError:  # the conflict may be with our own Binding, if it arrived twice
                    if await self._resolver.resolve(pod, args.node):
                        return
                    raise
            raise NotBoundError(f"pod {pod.key} kept changing while it was bound; try again")
        except NotBoundError:
            self._ledger.forget(pod.uid)  # certainly not bound: any doubt has been resolved
            raise

    async def _bind_without_cards(self, args: BindingArgs) -> None:
        """Bind a pod whose limits name our resource with zero, which kube-scheduler leaves to us as well."""
        try:
            seen: SlimPod = await self._client.get(SLIM_PODS, args.pod_name, args.pod_namespace)
            if not names_our_resources(seen.spec):
                why = f"it asks for no {EITHER_MEMORY}; kube-scheduler binds what managedResources omits"
                raise NotBoundError(f"pod {args.pod_namespace}/{args.pod_name}: {why}")
            await self._client.bind(args.pod_namespace, args.pod_name, args.node, uid=args.pod_uid)
        except KubeError as error:  # if it was bound nevertheless, the next call finds out
            raise NotBoundError(f"pod {args.pod_namespace}/{args.pod_name}: {error}") from error

    async def _write(self, pod: Pod, request: Request, placement: Placement) -> bool:
        """Bind; False if the pod has changed and must be read again."""
        state = self._ledger.state(placement.node)
        if state is None:
            raise NotBoundError(f"node {placement.node} is gone")
        annotations = placement_annotations(placement, request, state.node, self._now_ns())
        annotations |= self._traces.annotations(pod.uid)
        version = pod.resource_version
        try:
            stale = [name for name in pod.stale if name not in annotations]
            if stale or not version:  # a Binding cannot remove annotations, and needs a version
                patch = {"metadata": {"annotations": dict.fromkeys(stale)}}
                patched = await self._client.merge_patch(
                    SLIM_PODS, pod.name, patch, pod.namespace, uid=pod.uid, resource_version=version
                )
                version = patched.metadata.resource_version
            await self._client.bind(
                pod.namespace,
                pod.name,
                placement.node,
                uid=pod.uid,
                resource_version=version,
                annotations=annotations,
            )
        except (ConflictError, AlreadyExistsError):
            return False
        except KubeError as error:
            unknown = isinstance(error, UnavailableError) and error.outcome_unknown
            if unknown and await self._resolver.resolve(pod, placement.node):
                return True
            raise NotBoundError(f"pod {pod.key}: {error}") from error
        return True

    async def _read(self, args: BindingArgs) -> Pod:
        try:
            seen: SlimPod = await self._client.get(SLIM_PODS, args.pod_name, args.pod_namespace)
        except KubeError as error:
            raise NotBoundError(f"pod {args.pod_namespace}/{args.pod_name}: {error}") from error
        pod = pod_view(seen)
        if args.pod_uid and pod.uid != args.pod_uid:
            raise NotBoundError(
                f"The pod {pod.name} in ns {pod.namespace}'s uid is {pod.uid}, "
                f"and it's not equal with expected {args.pod_uid}"
            )
        self._ledger.apply_pod(pod)
        return pod


RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONGEST_REQUEST_S = 60.0
"""After this time an API server gives up a request (its ``--request-timeout``)."""


class BindResolver:
    """Finds out whether a pod was bound after an unclear answer, and updates the ledger.

    A Binding is conditional on its pod's version. If the pod is not bound, its version is changed, so that a
    Binding sent earlier has no effect. Where an admission policy refuses every change of the pod, we wait
    until no request can arrive any more: one such pod must not keep a new leader from ever answering.
    """

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        *,
        clock: Callable[[], float] = loop_time,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._clock = clock
        self._now_ns = now_ns
        self._sleep = sleep

    async def resolve(self, pod: Pod, node: str) -> bool:
        """Read the pod until it is known whether it is bound to `node`; if not, it cannot be later."""
        began_s, attempt = self._clock(), 0
        while True:
            delay_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
            attempt += 1
            try:
                may_arrive = self._clock() < began_s + LONGEST_REQUEST_S
                return await self._resolve_once(pod, node, as_known=attempt == 1, may_arrive=may_arrive)
            except ConflictError:  # the pod changed between reading and writing: read it again
                _log.debug("pod changed while it was read", extra={"pod": pod.key, "retry_in_s": delay_s})
            except KubeError as error:
                _log.warning(
                    "bind not resolved yet",
                    extra={"pod": pod.key, "node": node, "error": str(error), "retry_in_s": delay_s},
                )
            await self._sleep(delay_s)

    async def _resolve_once(self, pod: Pod, node: str, *, as_known: bool, may_arrive: bool) -> bool:
        """`as_known`: the pod need not be read if it is unchanged; `may_arrive`: an earlier Binding may."""
        seen: SlimPod | None = None
        try:
            if as_known and pod.resource_version:
                with contextlib.suppress(ConflictError):
                    seen = await self._made_anew(pod, pod.resource_version)
            if seen is None:
                seen = read = await self._client.get(SLIM_PODS, pod.name, pod.namespace)
                if read.metadata.uid == pod.uid and not read.spec.node_name:
                    try:
                        seen = await self._made_anew(pod, read.metadata.resource_version)
                    except (ConflictError, NotFoundError):
                        raise
                    except KubeError as error:
                        if may_arrive:
                            raise
                        about = {"pod": pod.key, "error": str(error)}
                        _log.error("pod cannot be changed; taken for not bound", extra=about)
        except NotFoundError:
            seen = None
        if seen is None or seen.metadata.uid != pod.uid:
            self._ledger.remove_pod(pod.uid)
            return False
        self._ledger.apply_pod(pod_view(seen))
        if not seen.spec.node_name:
            self._ledger.forget(pod.uid)
        return seen.spec.node_name == node

    async def _made_anew(self, pod: Pod, version: str) -> SlimPod:
        """Another version of the pod instead of this one."""
        # any change makes a new version; this one is overwritten when the pod is bound
        patch = {"metadata": {"annotations": {ANN_ASSUME_TIME: str(self._now_ns())}}}
        return await self._client.merge_patch(
            SLIM_PODS, pod.name, patch, pod.namespace, uid=pod.uid, resource_version=version
        )
