"""The life cycle of one container of a pod: pull, prepare, start, wait, back off, restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from gpuslice.core.model import ContainerKind
from simcluster.kubelet import references
from simcluster.kubelet.backoff import BackOff, shown
from simcluster.kubelet.devices import AdmissionError
from simcluster.kubelet.environment import ConfigError
from simcluster.kubelet.node_services import NodeServices, device_options
from simcluster.kubelet.plugin_calls import PluginError
from simcluster.kubelet.prober import Prober
from simcluster.kubelet.records import ContainerRecord, RunningState, TerminatedState, WaitingState
from simcluster.kubelet.runtime import Container, StartError
from simcluster.kubelet.specification import PodFacts, specify
from simcluster.workload.images import Image, PullError

RETRY_S = 10.0  # how soon a container that cannot be configured is tried again
START_ERROR_EXIT = 128
DEFAULT_GRACE_S = 30


class ContainerLife:
    """Runs one container as long as it is needed; calls `changed` whenever its record has changed."""

    def __init__(
        self,
        node: NodeServices,
        facts: PodFacts,
        spec: Mapping[str, Any],
        record: ContainerRecord,
        changed: Callable[[], None],
    ) -> None:
        self.record = record
        self.running = asyncio.Event()
        self._node = node
        self._facts = facts
        self._spec = spec
        self._changed = changed
        self._crashes = BackOff()
        self._image_failures = BackOff()
        self._attempt = record.restart_count

    async def run(self) -> None:
        """Returns when it has ended and is not to be restarted. If cancelled, the process lives on."""
        # A container that an earlier kubelet started
        container = self._node.runtime.find(self._facts.uid, self.record.name)
        if container is not None:
            self._attempt = container.spec.attempt
        while True:
            if container is None:
                container = await self._start()
            if container is not None:
                self.record.restart_count = self._attempt  # `kubectl logs --previous` uses both
                self.record.container_id = f"sim://{container.id}"
                prober = self._prober(container)
                self._set(RunningState(container.started_at))
                self.running.set()
                probing = asyncio.create_task(prober.run(), name=f"probes of {self.record.name}")
                try:
                    await container.exited.wait()
                finally:
                    probing.cancel()
                    await asyncio.gather(probing, return_exceptions=True)
                self._ended(container)
            if not self._starts_again():
                return
            await self._back_off()
            container = None

    def settle(self) -> None:
        """Record how the container ended if it was stopped from outside."""
        container = self._node.runtime.find(self._facts.uid, self.record.name)
        if container is not None and not container.running and isinstance(self.record.state, RunningState):
            self._ended(container)

    # -- starting --------------------------------------------------------------------------------

    async def _start(self) -> Container | None:
        """Try until it starts; None if it was created but its program cannot be started."""
        image = await self._pull()
        while True:
            try:
                # everything that can fail before the process exists. Raises what `_start` waits for.
                facts, node = self._facts, self._node
                # preStartContainer for each resource, after a second Allocate where nothing is known any more
                name, device_manager = self.record.name, self._node.device_manager
                if not device_manager.assignments_of(self._facts.uid, name):
                    await self._facts.allocate(name)
                for one in device_manager.assignments_of(self._facts.uid, name):
                    await self._node.endpoints.pre_start(one.resource, sorted(one.ids))
                assigned = node.device_manager.assignments_of(facts.uid, self.record.name)
                options = device_options(assigned, node.settings.cdi_folder)
                options |= node.claims.options(facts.pod, self._spec)
                read = await references.fetch(node.client, facts.pod)
                spec = specify(
                    node.settings, facts, self._spec, image, options=options, read=read, attempt=self._attempt
                )
                break
            except (ConfigError, PluginError, AdmissionError) as error:
                self._set(WaitingState("CreateContainerConfigError", str(error)))
                await self._tell("Failed", f"Error: {error}", True)
                await self._pause(RETRY_S)
        await self._tell("Created", "Container created")
        try:
            container = await self._node.runtime.start(spec)
        except StartError as error:
            now = datetime.now(UTC)
            await self._tell("Failed", f"Error: {error}", True)
            self.record.restart_count = self._attempt
            self._set(TerminatedState(START_ERROR_EXIT, now, now, reason="StartError", message=str(error)))
            return None
        await self._tell("Started", "Container started")
        return container

    async def _pull(self) -> Image:
        """The image; retried with growing pauses until it can be pulled."""
        reference = self.record.image
        while True:
            began = time.monotonic()
            if not self._is_present(reference):
                await self._tell("Pulling", f'Pulling image "{reference}"')
            try:
                image = self._node.registry.pull(reference)
            except PullError as error:
                self._set(WaitingState("ErrImagePull", str(error)))
                await self._tell("Failed", f'Failed to pull image "{reference}": {error}', True)
                await self._tell("Failed", "Error: ErrImagePull", True)
                self._image_failures.after_failure()
                await self._pause(1.0)
                words = f'Back-off pulling image "{reference}"'
                self._set(WaitingState("ImagePullBackOff", f"{words}: ErrImagePull: {error}"))
                await self._tell("BackOff", words)
                await self._tell("Failed", "Error: ImagePullBackOff", True)
                await self._pause(self._image_failures.delay_s)
                continue
            if self._is_present(reference):
                pulled_words = (
                    f'Container image "{reference}" already present on machine and can be accessed by the pod'
                )
            else:
                self._node.pulled.add(reference)
                took = f"{max(1, int((time.monotonic() - began) * 1000))}ms"
                pulled_words = (
                    f'Successfully pulled image "{reference}" in {took} ({took} including waiting).'
                )
            await self._tell("Pulled", pulled_words)
            return image

    def _is_present(self, reference: str) -> bool:
        return reference in self._node.pulled and self._spec.get("imagePullPolicy") != "Always"

    # -- ending ----------------------------------------------------------------------------------

    def _prober(self, container: Container) -> Prober:
        settings, pod = self._node.settings, self._facts.pod
        return Prober(
            container=container,
            spec=self._spec,
            record=self.record,
            grace_s=pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S),
            speed_up=settings.speed_up,
            stop=self._node.runtime.stop,
            changed=self._changed,
            tell=self._tell,
        )

    def _ended(self, container: Container) -> None:
        assert container.exit_code is not None
        assert container.finished_at is not None
        self._set(
            TerminatedState(
                container.exit_code, container.started_at, container.finished_at, self.record.container_id
            )
        )

    def _starts_again(self) -> bool:
        state = self.record.state
        assert isinstance(state, TerminatedState)
        if self.record.kind is ContainerKind.SIDECAR:
            return True
        if self.record.kind is ContainerKind.INIT and state.exit_code == 0:
            return False
        policy = self._facts.restart_policy
        if policy == "Always":
            return True
        return policy == "OnFailure" and state.exit_code != 0

    async def _back_off(self) -> None:
        """The first restart is immediate; later ones show CrashLoopBackOff until they are due."""
        state = self.record.state
        assert isinstance(state, TerminatedState)
        self.record.last = state
        ran_s = (state.finished_at - state.started_at).total_seconds()
        wait_s = self._crashes.after_failure(ran_s)
        if wait_s:
            metadata = self._facts.pod["metadata"]
            pod = f"{metadata['name']}_{metadata['namespace']}({metadata['uid']})"
            words = f"back-off {shown(wait_s)} restarting failed container={self.record.name} pod={pod}"
            self._set(WaitingState("CrashLoopBackOff", words))
            event = f"Back-off restarting failed container {self.record.name} in pod {pod}"
            await self._tell("BackOff", event, True)
            await self._pause(wait_s)
        self._attempt += 1

    # -- small things ----------------------------------------------------------------------------

    def _set(self, state: WaitingState | RunningState | TerminatedState) -> None:
        self.record.state = state
        self._changed()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._node.settings.speed_up)

    async def _tell(self, reason: str, message: str, warning: bool = False) -> None:
        await self._node.event(self._facts.pod, reason, message, warning=warning, container=self.record.name)
