"""Reads what cards and containers use from the exporters, through the API server or by address."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
from gpuslice.adapters.web.scrape import Page, ScrapeError, fetch, parse
from gpuslice.apps.diagnosis.usage import MOST_PROBLEMS, ClusterUsage, ContainerUsage, usage_of

EXPORTERS = "component=gpuslice-exporter"
PORT = 9400
AT_ONCE = 32
PAGE_TIMEOUT_S = 5.0
"""An exporter on a lost node is not waited for any longer, and delays no others."""
IN_VAIN_S = 5.0
"""After this much waiting in vain no further exporter is queried, so that everything ends one page later.

Time for successful pages does not count: a thousand of them may take longer, and are worth it.
"""


class UrlSource:
    """Exporters by their addresses; ``host:port`` means the page there."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = []
        for url in urls:
            scheme, _, place = url.rpartition("://")
            self._urls.append(f"{scheme or 'http'}://{place}{'' if '/' in place else '/metrics'}")

    def read(self) -> ClusterUsage:
        pages, problems = [], []
        for url in self._urls:
            try:
                page = fetch(url)
                if not any(one.name.startswith("gpuslice_") for one in page.samples):
                    what = "no gpuslice exporter answers there, its page has no metric gpuslice_*"
                    raise ScrapeError(f"{url}: {what}")
                pages.append(page)
            except ScrapeError as error:
                problems.append(str(error))
        return usage_of(pages, problems)


class Unanswered:
    """Exporters that gave no page: many of them delay nobody, and they are queried last the next time.

    `at_once`: how many are queried concurrently. Those that were not queried this time precede them, too.
    """

    def __init__(self, at_once: int, in_vain_s: float = IN_VAIN_S) -> None:
        self.in_vain_s = in_vain_s
        self.waits_s: list[float] = []  # of this time
        self._most_s = at_once * in_vain_s
        self._nodes: set[str] = set()

    @property
    def enough(self) -> bool:
        """Whether so much time was spent in vain that no further exporter should be queried."""
        return sum(self.waits_s) >= self._most_s

    def in_turn(self, exporters: Iterable[Pod]) -> list[Pod]:
        """Begin a new round over all of them; returns the order in which to query them."""
        self.waits_s = []
        return sorted(exporters, key=lambda pod: pod.spec.node_name in self._nodes)

    def note(self, exporter: Pod, waited_s: float | None) -> None:
        """It gave no page after waiting this long; None if it gave one."""
        if waited_s is None:
            self._nodes.discard(exporter.spec.node_name)
        else:
            self._nodes.add(exporter.spec.node_name)
            self.waits_s.append(waited_s)

    def left(self, exporters: Sequence[Pod]) -> str:
        """A sentence about those that were not queried."""
        names = ", ".join(pod.spec.node_name for pod in exporters[:MOST_PROBLEMS])
        more = len(exporters) - MOST_PROBLEMS
        waited = f"{self.in_vain_s:g} s of waiting for {len(self.waits_s)} that do not answer"
        return f"not asked, after {waited}: the exporters of {names}{f' and {more} more' if more > 0 else ''}"


class ClusterSource:
    """Every exporter pod of a cluster, through the API server: no direct route to the nodes is needed."""

    def __init__(
        self, connection: Connection, page_timeout_s: float = PAGE_TIMEOUT_S, in_vain_s: float = IN_VAIN_S
    ) -> None:
        self._connection = connection
        self._page_timeout_s = page_timeout_s
        self._client = SyncClient(SyncTransport(connection))
        self._readers: deque[SyncClient] = deque()  # those that are idle
        self._threads = ThreadPoolExecutor(AT_ONCE, "exporters")
        self._unanswered = Unanswered(AT_ONCE, in_vain_s)

    def read(self) -> ClusterUsage:
        pods = self._unanswered.in_turn(self._client.list(PODS, labels=EXPORTERS))
        answers = list(self._threads.map(self._page, pods))
        problems = [answer for answer in answers if isinstance(answer, str)]
        left = [pod for pod, answer in zip(pods, answers, strict=True) if answer is None]
        if left:
            problems.insert(0, self._unanswered.left(left))
        if not pods:
            problems.append(f"no pod has the label {EXPORTERS}: is the exporter installed?")
        return usage_of((answer for answer in answers if isinstance(answer, Page)), problems)

    def _page(self, pod: Pod) -> Page | str | None:
        """The page of one, or why there is none; None if it was not queried."""
        if self._unanswered.enough:
            return None
        try:
            reader = self._readers.pop()
        except IndexError:
            reader = SyncClient(SyncTransport(self._connection, timeout_s=self._page_timeout_s))
        asked_at = time.monotonic()
        try:
            page = page_of(reader, pod)
        except KubeError as error:
            self._unanswered.note(pod, time.monotonic() - asked_at)
            return f"{pod.spec.node_name}: {error}"
        finally:
            self._readers.append(reader)
        self._unanswered.note(pod, None)
        return page


def page_of(client: SyncClient, exporter: Pod) -> Page:
    """The page of one exporter pod, through the API server. Raises KubeError."""
    return parse(client.read(proxied_path(exporter)).decode("utf-8", "replace"))


def proxied_path(exporter: Pod) -> str:
    """The page of an exporter pod at the API server, requested with the user's permissions."""
    return (
        f"{PODS.path(exporter.metadata.namespace)}/{exporter.metadata.name}:{port_of(exporter)}/proxy/metrics"
    )


def port_of(exporter: Pod) -> int:
    """As its annotation says, if that is a port: any pod may call itself an exporter."""
    text = (exporter.metadata.annotations or {}).get("prometheus.io/port", "")
    port = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    return port if 0 < port < 1 << 16 else PORT


def read_containers(client: SyncClient, node: str) -> tuple[ContainerUsage, ...]:
    """What the containers of one node use; none where no exporter runs there. Raises KubeError."""
    exporters = client.list(PODS, labels=EXPORTERS, fields=f"spec.nodeName={node}")
    return tuple(usage_of(page_of(client, each) for each in exporters).containers)
