"""Queries Prometheus: usage now, usage of one pod, what namespaces held for how long, and alerts."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit
from urllib.request import Request, urlopen

import msgspec

from gpuslice.adapters.web.scrape import Sample
from gpuslice.core.errors import GpusliceError, words_of
from gpuslice.diagnosis.usage import (
    CARD_FIGURES,
    CONTAINER_FIGURES,
    CardUsage,
    ContainerUsage,
    usage_of_samples,
)

T = TypeVar("T")
Documents = list[dict[str, Any]]
TIMEOUT_S = 20.0
POINTS = 120
OURS = "Gpu"
"""The prefix of the alerts in monitoring/."""
PEAK, REFUSED = "gpuslice_container_memory_peak_bytes", "gpuslice_container_memory_refused_total"


CARD_LABELS = "cluster, node, gpu_uuid"
CONTAINER_LABELS = f"{CARD_LABELS}, namespace, pod, container"


def one(expression: str, *more: str, labels: str = CONTAINER_LABELS) -> str:
    """One series for each container on a card, or whatever `labels` tell apart; for sums, above all.

    The same container has several, one after the other or at once, if its exporter is replaced, restarted at
    another address, or scraped by two jobs, and if the driver renumbers the cards (`gpu` among `more`).
    """
    return f"max by ({', '.join((labels, *more))}) ({expression})"


class PrometheusError(GpusliceError):
    """Prometheus did not answer the query."""


class TeamHours(NamedTuple):
    """What a namespace held and used, multiplied by the time; None is unknown."""

    held_gib: float
    used_gib: float | None
    sm: float | None


class Prometheus:
    """One server, queried by GET; its methods block, so call them on a thread.

    `url` may have a path, and a user and a password; `token_file` is read again for each query.
    """

    def __init__(self, url: str, token_file: str = "", ca_file: str = "") -> None:
        """Raises `PrometheusError` if it is not an address."""
        try:
            parts = urlsplit(url.rstrip("/"))
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # of the port, or of an IPv6 address
            good = False
        if not good:
            place = url.rpartition("@")[2]  # without the password
            raise PrometheusError(f'the address of Prometheus is "{place}", must be an http or https URL')
        self._url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._basic = ""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._basic = "Basic " + base64.b64encode(pair.encode()).decode()
        self._token_file = token_file
        self._ca_file = ca_file

    def cards(self) -> Sequence[CardUsage]:
        """What is used of each card, as last reported by the exporters."""
        return usage_of_samples(self._samples(CARD_FIGURES, 0)).cards

    def containers(self, days: int = 0) -> Sequence[ContainerUsage]:
        """What containers use; with `days`, their peaks and refusals in that time."""
        return usage_of_samples(self._samples(CONTAINER_FIGURES, days)).containers

    def _samples(self, names: Sequence[str], days: int) -> Iterator[Sample]:
        """Metric by metric and row by row, only labels in use: 40,000 cards at once would be too much."""
        over = {PEAK: f"max_over_time({PEAK}[{days}d])", REFUSED: f"increase({REFUSED}[{days}d])"}
        for name in names:
            question = over.get(name, name) if days else name
            query = {"query": f"max by ({', '.join(_Labels.__struct_fields__)}) ({question})"}
            for row in self._ask("query", query, list[msgspec.Raw]):
                found = _ROW.decode(row)
                yield Sample(name, found.metric.honest(), float(found.value[1]))

    def history(self, namespace: str, pod: str, until_s: float, hours: float = 1.0) -> dict[str, list[Any]]:
        """Times, and by name the bytes used and the share of the SMs; empty if Prometheus knows nothing."""
        chosen = f"{{namespace={quoted(namespace)},pod={quoted(pod)}}}"
        step_s = max(15.0, hours * 3600 / POINTS)
        frame = {"start": f"{until_s - hours * 3600:.0f}", "end": f"{until_s:.0f}", "step": f"{step_s:.0f}"}
        found: dict[str, dict[float, float]] = {}
        for name, question in (
            ("used", f"sum({one(f'gpuslice_container_memory_used_bytes{chosen}')})"),
            ("sm", f"sum({one(f'gpuslice_container_sm_utilization_ratio{chosen}')})"),
            ("refused", f"sum({one(f'increase({REFUSED}{chosen}[{max(60.0, 2 * step_s):.0f}s])')})"),
        ):
            rows = self._ask("query_range", {"query": question, **frame}, Documents)
            found[name] = {float(at): float(value) for row in rows for at, value in row["values"]}
        times = sorted({at for values in found.values() for at in values})
        return {"times": times, **{name: [values.get(at) for at in times] for name, values in found.items()}}

    def team_hours(self, hours: int = 24) -> dict[str, TeamHours]:
        """By namespace, for the last `hours`, from one value per minute."""

        def by_namespace(question: str) -> dict[str, float]:
            return {name: value for (name,), value in self.sums(question, ("namespace",))}

        def hours_of(expression: str, divisor: int = 1) -> dict[str, float]:
            return by_namespace(f"sum_over_time({one(expression)}[{hours}h:1m]) / 60 / {divisor}")

        held, used = (
            hours_of(f"gpuslice_container_memory_{name}_bytes", 1 << 30) for name in ("allocated", "used")
        )
        # the increases of an exporter and of the one that replaced it would be two, and the larger not all
        sm = hours_of("rate(gpuslice_container_sm_seconds_total[5m])")
        return {name: TeamHours(amount, used.get(name), sm.get(name)) for name, amount in held.items()}

    def sums(
        self, question: str, labels: Sequence[str], at_s: float | None = None
    ) -> list[tuple[tuple[str, ...], float]]:
        """Sums of what is asked for by the values of `labels`, "" for one that is absent; now, or `at_s`."""
        at = {} if at_s is None else {"time": f"{at_s:.3f}"}
        rows = self._ask("query", {"query": f"sum by ({', '.join(labels)}) ({question})", **at}, Documents)
        return [
            (tuple(each["metric"].get(name, "") for name in labels), float(each["value"][1])) for each in rows
        ]

    def alerts(self) -> list[dict[str, Any]]:
        """Our pending or firing alerts as Prometheus shows them: labels, annotations, state, activeAt."""
        found = self._ask("alerts", {}, Documents, "alerts")
        return [each for each in found if str(each["labels"].get("alertname", "")).startswith(OURS)]

    def _ask(self, verb: str, query: Mapping[str, str], shape: type[T], part: str = "result") -> T:
        """The part named `part` of the answer's data. Raises PrometheusError."""
        authorization, context = self._basic, None
        try:
            if self._token_file:
                authorization = f"Bearer {Path(self._token_file).read_text().strip()}"
        except (OSError, ValueError) as error:
            raise PrometheusError(f"token file {self._token_file}: {words_of(error)}") from error
        try:
            if self._url.startswith("https:"):
                context = ssl.create_default_context(cafile=self._ca_file or None)
        except OSError as error:
            raise PrometheusError(f"CA file {self._ca_file}: {words_of(error)}") from error
        request = Request(
            f"{self._url}/api/v1/{verb}?{urlencode(query)}", headers={"Accept": "application/json"}
        )
        if authorization:
            request.add_header("Authorization", authorization)
        try:
            with urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                data = msgspec.json.decode(answer.read(), type=_Answer).data
            return msgspec.json.decode(data[part], type=shape)
        except HTTPError as error:
            error.close()
            raise PrometheusError(f"Prometheus at {self._url} cannot be asked: {words_of(error)}") from None
        except (OSError, ValueError, KeyError, HTTPException, msgspec.DecodeError) as error:
            reason = getattr(error, "reason", error)  # of urllib's errors, what is behind them
            words = words_of(reason if isinstance(reason, Exception) else error)
            raise PrometheusError(f"Prometheus at {self._url} cannot be asked: {words}") from error


class _Answer(msgspec.Struct):
    data: dict[str, msgspec.Raw]


class _Labels(msgspec.Struct, gc=False):
    """The labels of a sample that are used. A Prometheus without ``honor_labels`` renames some."""

    node: str = ""
    gpu: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    workload_kind: str = ""
    workload: str = ""
    exported_node: str = ""
    exported_namespace: str = ""
    exported_pod: str = ""
    exported_container: str = ""

    def honest(self) -> dict[str, str]:
        return {
            "node": self.exported_node or self.node,
            "gpu": self.gpu,
            "namespace": self.exported_namespace or self.namespace,
            "pod": self.exported_pod or self.pod,
            "container": self.exported_container or self.container,
            **({"workload_kind": self.workload_kind, "workload": self.workload} if self.workload else {}),
        }


class _Row(msgspec.Struct, gc=False):
    metric: _Labels
    value: tuple[float, str]


_ROW = msgspec.json.Decoder(_Row)


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
