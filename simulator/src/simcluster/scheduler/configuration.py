"""Reads the KubeSchedulerConfiguration (v1) that a cluster's scheduler is started with."""

from __future__ import annotations

import re
import ssl
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

API_VERSION = "kubescheduler.config.k8s.io/v1"
DEFAULT_SCHEDULER = "default-scheduler"
DEFAULT_TIMEOUT_S = 5.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class ConfigurationError(Exception):
    """The scheduler would not start with this file."""


@dataclass(frozen=True, slots=True)
class ExtenderConfig:
    """One entry of ``extenders``; a verb is empty if the extender does not offer it."""

    url_prefix: str
    filter_verb: str = ""
    prioritize_verb: str = ""
    bind_verb: str = ""
    weight: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    node_cache_capable: bool = False
    ignorable: bool = False
    managed: frozenset[str] = frozenset()
    ignored_by_scheduler: frozenset[str] = frozenset()
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """`percentage_of_nodes` 0 means adaptive, as in kube-scheduler."""

    scheduler_names: tuple[str, ...] = (DEFAULT_SCHEDULER,)
    extenders: tuple[ExtenderConfig, ...] = ()
    percentage_of_nodes: int = 0
    initial_backoff_s: float = 1.0
    max_backoff_s: float = 10.0


DEFAULT = Configuration()


def load(path: Path, root: Path = Path("/")) -> Configuration:
    """`root`: below it lie the files that the configuration names, as in the scheduler's container."""
    return parse(yaml.safe_load(path.read_text()), root)


def parse(document: Any, root: Path = Path("/")) -> Configuration:
    """Raises ConfigurationError for what kube-scheduler's own validation refuses."""
    if not isinstance(document, dict) or document.get("kind") != "KubeSchedulerConfiguration":
        raise ConfigurationError("kind is not KubeSchedulerConfiguration")
    if document.get("apiVersion") != API_VERSION:
        raise ConfigurationError(f"apiVersion is {document.get('apiVersion')}, must be {API_VERSION}")
    profiles = document.get("profiles") or [{}]
    extenders = tuple(_extender(one, root) for one in document.get("extenders") or ())
    if sum(bool(one.bind_verb) for one in extenders) > 1:
        raise ConfigurationError("extenders: only one extender can implement bind")
    for one in extenders:
        if one.prioritize_verb and one.weight <= 0:
            raise ConfigurationError(
                f"extenders: {one.url_prefix}: must have a positive weight applied to it"
            )
    names = Counter(name for one in extenders for name in one.managed)
    repeated = sorted(name for name, count in names.items() if count > 1)
    if repeated:
        raise ConfigurationError(f"extenders: duplicate extender managed resource name {repeated[0]}")
    return Configuration(
        scheduler_names=tuple(one.get("schedulerName", DEFAULT_SCHEDULER) for one in profiles),
        extenders=extenders,
        percentage_of_nodes=document.get("percentageOfNodesToScore") or 0,
        initial_backoff_s=float(document.get("podInitialBackoffSeconds") or 1),
        max_backoff_s=float(document.get("podMaxBackoffSeconds") or 10),
    )


def _extender(entry: dict[str, Any], root: Path) -> ExtenderConfig:
    managed = entry.get("managedResources") or ()
    # A Go duration; zero or nothing means the default of five seconds
    duration = entry.get("httpTimeout")
    parts = _DURATION.findall(duration or "")
    return ExtenderConfig(
        url_prefix=entry["urlPrefix"].rstrip("/"),
        filter_verb=entry.get("filterVerb", ""),
        prioritize_verb=entry.get("prioritizeVerb", ""),
        bind_verb=entry.get("bindVerb", ""),
        weight=entry.get("weight", 0),
        timeout_s=sum(float(number) * _SECONDS[unit] for number, unit in parts) or DEFAULT_TIMEOUT_S,
        node_cache_capable=bool(entry.get("nodeCacheCapable")),
        ignorable=bool(entry.get("ignorable")),
        managed=frozenset(one["name"] for one in managed),
        ignored_by_scheduler=frozenset(one["name"] for one in managed if one.get("ignoredByScheduler")),
        tls=_tls(entry.get("tlsConfig") or {}, root) if entry.get("enableHTTPS") else None,
    )


def _tls(entry: dict[str, Any], root: Path) -> ssl.SSLContext:
    """The server's name is that of the URL here; kube-scheduler's `serverName` may be another."""
    files = {
        key: str(root / entry[key].lstrip("/")) for key in ("caFile", "certFile", "keyFile") if key in entry
    }
    context = ssl.create_default_context(cafile=files.get("caFile"))
    if "certFile" in files:
        context.load_cert_chain(files["certFile"], files["keyFile"])
    return context
