"""A decision carried out: hold the cards, annotate the pod, bind it, and find out what came of it.

    assume ──► PATCH annotations ──► POST Binding ──► yes: held until the watch shows the pod bound
               no │    │ no answer        │ no, or no answer
                  ▼    └──────►──────┐    ▼
                forget                settle: read the pod until the API server's answer is known

A timeout is not a no. The PATCH is made on the version that was read and the Binding on the version that the
PATCH made, so that a request which was lost on its way and arrives later can do nothing any more once
the `Settler` has taken the annotations back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, KubeError, UnavailableError
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.decisions import Decisions
from gpuslice.apps.extender.settling import Settler
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.model import Placement, Pod, Refusal, Request

_log = logging.getLogger(__name__)

CONFLICTS = 4  # somebody else's change of the pod between our reading and writing: read again so often


class NotBoundError(Exception):
    """This bind came to nothing, for a reason that the pod's owner should read."""


class Binder:
    """Carries out bind calls; one at a time for each pod. `leading` is asked before each write.

    `written(uid)` waits until no nomination of a pod is on its way; `wrote` hears of our annotations: uid and
    the version that they made.
    """

    def __init__(
        self,
        client: KubeClient,
        decisions: Decisions,
        *,
        leading: Callable[[], bool] = lambda: True,
        written: Callable[[str], Awaitable[None]] | None = None,
        wrote: Callable[[str, str], None] = lambda *_: None,
        timeout_s: float = 4.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._decisions = decisions
        self._ledger = decisions.ledger
        self._leading = leading
        self._written = written
        self._wrote = wrote
        self._timeout_s = timeout_s
        self._now_ns = now_ns
        self._settler = Settler(client, decisions.ledger)
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by uid, with the node; "": settling

    async def bind(self, args: BindingArgs) -> str:
        """Bind the pod; the reason why not, "" when it is bound, however often it was asked for."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._joined(args)
        except TimeoutError:
            return (
                f"pod {args.pod_namespace}/{args.pod_name}: the API server has not said within "
                f"{self._timeout_s:g} s whether it is bound to {args.node}; ask again"
            )
        except NotBoundError as error:
            return str(error)
        return ""

    async def settle_waiting(self, since: set[str]) -> set[str]:
        """Ask about what was in doubt in an earlier round (`since`) and still is.

        Returns the uids that are in doubt now. Nothing is dropped without the API server's answer.
        """
        doubtful = self._in_doubt()
        for uid, (pod, node) in doubtful.items():
            if uid in since:
                await self._settle(pod, node)
        return set(doubtful)

    async def withdraw_unbound(self) -> None:
        """Take back what an earlier leader wrote on pods that it did not bind.

        Afterwards a Binding of its own that is still on its way meets another version and fails.
        """
        for pod in [pod for pod in self._ledger.pods.values() if pod.placement is not None and not pod.node]:
            await self._settle(pod, "")

    def _in_doubt(self) -> dict[str, tuple[Pod, str]]:
        """Placements that no watch has shown yet; for a leader also those of pods that hold nothing.

        Somebody began to bind these and ended: an earlier leader, whose request came late.
        """
        assumed = {
            allocation.pod.uid: (allocation.pod, allocation.node) for allocation in self._ledger.assumed()
        }
        if not self._leading():
            return assumed
        unbound = [pod for pod in self._ledger.pods.values() if pod.placement is not None and not pod.node]
        return assumed | {pod.uid: (pod, "") for pod in unbound if self._ledger.allocation(pod.uid) is None}

    async def _settle(self, pod: Pod, node: str) -> None:
        """Unless a bind of the pod is under way, and so that none begins meanwhile."""
        if pod.uid not in self._running:
            await self._run(pod.uid, "", self._settled(pod, node), f"settle {pod.key}")

    async def _settled(self, pod: Pod, node: str) -> None:
        await self._settler.settle(pod, node)

    # -- one pod -------------------------------------------------------------------------------------------

    async def _joined(self, args: BindingArgs) -> None:
        """Join a call for the same pod that is under way; it goes on when the caller has given up."""
        key = args.pod_uid or f"{args.pod_namespace}/{args.pod_name}"
        while (running := self._running.get(key)) is not None:
            node, task = running
            if node == args.node:
                return await asyncio.shield(task)
            await asyncio.wait([task])
        name = f"bind {args.pod_namespace}/{args.pod_name}"
        return await asyncio.shield(self._run(key, args.node, self._bind(args), name))

    def _run(self, key: str, node: str, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running[key] = (node, task)
        task.add_done_callback(lambda done: self._finished(key, done))
        return task

    def _finished(self, key: str, task: asyncio.Task[None]) -> None:
        del self._running[key]
        if not task.cancelled() and task.exception() is not None:
            _log.info("not bound", extra={"bind": task.get_name(), "reason": str(task.exception())})

    async def _bind(self, args: BindingArgs) -> None:
        self._expect_leading()
        pod = await self._find(args)
        try:
            await self._try_to_bind(args, pod)
        except NotBoundError:
            self._ledger.forget(pod.uid)  # surely not bound: what was in doubt has been settled
            raise

    async def _try_to_bind(self, args: BindingArgs, pod: Pod) -> None:
        for _ in range(CONFLICTS):
            if pod.node:
                return self._expect_node(pod, args.node)
            if (request := pod.request) is None:
                return await self._bind_plain(pod, args.node)
            placement = self._assume(pod, request, args.node)
            pod = await self._after_writing(pod)
            if await self._carry_out(pod, request, placement):
                return None
            pod = await self._read(args)
        raise NotBoundError(f"pod {pod.key} kept changing while it was bound; try again")

    async def _after_writing(self, pod: Pod) -> Pod:
        """The pod as it is once no nomination of it is on its way any more."""
        if self._written is not None:
            await self._written(pod.uid)
        known = self._ledger.pods.get(pod.uid, pod)
        return known if known.version > pod.version else pod

    def _assume(self, pod: Pod, request: Request, node: str) -> Placement:
        placement = self._decisions.assume(pod, request, node)
        if isinstance(placement, Refusal):
            raise NotBoundError(
                f"The node {node} can't place the pod {pod.name} in ns {pod.namespace}: {placement}"
            )
        return placement

    async def _carry_out(self, pod: Pod, request: Request, placement: Placement) -> bool:
        """Annotate and bind; False when the pod had changed and must be read again."""
        state = self._ledger.state(placement.node)
        if state is None:
            raise NotBoundError(f"node {placement.node} is gone")
        annotations = placement_annotations(placement, request, state.node, self._now_ns())
        self._expect_leading()
        if pod.placement is not None:  # nominated: who takes over finds these annotations as well as new ones
            return await self._post_binding(pod, str(pod.version), placement, annotations)
        try:
            patched = await self._annotate(pod, annotations)
        except ConflictError:
            return False
        except KubeError as error:
            if isinstance(error, UnavailableError) and error.outcome_unknown:
                await self._settler.settle(pod, placement.node, patch_on_its_way=True)
            raise self._as_reason(error, pod) from error
        version = patched.metadata.resource_version
        if pod.version:  # nobody else changed it in between
            self._wrote(pod.uid, version)
        return await self._post_binding(pod, version, placement, annotations)

    async def _annotate(self, pod: Pod, annotations: dict[str, str]) -> SlimPod:
        version = str(pod.version) if pod.version else ""
        patch = {"metadata": {"annotations": annotations}}
        return await self._client.merge_patch(
            SLIM_PODS, pod.name, patch, pod.namespace, uid=pod.uid, resource_version=version
        )

    async def _post_binding(
        self, pod: Pod, version: str, placement: Placement, annotations: dict[str, str]
    ) -> bool:
        """The Binding. Whatever is not a yes is settled by reading the pod."""
        try:
            self._expect_leading()
            await self._client.bind(
                pod.namespace,
                pod.name,
                placement.node,
                uid=pod.uid,
                resource_version=version,
                annotations=annotations,
            )
        except (KubeError, NotBoundError) as error:
            if await self._settler.settle(pod, placement.node):
                return True
            if isinstance(error, ConflictError):
                return False
            raise self._as_reason(error, pod) from error
        return True

    async def _bind_plain(self, pod: Pod, node: str) -> None:
        """A pod that asks for nothing of ours needs a binding all the same, if we are the binder."""
        if pod.problem:
            raise NotBoundError(f"pod {pod.key}: {pod.problem}")
        try:
            await self._client.bind(pod.namespace, pod.name, node, uid=pod.uid)
        except KubeError as error:
            raise self._as_reason(error, pod) from error

    # -- reading, checking ---------------------------------------------------------------------------------

    async def _find(self, args: BindingArgs) -> Pod:
        """The pod as the watch knows it, else as the API server does."""
        known = self._ledger.pod_named(args.pod_namespace, args.pod_name)
        if known is None or known.uid != args.pod_uid:
            return await self._read(args)
        allocation = self._ledger.allocation(known.uid)
        if allocation is None or allocation.planned or not allocation.assumed:
            return known
        return await self._read(args)  # bound by an earlier call; the watch is behind

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

    def _expect_node(self, pod: Pod, node: str) -> None:
        if pod.node != node:
            raise NotBoundError(f"pod {pod.key} is bound to {pod.node} already, not to {node}")

    def _expect_leading(self) -> None:
        if not self._leading():
            raise NotBoundError("this extender is not the leader; ask the one that is ready")

    def _as_reason(self, error: KubeError | NotBoundError, pod: Pod) -> NotBoundError:
        return error if isinstance(error, NotBoundError) else NotBoundError(f"pod {pod.key}: {error}")
