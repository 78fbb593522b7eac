"""Reads what cards and containers use from the exporters, through the API server or by address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.web.scrape import Page, ScrapeError, fetch, parse
from gpuslice.core.hosts import bracketed
from gpuslice.diagnosis.usage import MOST_PROBLEMS, ClusterUsage, usage_of

EXPORTERS = "component=gpuslice-exporter"
PORT = 9400
AT_ONCE = 32
PAGE_TIMEOUT_S = 5.0
"""An exporter on a lost node is not waited for any longer, and delays no others."""
IN_VAIN_S = 5.0
"""After this much waiting in vain no further exporter is queried, so that everything ends one page later.

Time for successful pages does not count: a thousand of them may take longer, and are worth it.
"""
OURS = "gpuslice_"
Fetch = Callable[[Pod], Awaitable[Page]]


class UrlSource:
    """Exporters by their addresses; ``host:port`` means the page there."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = []
        for url in urls:
            scheme, _, place = url.rpartition("://")
            self._urls.append(f"{scheme or 'http'}://{place}{'' if '/' in place else '/metrics'}")

    async def read(self) -> ClusterUsage:
        pages, problems = [], []
        for url in self._urls:
            try:
                page = await asyncio.to_thread(fetch, url)
                if not any(one.name.startswith(OURS) for one in page.samples):
                    what = "no gpuslice exporter answers there, its page has no metric gpuslice_*"
                    raise ScrapeError(f"{url}: {what}")
                pages.append(page)
            except ScrapeError as error:
                problems.append(str(error))
        return usage_of(pages, problems)


class ClusterSource:
    """Every exporter pod of a cluster, through the API server: no direct route to the nodes is needed."""

    def __init__(self, client: KubeClient, in_vain_s: float = IN_VAIN_S) -> None:
        self._client = client
        self._exporters = Exporters(proxied(client), in_vain_s=in_vain_s)

    async def read(self) -> ClusterUsage:
        pods = await self._client.all(PODS, labels=EXPORTERS)
        if pods:
            return await self._exporters.read(pods)
        return ClusterUsage((), (), (f"no pod has the label {EXPORTERS}: is the exporter installed?",))


class Exporters:
    """Reads pages of exporters at the same time. Many that give none delay nobody: after `in_vain_s` of such
    waiting for each of those `at_once` no further one is queried, and they are queried last the next time.
    """

    def __init__(
        self,
        fetch_page: Fetch,
        at_once: int = AT_ONCE,
        page_timeout_s: float = PAGE_TIMEOUT_S,
        in_vain_s: float = IN_VAIN_S,
    ) -> None:
        self._fetch = fetch_page
        self._slots = asyncio.Semaphore(at_once)
        self._at_once = at_once
        self._page_timeout_s = page_timeout_s
        self._in_vain_s = in_vain_s
        self._silent: set[str] = set()  # nodes of those that gave no page
        self._waits_s: list[float] = []  # for them, this time

    async def read(self, exporters: Iterable[Pod]) -> ClusterUsage:
        self._waits_s = []
        pods = sorted(exporters, key=lambda pod: pod.spec.node_name in self._silent)
        answers = await asyncio.gather(*map(self._page, pods))
        problems = [answer for answer in answers if isinstance(answer, str)]
        left = [pod.spec.node_name for pod, answer in zip(pods, answers, strict=True) if answer is None]
        if left:
            names, more = ", ".join(left[:MOST_PROBLEMS]), len(left) - MOST_PROBLEMS
            waited = f"{self._in_vain_s:g} s of waiting for {len(self._waits_s)} that do not answer"
            rest = f" and {more} more" if more > 0 else ""
            problems.insert(0, f"not asked, after {waited}: the exporters of {names}{rest}")
        return usage_of((answer for answer in answers if isinstance(answer, Page)), problems)

    async def _page(self, pod: Pod) -> Page | str | None:
        """The page of one, or why there is none; None if it was not queried."""
        node, clock = pod.spec.node_name, asyncio.get_running_loop().time
        async with self._slots:
            if sum(self._waits_s) >= self._at_once * self._in_vain_s:
                return None
            asked_at_s = clock()
            try:
                async with asyncio.timeout(self._page_timeout_s):
                    page = await self._fetch(pod)
            except (KubeError, ScrapeError, TimeoutError) as error:
                self._silent.add(node)
                self._waits_s.append(clock() - asked_at_s)
                why = str(error) or f"no page within {self._page_timeout_s:g} s"
                return f"{node}: its exporter does not answer: {why}"
        self._silent.discard(node)
        return page


def proxied(client: KubeClient, prefix: str = "") -> Fetch:
    """Pages through the API server, requested with the user's permissions: what begins with `prefix`."""

    async def page(exporter: Pod) -> Page:
        meta = exporter.metadata
        path = f"{PODS.path(meta.namespace)}/{meta.name}:{port_of(exporter)}/proxy/metrics"
        return parse((await client.read(path)).decode("utf-8", "replace"), prefix)

    return page


async def direct(exporter: Pod) -> Page:
    """What is ours of a page, by the pod's address."""
    url = f"http://{bracketed(exporter.status.pod_ip)}:{port_of(exporter)}/metrics"
    return await asyncio.to_thread(fetch, url, PAGE_TIMEOUT_S, OURS)


def port_of(exporter: Pod) -> int:
    """As its annotation says, if that is a port: any pod may call itself an exporter."""
    text = (exporter.metadata.annotations or {}).get("prometheus.io/port", "")
    port = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    return port if 0 < port < 1 << 16 else PORT
