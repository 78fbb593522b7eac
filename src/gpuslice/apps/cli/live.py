"""``gpuslice top``: what cards and containers use now, read from the exporters through the API server."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
from gpuslice.adapters.web.scrape import Page, ScrapeError, fetch, parse
from gpuslice.apps.cli.cluster import connection_of
from gpuslice.apps.cli.flags import Flags

EXPORTERS = "component=gpuslice-exporter"
PORT = 9400


@dataclass(frozen=True, slots=True)
class CardRow:
    """One card; None is unknown."""

    node: str
    gpu: str
    uuid: str
    model: str = ""
    up: bool = True
    utilization_ratio: float | None = None
    used_bytes: float | None = None
    allocated_bytes: float | None = None
    total_bytes: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True)
class ContainerRow:
    """One container on one card; None is unknown, and no limit."""

    node: str
    gpu: str
    namespace: str
    pod: str
    container: str
    used_bytes: float | None = None
    limit_bytes: float | None = None
    allocated_bytes: float | None = None
    sm_ratio: float | None = None
    refused: float | None = None
    throttled_seconds: float | None = None
    processes: float | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything at one moment, and what could not be read: one sentence each."""

    cards: tuple[CardRow, ...]
    containers: tuple[ContainerRow, ...]
    problems: tuple[str, ...] = ()


class Source(Protocol):
    """Where exporters are read."""

    def read(self) -> Picture:
        """The picture now; an exporter that does not answer is a problem in it."""
        ...


class UrlSource:
    """Exporters by their addresses."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [_whole(url) for url in urls]

    def read(self) -> Picture:
        pages, problems = [], []
        for url in self._urls:
            try:
                pages.append(_ours(fetch(url), url))
            except ScrapeError as error:
                problems.append(str(error))
        return picture(pages, problems)


def _ours(page: Page, url: str) -> Page:
    if not any(one.name.startswith("gpuslice_") for one in page.samples):
        raise ScrapeError(f"{url}: no gpuslice exporter answers there, its page has no metric gpuslice_*")
    return page


AT_ONCE = 8
PAGE_TIMEOUT_S = 5.0
"""An exporter of a node that is gone is not waited for any longer, nor do the others wait for it."""


class ClusterSource:
    """Every exporter pod of a cluster, through the API server: no way to the nodes is needed."""

    def __init__(self, connection: Connection, page_timeout_s: float = PAGE_TIMEOUT_S) -> None:
        self._connection = connection
        self._page_timeout_s = page_timeout_s
        self._client = SyncClient(SyncTransport(connection))
        self._readers: deque[SyncClient] = deque()  # those that are idle
        self._threads = ThreadPoolExecutor(AT_ONCE, "exporters")

    def read(self) -> Picture:
        pods = self._client.list(PODS, labels=EXPORTERS)
        answers = list(self._threads.map(self._page, pods))
        problems = [answer for answer in answers if isinstance(answer, str)]
        if not pods:
            problems.append(f"no pod has the label {EXPORTERS}: is the exporter installed?")
        return picture((answer for answer in answers if isinstance(answer, Page)), problems)

    def _page(self, pod: Pod) -> Page | str:
        """The page of one, or why there is none."""
        try:
            reader = self._readers.pop()
        except IndexError:
            reader = SyncClient(SyncTransport(self._connection, timeout_s=self._page_timeout_s))
        try:
            return parse(reader.read(_path(pod)).decode("utf-8", "replace"))
        except KubeError as error:
            return f"{pod.spec.node_name}: {error}"
        finally:
            self._readers.append(reader)


def _whole(url: str) -> str:
    """``host:port`` stands for the page there."""
    scheme, _, place = url.rpartition("://")
    return f"{scheme or 'http'}://{place}{'' if '/' in place else '/metrics'}"


def cluster_source(flags: Flags) -> ClusterSource:
    return ClusterSource(connection_of(flags))


def _path(pod: Pod) -> str:
    port = (pod.metadata.annotations or {}).get("prometheus.io/port", str(PORT))
    return f"{PODS.path(pod.metadata.namespace)}/{pod.metadata.name}:{port}/proxy/metrics"


# -- from pages to rows ----------------------------------------------------------------------------------


def picture(pages: Iterable[Page], problems: Iterable[str] = ()) -> Picture:
    """All cards and containers of all pages, in order."""
    cards: list[CardRow] = []
    containers: list[ContainerRow] = []
    for page in pages:
        values = _values(page)
        cards += _cards(page, values)
        containers += _containers(page, values)
    cards.sort(key=lambda row: (row.node, _place(row.gpu)))
    containers.sort(key=lambda row: (row.node, _place(row.gpu), row.namespace, row.pod, row.container))
    return Picture(tuple(cards), tuple(containers), tuple(problems))


def _place(gpu: str) -> tuple[int, str]:
    """Of numbers, as they count; of anything else, behind them."""
    return (int(gpu), "") if gpu.isdecimal() and len(gpu) < 10 else (1 << 31, gpu)


_Key = tuple[str, ...]
_Values = Mapping[str, Mapping[_Key, float]]


def _values(page: Page) -> _Values:
    """Metric → (card uuid, namespace, pod, container) → value."""
    found: dict[str, dict[_Key, float]] = defaultdict(dict)
    for one in page.samples:
        found[one.name][_key(one.labels)] = one.value
    return found


def _key(labels: Mapping[str, str]) -> _Key:
    return tuple(labels.get(name, "") for name in ("gpu_uuid", "namespace", "pod", "container"))


def _cards(page: Page, values: _Values) -> list[CardRow]:
    infos = (one.labels for one in page.find("gpuslice_gpu_info"))
    models = {each.get("gpu_uuid", ""): each.get("model", "") for each in infos}
    rows = []
    for one in page.find("gpuslice_gpu_up"):
        uuid = one.labels.get("gpu_uuid", "")

        def of(name: str, key: _Key = (uuid, "", "", "")) -> float | None:
            return values.get(f"gpuslice_gpu_{name}", {}).get(key)

        rows.append(
            CardRow(
                node=one.labels.get("node", ""),
                gpu=one.labels.get("gpu", ""),
                uuid=uuid,
                model=models.get(uuid, ""),
                up=one.value == 1,
                utilization_ratio=of("utilization_ratio"),
                used_bytes=of("memory_used_bytes"),
                allocated_bytes=of("memory_allocated_bytes"),
                total_bytes=of("memory_total_bytes"),
                temperature_celsius=of("temperature_celsius"),
                power_watts=of("power_watts"),
            )
        )
    return rows


def _containers(page: Page, values: _Values) -> list[ContainerRow]:
    rows = []
    for one in page.find("gpuslice_container_info"):
        key = _key(one.labels)

        def of(name: str, key: _Key = key) -> float | None:
            return values.get(f"gpuslice_container_{name}", {}).get(key)

        rows.append(
            ContainerRow(
                **{
                    name: one.labels.get(name, "")
                    for name in ("node", "gpu", "namespace", "pod", "container")
                },
                used_bytes=of("memory_used_bytes"),
                limit_bytes=of("memory_limit_bytes"),
                allocated_bytes=of("memory_allocated_bytes"),
                sm_ratio=of("sm_utilization_ratio"),
                refused=of("memory_refused_total"),
                throttled_seconds=of("throttled_seconds_total"),
                processes=of("processes"),
            )
        )
    return rows


def documents(found: Picture) -> dict[str, Any]:
    """For ``-o json``: the rows, unknown figures left out."""
    return {
        "cards": [_known(row, CardRow) for row in found.cards],
        "containers": [_known(row, ContainerRow) for row in found.containers],
        "problems": list(found.problems),
    }


def _known(row: Any, kind: type) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in kind.__slots__}  # type: ignore[attr-defined]
    return {name: value for name, value in values.items() if value is not None}
