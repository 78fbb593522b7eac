"""Checks of kube-scheduler's configuration: is an extender called, and in a way that keeps cards right?"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpuslice.adapters.kube.resources import CONFIG_MAPS, PODS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.contract import EITHER_MEMORY, MEMORY_NAMES, SYSTEM_NAMESPACE, of_our_chart
from gpuslice.core.errors import words_of
from gpuslice.core.nesting import checked_depth
from gpuslice.core.node_sample import sample_size
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level, is_ready, option_of

_KIND = "KubeSchedulerConfiguration"
_DEFAULT = "default-scheduler"


class _Managed(msgspec.Struct, rename="camel"):
    name: str = ""
    ignored_by_scheduler: bool | None = None


class _Tls(msgspec.Struct, rename="camel"):
    insecure: bool | None = None
    ca_file: str | None = None
    ca_data: str | None = None
    cert_file: str | None = None
    cert_data: str | None = None


class _Section(msgspec.Struct, rename="camel"):
    """One extender. A field without a value, as templates leave it, counts as absent."""

    url_prefix: str | None = None
    enable_https: bool | None = msgspec.field(default=None, name="enableHTTPS")
    tls_config: _Tls | None = None
    filter_verb: str | None = None
    prioritize_verb: str | None = None
    bind_verb: str | None = None
    preempt_verb: str | None = None
    ignorable: bool | None = None
    node_cache_capable: bool | None = None
    managed_resources: list[_Managed] | None = None

    @property
    def verbs(self) -> dict[str, str | None]:
        return {
            "filter": self.filter_verb,
            "prioritize": self.prioritize_verb,
            "bind": self.bind_verb,
            "preempt": self.preempt_verb,
        }


class _Profile(msgspec.Struct, rename="camel"):
    scheduler_name: str | None = None
    percentage_of_nodes_to_score: int | None = None  # overrides the configuration's own, even with 0


class _Configuration(msgspec.Struct, rename="camel"):
    """The fields that we read of a ``KubeSchedulerConfiguration`` (kubescheduler.config.k8s.io/v1)."""

    percentage_of_nodes_to_score: int | None = None
    extenders: list[_Section] | None = None
    profiles: list[_Profile] | None = None

    @property
    def sections(self) -> list[_Section]:
        """The extenders for GPU memory."""
        return [
            section
            for section in self.extenders or ()
            if any(each.name in MEMORY_NAMES for each in section.managed_resources or ())
        ]


def scheduler_configuration(facts: Facts) -> Iterator[Finding]:
    """All readable configurations that call an extender for GPU memory; and whether there is one."""
    found: list[_Configuration] = []
    for config_map in facts.config_maps:
        for key, text in (config_map.data or {}).items():
            if _KIND not in text or not any(name in text for name in MEMORY_NAMES):
                continue
            where = f"ConfigMap {config_map.metadata.namespace}/{config_map.metadata.name}, {key}"
            try:
                read = msgspec.yaml.decode(checked_depth(text.encode()), type=_Configuration)
            except ValueError as error:
                what = f"is no {_KIND} that can be read: {words_of(error)}"
                yield Finding(Level.WARNING, where, what, "correct it: kube-scheduler does not start with it")
                continue
            if not read.sections:
                continue
            found.append(read)
            for section in read.sections:
                yield from _section(where, section)
            yield from _sampling(where, read, len(facts.nodes))
    files = sorted({file for pod in facts.schedulers if (file := option_of(pod, "config"))})
    if found:
        names = {
            profile.scheduler_name or _DEFAULT
            for configuration in found
            for profile in configuration.profiles or [_Profile()]
        }
        yield from ([] if files else _elsewhere(facts, names))
    elif files:
        yield Finding(
            Level.NOTE,
            "kube-scheduler",
            f"is configured by {files[0]} on its host, which cannot be read from here",
            f"see there that an extender manages {EITHER_MEMORY}, and percentageOfNodesToScore is 100",
        )
    elif (
        facts.services
        and facts.knows(PODS, SYSTEM_NAMESPACE)
        and all(
            facts.knows(CONFIG_MAPS, space)
            for space in {SYSTEM_NAMESPACE, *(each["metadata"]["namespace"] for each in facts.services)}
        )
    ):
        hidden = "" if facts.schedulers else "; it runs without a pod here, so its file cannot be read"
        yield Finding(
            Level.WARNING if hidden else Level.ERROR,
            "kube-scheduler",
            f"no configuration was found in which an extender manages {EITHER_MEMORY}{hidden}",
            "enable the chart's second scheduler, or give kube-scheduler the extender section with --config",
        )


def second_scheduler(facts: Facts) -> Iterator[Finding]:
    """Our second scheduler must run: without it nobody looks at its pods, and no event says so."""
    for each in facts.config_maps:
        meta = each.metadata
        if not of_our_chart(meta.labels) or not any(_KIND in text for text in (each.data or {}).values()):
            continue
        runs = any(
            pod.metadata.namespace == meta.namespace
            and (pod.metadata.labels or {}).get("component") == meta.name
            and is_ready(pod)
            for pod in facts.pods
        )
        if facts.knows(PODS) and not runs:
            yield Finding(
                Level.ERROR,
                f"scheduler {meta.namespace}/{meta.name}",
                "has no ready pod: pods that name it wait, and no event says why",
                f"kubectl -n {meta.namespace} describe deployment {meta.name}; kubectl -n {meta.namespace} "
                f"logs deployment/{meta.name}",
            )


def _elsewhere(facts: Facts, known: set[str]) -> Iterator[Finding]:
    """Pods without a card whose scheduler never asks for one."""
    astray: dict[str, list[str]] = {}
    for found in facts.pods:
        pod, scheduler = pod_view(found), found.spec.scheduler_name or _DEFAULT
        if pod.request is not None and pod.placement is None and scheduler not in known:
            astray.setdefault(scheduler, []).append(pod.key)
    for scheduler, pods in sorted(astray.items()):
        yield Finding(
            Level.ERROR,
            f"scheduler {scheduler}",
            f"has no known extender, and {len(pods)} pods without a card name it: {pods[0]} …",
            f"give them schedulerName {sorted(known)[0]}; the webhook does it for pods that left it open",
        )


WITHOUT = {
    "filter": (Level.ERROR, "pods are sent to nodes where no card has room, and wait there"),
    "prioritize": (Level.NOTE, "any of the nodes that filter lets pass is taken"),
    "bind": (Level.ERROR, "pods are bound without a card"),
    "preempt": (Level.NOTE, "victims are picked by the node's sum, not by card"),
}
"""The effect of not calling the extender for this verb."""
CLIENT_SECRET = "Secret gpushare-schd-extender-client"
ONE_BINDER = ", and take it from any other extender: only one may bind"


def _section(where: str, section: _Section) -> Iterator[Finding]:
    for verb, said in section.verbs.items():
        level, what = WITHOUT[verb]
        fix = f"set {verb}Verb: {verb}{ONE_BINDER if verb == 'bind' else ''}"
        if not said:
            yield Finding(level, where, f"the extender has no {verb}Verb: {what}", fix)
        elif said.strip("/") != verb:
            what = f'{verb}Verb is "{said}", which the extender does not know'
            yield Finding(Level.ERROR, where, what, fix)
    yield from _connection(where, section)
    if section.ignorable:
        yield Finding(
            Level.ERROR,
            where,
            "the extender is ignorable: while it is down, pods are placed on cards that are full, and since "
            "Kubernetes 1.30 also those whose bind it refuses",
            "set ignorable: false",
        )
    if not section.node_cache_capable:
        yield Finding(
            Level.WARNING,
            where,
            "nodeCacheCapable is not set: kube-scheduler sends whole nodes, 10 to 20 KB each, for every pod",
            "set nodeCacheCapable: true",
        )
    ignored = [each.name for each in section.managed_resources or () if each.ignored_by_scheduler]
    if ignored:
        yield Finding(
            Level.WARNING,
            where,
            f"{' and '.join(ignored)} ignoredByScheduler: nodes without cards fill the extender's lists",
            "set ignoredByScheduler: false",
        )


def _connection(where: str, section: _Section) -> Iterator[Finding]:
    """Whether both sides are authenticated: an extender that trusts anybody binds anybody's pods."""
    tls = section.tls_config or _Tls()
    if not section.enable_https or not (section.url_prefix or "https:").startswith("https:"):
        what = (
            "kube-scheduler uses plain HTTP to reach the extender: anyone who can reach its port can bind "
            "pods and have others evicted"
        )
        fix = (
            "install with extender.certificate.source=helm or cert-manager; set enableHTTPS and tlsConfig as "
            "the chart's notes show"
        )
    elif tls.insecure or not (tls.ca_file or tls.ca_data):
        what = "kube-scheduler does not check whose certificate the extender shows"
        fix = f"set tlsConfig.caFile to ca.crt of {CLIENT_SECRET}, and insecure: false"
    elif not (tls.cert_file or tls.cert_data):
        what = "kube-scheduler shows the extender no certificate, and is refused where that asks for one"
        fix = f"set tlsConfig.certFile and keyFile to tls.crt and tls.key of {CLIENT_SECRET}"
    else:
        return
    yield Finding(Level.WARNING, where, what, fix)


def _sampling(where: str, configuration: _Configuration, nodes: int) -> Iterator[Finding]:
    """kube-scheduler shows an extender only as many feasible nodes as it wants to score."""
    whole = configuration.percentage_of_nodes_to_score or 0
    for profile in configuration.profiles or [_Profile()]:
        own = profile.percentage_of_nodes_to_score
        shown = sample_size(nodes, whole if own is None else own)
        if shown < nodes:
            of = "" if own is None else f" of profile {profile.scheduler_name or _DEFAULT}"
            yield Finding(
                Level.WARNING,
                where,
                f"the extender sees {shown} of {nodes} nodes: pods wait while cards on the others are free",
                f"set percentageOfNodesToScore: 100{of}",
            )
            return
