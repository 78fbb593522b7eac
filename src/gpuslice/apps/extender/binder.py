"""A decision carried out: hold the cards, annotate the pod, bind it, and find out what came of it.

    assume ──► PATCH annotations ──► POST Binding ──► yes: held until the watch shows the pod bound
               no │    │ no answer        │ no, or no answer
                  ▼    └──────►──────┐    ▼
                forget               resolve: read the pod until the API server's answer is known

A timeout is not a no. The PATCH is made on the version that was read and the Binding on the version that the
PATCH made, so that a request which was lost on its way and arrives later can do nothing any more once
the `BindResolver` has taken the annotations back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, KubeError, UnavailableError
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.bind_resolver import BindResolver
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.apps.extender.nomination.nominator import Nominator
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.world import World
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS, placement_annotations
from gpuslice.core.contract import GPU_MEM
from gpuslice.core.model import Placement, Pod, Refusal, Request

_log = logging.getLogger(__name__)

CONFLICTS = 4  # somebody else's change of the pod between our reading and writing: read again so often
RESOLVING = ""  # in place of the node, where a pod is not being bound but asked about


class NotBoundError(Exception):
    """This bind came to nothing, for a reason that the pod's owner should read."""


class Binder:
    """Carries out bind calls, for the leader alone; one at a time for each pod."""

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        nominator: Nominator,
        world: World,
        leadership: Leadership,
        *,
        timeout_s: float = 4.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._placer = placer
        self._ledger = placer.ledger
        self._nominator = nominator
        self._world = world
        self._leadership = leadership
        self._timeout_s = timeout_s
        self._now_ns = now_ns
        self._resolver = BindResolver(client, placer.ledger)
        self._running: dict[str, tuple[str, asyncio.Task[Any]]] = {}  # by uid, with the node

    async def bind(self, args: BindingArgs) -> str:
        """Bind the pod; the reason why not, "" when it is bound, however often it was asked for."""
        key = args.pod_uid or f"{args.pod_namespace}/{args.pod_name}"
        try:
            async with asyncio.timeout(self._timeout_s):
                while (running := self._running.get(key)) is not None and running[0] != args.node:
                    await asyncio.wait([running[1]])
                # join a call for the same that is under way; it goes on when the caller has given up
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

    async def resolve_waiting(self, since: set[str]) -> set[str]:
        """Ask about what was in doubt in an earlier round (`since`) and still is.

        Returns the uids that are in doubt now. Nothing is dropped without the API server's answer. In doubt
        are placements that no watch has shown yet; for a leader also those of pods that hold nothing:
        somebody began to bind these and ended, an earlier leader, whose request came late.
        """
        doubtful = {each.pod.uid: (each.pod, each.node) for each in self._ledger.assumed()}
        if self._leadership.may_bind:
            for pod in self._unbound():
                if self._ledger.allocation(pod.uid) is None:
                    doubtful[pod.uid] = (pod, "")
        for uid, (pod, node) in doubtful.items():
            if uid in since:
                await self._resolve(pod, node)
        return set(doubtful)

    async def withdraw_unbound(self) -> None:
        """Take back what an earlier leader wrote on pods that it did not bind.

        Afterwards a Binding of its own that is still on its way meets another version and fails.
        """
        for pod in self._unbound():
            await self._resolve(pod, "")

    def _unbound(self) -> list[Pod]:
        """Pods that are placed by their annotations, and on no node."""
        return [pod for pod in self._ledger.pods.values() if pod.placement is not None and not pod.node]

    async def _resolve(self, pod: Pod, node: str) -> None:
        """Unless a bind of the pod is under way, and so that none begins meanwhile."""
        if pod.uid not in self._running:
            work = self._resolver.resolve(pod, node)
            await self._run(pod.uid, RESOLVING, work, f"resolve {pod.key}")

    def _run(self, key: str, node: str, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        def finished(task: asyncio.Task[Any]) -> None:
            del self._running[key]
            if not task.cancelled() and task.exception() is not None:
                _log.info("not bound", extra={"bind": task.get_name(), "reason": str(task.exception())})

        task = asyncio.create_task(work, name=name)
        self._running[key] = (node, task)
        task.add_done_callback(finished)
        return task

    # -- one pod -------------------------------------------------------------------------------------------

    async def _bind(self, args: BindingArgs) -> None:
        self._expect_leading()
        # the pod as the watch knows it, else as the API server does
        pod = self._ledger.pod_named(args.pod_namespace, args.pod_name)
        held = self._ledger.allocation(pod.uid) if pod is not None else None
        behind = held is not None and held.assumed and not held.planned  # bound by an earlier call
        if pod is None or pod.uid != args.pod_uid or behind:
            pod = await self._read(args)
        try:
            for _ in range(CONFLICTS):
                if pod.node == args.node:
                    return
                if pod.node:
                    raise NotBoundError(f"pod {pod.key} is bound to {pod.node} already, not to {args.node}")
                if (request := pod.request) is None:
                    why = (
                        f"it asks for no {GPU_MEM}; kube-scheduler binds it where managedResources names that"
                    )
                    raise NotBoundError(f"pod {pod.key}: {pod.problem or why}")
                placement = self._placer.assume(pod, request, args.node)
                if isinstance(placement, Refusal):
                    who = f"the pod {pod.name} in ns {pod.namespace}"
                    raise NotBoundError(f"The node {args.node} can't place {who}: {placement}")
                await self._nominator.written(pod.uid)
                known = self._ledger.pods.get(pod.uid, pod)
                pod = known if known.version > pod.version else pod
                if await self._write(pod, request, placement):
                    return
                pod = await self._read(args)
            raise NotBoundError(f"pod {pod.key} kept changing while it was bound; try again")
        except NotBoundError:
            self._ledger.forget(pod.uid)  # surely not bound: what was in doubt has been resolved
            raise

    async def _write(self, pod: Pod, request: Request, placement: Placement) -> bool:
        """Annotate and bind; False when the pod had changed and must be read again."""
        state = self._ledger.state(placement.node)
        if state is None:
            raise NotBoundError(f"node {placement.node} is gone")
        annotations = placement_annotations(placement, request, state.node, self._now_ns())
        version = str(pod.version) if pod.version else ""
        self._expect_leading()
        if not self._nominator.wrote(pod):  # else who takes over finds those annotations as well as new ones
            try:
                patched = await self._client.merge_patch(
                    SLIM_PODS,
                    pod.name,
                    {"metadata": {"annotations": dict.fromkeys(PLACEMENT_ANNOTATIONS) | annotations}},
                    pod.namespace,
                    uid=pod.uid,
                    resource_version=version,
                )
            except ConflictError:
                return False
            except KubeError as error:
                if isinstance(error, UnavailableError) and error.outcome_unknown:
                    await self._resolver.resolve(pod, placement.node, patch_on_its_way=True)
                raise NotBoundError(f"pod {pod.key}: {error}") from error
            version = patched.metadata.resource_version
            if pod.version:  # nobody else changed it in between
                self._world.note_own_write(pod.uid, version)
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
        except (KubeError, NotBoundError) as error:  # whatever is not a yes is resolved by reading the pod
            if await self._resolver.resolve(pod, placement.node):
                return True
            if isinstance(error, ConflictError):
                return False
            if isinstance(error, NotBoundError):
                raise
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

    def _expect_leading(self) -> None:
        if not self._leadership.may_bind:
            raise NotBoundError("this extender is not the leader; ask the one that is ready")
