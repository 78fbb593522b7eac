"""Readiness, liveness and startup probes, as far as local processes can be probed: HTTP, TCP and exec.

All containers of the simulation listen on a loopback address, their pod's or the common one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from simcluster.cluster.amounts import Object
from simcluster.kubelet.runtime import Container, StartError, spawn

LOOPBACK = "127.0.0.1"
SHORTEST_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a container's spec with the API's defaults."""

    action: Mapping[str, Any]
    ports: Mapping[str, int]
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    successes: int = 1
    failures: int = 3

    async def ask(self, container: Container) -> str:
        """Empty if the container is healthy, otherwise the problem, in kubelet's words."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._ask(container)
        except TimeoutError:
            return "context deadline exceeded"
        except (OSError, aiohttp.ClientError, StartError) as error:
            return str(error)

    async def _ask(self, container: Container) -> str:
        if "httpGet" in self.action:
            own = container.spec.environ.get("SIMCLUSTER_POD_ADDRESS", "")
            try:  # the simulated programs listen here; any other program may listen on the loopback address
                return await self._http(self.action["httpGet"], own or LOOPBACK)
            except aiohttp.ClientConnectorError:
                return await self._http(self.action["httpGet"], LOOPBACK)
        if "tcpSocket" in self.action:
            _, writer = await asyncio.open_connection(LOOPBACK, self._port(self.action["tcpSocket"]["port"]))
            writer.close()
            return ""
        if "exec" in self.action:
            command = tuple(self.action["exec"]["command"])
            process = await spawn(container.spec, command)
            try:
                output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            return "" if process.returncode == 0 else output.decode(errors="replace").strip() or "exit status"
        return ""

    async def _http(self, action: Mapping[str, Any], host: str) -> str:
        scheme = str(action.get("scheme", "HTTP")).lower()
        url = f"{scheme}://{host}:{self._port(action['port'])}/{str(action.get('path', '/')).lstrip('/')}"
        headers = {one["name"]: one["value"] for one in action.get("httpHeaders") or ()}
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers=headers, ssl=False, allow_redirects=False) as answer,
        ):
            return "" if 200 <= answer.status < 400 else f"HTTP probe failed with statuscode: {answer.status}"

    def _port(self, port: int | str) -> int:
        return self.ports[port] if isinstance(port, str) and port in self.ports else int(port)


def probe_of(container: Object, kind: str, speed_up: float = 1.0) -> Probe | None:
    """The probe under `kind` ("readinessProbe", …); sped up, it probes that much more often."""
    spec = container.get(kind)
    if not spec:
        return None
    ports = {one["name"]: one["containerPort"] for one in container.get("ports") or () if one.get("name")}
    return Probe(
        action=spec,
        ports=ports,
        initial_delay_s=spec.get("initialDelaySeconds", 0) / speed_up,
        period_s=max(SHORTEST_PERIOD_S, spec.get("periodSeconds", 10) / speed_up),
        timeout_s=spec.get("timeoutSeconds", 1),
        successes=spec.get("successThreshold", 1),
        failures=spec.get("failureThreshold", 3),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a probe after enough equal answers; `reason` is the text of the last failure."""

    well: bool
    reason: str = ""


async def verdicts(probe: Probe, container: Container) -> AsyncIterator[Verdict]:
    """A verdict whenever enough consecutive answers agree, until the container ends."""
    await asyncio.sleep(probe.initial_delay_s)
    row, last = 0, ""
    while container.running:
        reason = await probe.ask(container)
        row = row + 1 if row and bool(last) == bool(reason) else 1
        last = reason
        if row >= (probe.failures if reason else probe.successes):
            yield Verdict(not reason, reason)
        await asyncio.sleep(probe.period_s)
