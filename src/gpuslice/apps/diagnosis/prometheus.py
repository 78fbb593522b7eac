"""Asks Prometheus what is used, what one pod used, what namespaces held how long, and of what it alerts."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit
from urllib.request import Request, urlopen

import msgspec

from gpuslice.adapters.web.scrape import Page, Sample
from gpuslice.core.errors import GpusliceError, words_of

TIMEOUT_S = 20.0
NOW = '{__name__=~"gpuslice_(container|gpu)_.*"}'
POINTS = 120
OURS = "Gpu"
"""How the names of the alerts in monitoring/ begin."""
PEAK, REFUSED = "gpuslice_container_memory_peak_bytes", "gpuslice_container_memory_refused_total"


class PrometheusError(GpusliceError):
    """Prometheus did not answer the question."""


class TeamHours(NamedTuple):
    """What a namespace held and used, times how long; None is unknown."""

    held_gib: float
    used_gib: float | None
    sm: float | None


class Prometheus:
    """One server, asked by GET; its methods block, so that they belong on a thread.

    `url` may have a path, and a user and a password; `token_file` is read anew for each question.
    """

    def __init__(self, url: str, token_file: str = "", ca_file: str = "") -> None:
        parts = urlsplit(url.rstrip("/"))
        self._url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._basic = ""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._basic = "Basic " + base64.b64encode(pair.encode()).decode()
        self._token_file = token_file
        self._ca_file = ca_file

    def page(self, days: int = 0) -> Page:
        """The newest samples of all exporters, as one page; with `days`, peaks and refusals of those."""
        rows = self._ask("query", {"query": NOW})
        if days:
            rows = [each for each in rows if each["metric"].get("__name__") not in (PEAK, REFUSED)]
            for name, question in (
                (PEAK, f"max_over_time({PEAK}[{days}d])"),
                (REFUSED, f"increase({REFUSED}[{days}d])"),
            ):
                rows += [
                    {**each, "metric": {**each["metric"], "__name__": name}}
                    for each in self._ask("query", {"query": f"{question}({name}[{days}d])"})
                ]
        return Page(
            tuple(
                Sample(each["metric"].get("__name__", ""), _labels(each["metric"]), float(each["value"][1]))
                for each in rows
            )
        )

    def history(self, namespace: str, pod: str, until_s: float, hours: float = 1.0) -> dict[str, list[Any]]:
        """Times, and by name bytes used and the share of the SMs; empty where Prometheus knows nothing."""
        chosen = f"{{namespace={_quoted(namespace)},pod={_quoted(pod)}}}"
        step_s = max(15.0, hours * 3600 / POINTS)
        frame = {"start": f"{until_s - hours * 3600:.0f}", "end": f"{until_s:.0f}", "step": f"{step_s:.0f}"}
        found: dict[str, dict[float, float]] = {}
        for name, question in (
            ("used", f"sum(gpuslice_container_memory_used_bytes{chosen})"),
            ("sm", f"sum(gpuslice_container_sm_utilization_ratio{chosen})"),
            ("refused", f"sum(increase({REFUSED}{chosen}[{max(60.0, 2 * step_s):.0f}s]))"),
        ):
            rows = self._ask("query_range", {"query": question, **frame})
            found[name] = {float(at): float(value) for row in rows for at, value in row["values"]}
        times = sorted({at for values in found.values() for at in values})
        return {"times": times, **{name: [values.get(at) for at in times] for name, values in found.items()}}

    def team_hours(self, hours: int = 24) -> dict[str, TeamHours]:
        """By namespace, of the last `hours`, from one figure a minute."""

        def by_namespace(question: str) -> dict[str, float]:
            rows = self._ask("query", {"query": f"sum by (namespace) ({question})"})
            return {each["metric"].get("namespace", ""): float(each["value"][1]) for each in rows}

        figure = f"sum_over_time(gpuslice_container_memory_%s_bytes[{hours}h:1m]) / 60 / {1 << 30}"
        held, used = by_namespace(figure % "allocated"), by_namespace(figure % "used")
        sm = by_namespace(f"increase(gpuslice_container_sm_seconds_total[{hours}h]) / 3600")
        return {name: TeamHours(amount, used.get(name), sm.get(name)) for name, amount in held.items()}

    def alerts(self) -> list[dict[str, Any]]:
        """Ours that are pending or firing, as Prometheus tells them: labels, annotations, state, activeAt."""
        found = self._ask("alerts", {}, "alerts")
        return [each for each in found if str(each["labels"].get("alertname", "")).startswith(OURS)]

    def _ask(self, verb: str, query: Mapping[str, str], part: str = "result") -> list[dict[str, Any]]:
        request = Request(
            f"{self._url}/api/v1/{verb}?{urlencode(query)}", headers={"Accept": "application/json"}
        )
        secure = self._url.startswith("https:")
        try:
            if self._token_file:
                request.add_header("Authorization", f"Bearer {Path(self._token_file).read_text().strip()}")
            elif self._basic:
                request.add_header("Authorization", self._basic)
            context = ssl.create_default_context(cafile=self._ca_file or None) if secure else None
            with urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                document = msgspec.json.decode(answer.read())
            result = document["data"][part]
            assert isinstance(result, list)
        except HTTPError as error:
            error.close()
            raise PrometheusError(f"Prometheus at {self._url} cannot be asked: {words_of(error)}") from None
        except (OSError, ValueError, KeyError, TypeError, AssertionError, msgspec.DecodeError) as error:
            raise PrometheusError(f"Prometheus at {self._url} cannot be asked: {words_of(error)}") from error
        return result


def _labels(metric: Mapping[str, str]) -> dict[str, str]:
    """Of a Prometheus that does not honour the exporter's labels, what it renamed them to."""
    labels = {name: value for name, value in metric.items() if name != "__name__"}
    for name in ("namespace", "pod", "container", "node"):
        if f"exported_{name}" in labels:
            labels[name] = labels.pop(f"exported_{name}")
    return labels


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
