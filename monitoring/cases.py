"""For each alert, series that make it fire and series that do not, for promtool's rule tests."""

from __future__ import annotations

from typing import Any

from gpuslice.apps.exporter import catalogue as c
from monitoring.rules import ALERTS
from monitoring.scaling import busy_percent
from monitoring.series import (
    AGENT_SILENT,
    ASKED,
    ASKED_IN_VAIN,
    BARE_POD,
    BORROWERS_ENDED,
    CARD_HEALTHY,
    CERTIFICATE_EXPIRY,
    EXTENDER_READY,
    EXTENDER_SILENT,
    FORGOTTEN,
    PARKED_WAITING,
    REFUSALS,
    REGISTERED,
    REJECTIONS,
    SAMPLED,
    TOKENS_IN_CLEAR,
    WAITING,
    WATCH_DELAY,
    WATCH_LATE,
)

Series = dict[str, str]  # selector → one value per minute

_CARD = '{node="n1",gpu="0",gpu_uuid="GPU-a"'
_APP = _CARD + ',namespace="default",pod="app-0",container="main"}'
_HOUR = "x180"


def _card(metric: c.Metric, more: str = "") -> str:
    return f"{metric.name}{_CARD}{more}}}"


def _app(metric: c.Metric) -> str:
    return metric.name + _APP


def _seen(metric: c.Metric, exporter: str) -> str:
    """A container's series from one of several exporters."""
    return _app(metric).replace("}", f',instance="{exporter}"}}')


def _always(series: str, value: str) -> Series:
    return {series: f"{value}{_HOUR}"}


def _delays(quick: float, slow: float) -> Series:
    """A histogram of watch delays: this many per minute within a second, and this many later."""
    steps = {"1.0": quick, "5.0": quick + slow, "+Inf": quick + slow}
    return {f'{WATCH_DELAY}{{pod="a",le="{le}"}}': f"0+{step:g}x180" for le, step in steps.items()}


_UP = 'up{job="monitoring/gpuslice-exporter",instance="10.0.0.1:9400"}'
_EXPORTER_ON_NODE = _UP.replace("}", ',node="n1"}')
_NODE_INFO = 'kube_node_info{node="n1",instance="10.0.9.9:8080"}'
_AGENT = '{job="gpuslice-agents",instance="10.0.0.1:12346",node="n1"}'
_AGENT_CARD = _AGENT.replace("}", ',gpu="0",gpu_uuid="GPU-a"}')
_AGENT_POD = _AGENT.replace("}", ',namespace="default",pod="app-0"}')
_AGENT_CONTAINER = _AGENT_POD.replace("}", ',container="main"}')
_VERB = '{pod="a",verb="filter",result="no"}'
_TLS = '{job="kube-system/gpuslice-webhook",pod="gpuslice-webhook-0",file="/etc/gpuslice/tls/tls.crt"}'
_WEBHOOK_UP = 'up{job="kube-system/gpuslice-webhook",pod="'
_COLLECTOR = f'{c.COLLECTOR_SUCCESS.name}{{node="n1",collector="driver"}}'
_POD_RESOURCES = _COLLECTOR.replace("driver", "pod_resources")
_AT_NODE = '{node="n1"}'
_EXTENDER = EXTENDER_READY + '{pod="'
_NO_ROOM = '{node="n1",reason="no room"}'
_REJECTED = '{pod="a",node="n1",reason="UnexpectedAdmissionError"}'
_LATE = "0x174 1x5"  # a fault at 2 h 55 min, seen at 3 h
_EARLY = "0x60 1x120"

_FULL = _always(_card(c.GPU_MEMORY_USED), "97") | _always(_card(c.GPU_MEMORY_TOTAL), "100")

CASES: dict[str, tuple[Series, Series]] = {
    "GpuExporterDown": (_always(_UP, "0"), _always(_UP, "1")),
    "GpuExporterCollectorFailing": (_always(_COLLECTOR, "0"), _always(_COLLECTOR, "1")),
    "GpuSamplesStale": (
        _always(c.SAMPLE_AGE.name + _AT_NODE, "90"),
        _always(c.SAMPLE_AGE.name + _AT_NODE, "1"),
    ),
    "GpuAttributionUnavailable": (
        _always(c.ATTRIBUTION.name + _AT_NODE, "0"),
        _always(c.ATTRIBUTION.name + _AT_NODE, "1"),
    ),
    "GpuLost": (_always(_card(c.GPU_UP), "0"), _always(_card(c.GPU_UP), "1")),
    "GpuMissing": (
        _always(c.DEVICES.name + _AT_NODE, "7") | _always(c.DEVICES_EXPECTED.name + _AT_NODE, "8"),
        _always(c.DEVICES.name + _AT_NODE, "8") | _always(c.DEVICES_EXPECTED.name + _AT_NODE, "8"),
    ),
    "GpuXidCritical": ({_card(c.XID_ERRORS, ',xid="79"'): _LATE}, {_card(c.XID_ERRORS, ',xid="79"'): _EARLY}),
    "GpuXidContained": (
        {_card(c.XID_ERRORS, ',xid="94"'): _LATE},
        {_card(c.XID_ERRORS, ',xid="94"'): _EARLY},
    ),
    "GpuXidByApplication": (
        {_card(c.XID_ERRORS, ',xid="31"'): "0+1x180"},
        {_card(c.XID_ERRORS, ',xid="31"'): "0x170 1x10"},
    ),
    "GpuOutOfUse": (
        {CARD_HEALTHY + _AGENT_CARD: "1x140 0x40"},
        {CARD_HEALTHY + _AGENT_CARD: "1x160 0x10 1x10"},  # ten minutes after an Xid error
    ),
    "GpuRecoveryNeeded": (_always(_card(c.GPU_RECOVERY), "1"), _always(_card(c.GPU_RECOVERY), "0")),
    "GpuUncorrectableMemoryErrors": (
        _always(_card(c.GPU_UNCORRECTED), "1"),
        _always(_card(c.GPU_UNCORRECTED), "0"),
    ),
    "GpuRowRemapFailed": (
        _always(_card(c.GPU_REMAP_FAILED), "1"),
        _always(_card(c.GPU_REMAP_FAILED), "0"),
    ),
    "GpuThermalSlowdown": (
        {_card(c.GPU_THROTTLED, ',reason="hw_thermal"'): "0+30x180"},
        {_card(c.GPU_THROTTLED, ',reason="sw_power_cap"'): "0+30x180"},
    ),
    "GpuPowerBrake": (
        {_card(c.GPU_THROTTLED, ',reason="hw_power_brake"'): "0+30x180"},
        {_card(c.GPU_THROTTLED, ',reason="hw_power_brake"'): "0+1x180"},
    ),
    "GpuNearSlowdownTemperature": (
        _always(_card(c.GPU_TEMPERATURE_MARGIN), "1"),
        _always(_card(c.GPU_TEMPERATURE_MARGIN), "30"),
    ),
    "GpuMemoryNearlyFull": (
        _FULL | _always(_app(c.MEMORY_USED), "60"),
        _FULL | _always(_app(c.MEMORY_USED), "60") | _always(_app(c.MEMORY_LIMIT), "60"),  # each has its own
    ),
    "GpuContainerPastMemoryLimit": (
        _always(_app(c.MEMORY_USED), "104") | _always(_app(c.MEMORY_LIMIT), "100"),
        _always(_app(c.MEMORY_USED), "103") | _always(_app(c.MEMORY_LIMIT), "100"),
    ),
    "GpuContainerPastMemoryRequest": (
        _always(_app(c.MEMORY_USED), "104") | _always(_app(c.MEMORY_ALLOCATED), "100"),
        _always(_app(c.MEMORY_USED), "104")
        | _always(_app(c.MEMORY_ALLOCATED), "100")
        | _always(_app(c.MEMORY_LIMIT), "105"),  # which is a little more than 100 units are
    ),
    "GpuContainerPastComputeShare": (
        _always(_app(c.SM_UTILIZATION), "0.5") | _always(_app(c.COMPUTE_SHARE), "0.3"),
        _always(_app(c.SM_UTILIZATION), "0.4") | _always(_app(c.COMPUTE_SHARE), "0.3"),
    ),
    "GpuContainerMemoryRefused": (
        {_app(c.MEMORY_REFUSED): "0x177 1x2"},
        {_app(c.MEMORY_REFUSED): "0x10 1x170"},
    ),
    "GpuOverCommitted": (
        _always(_card(c.GPU_MEMORY_ALLOCATED), "101") | _always(_card(c.GPU_MEMORY_TOTAL), "100"),
        _always(_card(c.GPU_MEMORY_ALLOCATED), "100") | _always(_card(c.GPU_MEMORY_TOTAL), "100"),
    ),
    "GpuHeldIdle": (
        {_app(c.SM_UTILIZATION): "0.5x150 0x150", _app(c.MEMORY_ALLOCATED): "5x300"},
        {_app(c.SM_UTILIZATION): "0x250 0.5x50", _app(c.MEMORY_ALLOCATED): "5x300"},
    ),
    "GpuMemoryNotRequested": (
        _always(_app(c.MEMORY_USED), "600000000") | _always(_POD_RESOURCES, "1"),
        _always(_app(c.MEMORY_USED), "600000000")
        | _always(_app(c.MEMORY_ALLOCATED), "5")
        | _always(_POD_RESOURCES, "1"),
    ),
    "GpuMemoryOfNobody": (
        _always(_card(c.UNATTRIBUTED_MEMORY, ',reason="host"'), "600000000"),
        _always(_card(c.UNATTRIBUTED_MEMORY, ',reason="driver"'), "600000000"),
    ),
    "GpuAgentNotRegistered": (
        _always(REGISTERED + _AGENT, "0"),
        {REGISTERED + _AGENT: "1x171 0x3 1x6", "up" + _AGENT: "1x171 0x3 1x6"},  # an update
    ),
    "GpuPodWithoutDevices": ({BARE_POD + _AGENT_POD: "_x160 1x19"}, {BARE_POD + _AGENT_POD: "1x170"}),
    "GpuContainerForgotten": (
        {FORGOTTEN + _AGENT_CONTAINER: "_x165 1x15"},
        {FORGOTTEN + _AGENT_CONTAINER: "_x175 1x5"},
    ),
    "GpuParkedMemoryWaits": (
        {PARKED_WAITING + _AGENT: "0x160 1x20"},
        {PARKED_WAITING + _AGENT: "0x175 1x5"},
    ),
    "GpuGrantsRefused": (
        {REFUSALS + _NO_ROOM: "0+1x180"},
        {REFUSALS + _NO_ROOM: "0x175 1x5"},
    ),
    "GpuBorrowersEnded": (
        {BORROWERS_ENDED + _AT_NODE: "0+1x180"},
        {BORROWERS_ENDED + _AT_NODE: "0x180"},
    ),
    "GpuExtenderSilent": (
        _always(EXTENDER_READY + '{pod="a"}', "0") | _always(EXTENDER_READY + '{pod="b"}', "0"),
        _always(EXTENDER_READY + '{pod="a"}', "1") | _always(EXTENDER_READY + '{pod="b"}', "0"),
    ),
    "GpuWebhookSilent": (
        {f'{_WEBHOOK_UP}a"}}': "1x10 0x170", f'{_WEBHOOK_UP}b"}}': "1x100 _x80"},
        _always(f'{_WEBHOOK_UP}a"}}', "1") | {f'{_WEBHOOK_UP}b"}}': "1x100 _x80"},
    ),
    "GpuCertificateExpires": (  # three hours after the epoch, for a webhook that continues to run
        _always(CERTIFICATE_EXPIRY + _TLS, f"{13 * 86400}"),
        _always(CERTIFICATE_EXPIRY + _TLS, f"{15 * 86400}"),
    ),
    "GpuTokensInClear": (
        _always(TOKENS_IN_CLEAR + '{instance="10.0.0.1:9400"}', "1"),
        _always(TOKENS_IN_CLEAR + '{instance="10.0.0.1:9400"}', "0"),
    ),
    "GpuExtenderSampled": (
        {SAMPLED + '{pod="a"}': "0+1x180"},
        _always(SAMPLED + '{pod="a"}', "7"),
    ),
    "GpuKubeletRejectsPods": (
        {REJECTIONS + _REJECTED: "0x150 1 2 2 3 4 5x25"},
        {REJECTIONS + _REJECTED: "5x160 6x20"},  # a single one
    ),
    "GpuSchedulerSilent": (
        {WAITING + '{pod="a"}': "0x150 2x30", ASKED + _VERB: "0+4x140 560x40"},
        {WAITING + '{pod="a"}': "2x180", ASKED + _VERB: "0x175 2x5"},  # every five minutes
    ),
    "GpuExtenderAskedInVain": (
        {ASKED_IN_VAIN + '{pod="a"}': "0+5x180"},
        {ASKED_IN_VAIN + '{pod="a"}': "0x150 15x30"},  # a change of leader
    ),
    "GpuWatchLate": (
        {AGENT_SILENT + _AGENT: "0x160 0+60x20"},
        {
            WATCH_LATE + '{pod="a"}': "0x150 6 0x30",  # a single one, for a moment
            **_delays(quick=10, slow=0.5),
            **_always(EXTENDER_SILENT + '{pod="b",resource="pods"}', "59"),
            **_always(AGENT_SILENT + _AGENT, "59"),
        },
    ),
}


FURTHER: tuple[tuple[str, Series, int], ...] = (
    # kubelet is not answering: who was given what is not known.
    (
        "GpuMemoryNotRequested",
        _always(_app(c.MEMORY_USED), "600000000") | _always(_POD_RESOURCES, "0"),
        0,
    ),
    # All of them died: their last values do not count.
    ("GpuExtenderSilent", {_EXTENDER + 'a"}': "1x100 _x80", _EXTENDER + 'b"}': "0x100 _x80"}, 1),
    # An update: the previous pod is gone.
    ("GpuExtenderSilent", {_EXTENDER + 'a"}': "1x100 _x80", _EXTENDER + 'b"}': "_x101 1x80"}, 0),
    # A watch that hangs, of the extender and of an agent; and one that reports everything, but late.
    ("GpuWatchLate", {EXTENDER_SILENT + '{pod="a",resource="pods"}': "0x160 0+60x20"}, 1),
    ("GpuWatchLate", {WATCH_LATE + '{pod="a"}': "0x160 10+60x20"}, 1),
    ("GpuWatchLate", _delays(quick=5, slow=5), 1),
    # The first sample of a container is already a refusal; and an exporter that was restarted.
    ("GpuContainerMemoryRefused", {_app(c.MEMORY_REFUSED): "_x177 1x2"}, 1),
    ("GpuContainerMemoryRefused", {_app(c.MEMORY_REFUSED): "7x170 _x3 7x6"}, 0),
    # The exporter was updated: its pod has another address, so the same container has other series.
    (
        "GpuContainerMemoryRefused",
        {_seen(c.MEMORY_REFUSED, "a"): "7x170", _seen(c.MEMORY_REFUSED, "b"): "_x177 7x2"},
        0,
    ),
    (
        "GpuHeldIdle",
        {
            _seen(c.SM_UTILIZATION, "a"): "0x250",
            _seen(c.SM_UTILIZATION, "b"): "_x251 0x50",
            _seen(c.MEMORY_ALLOCATED, "b"): "_x251 5x50",
        },
        1,
    ),
    # A card is still missing after its node, and thus the exporter, was restarted.
    (
        "GpuMissing",
        {c.DEVICES.name + _AT_NODE: "8x100 _x10 7x70", c.DEVICES_EXPECTED.name + _AT_NODE: "8x100 _x10 7x70"},
        1,
    ),
    # An extender without requests has counted nothing, and no pod waits.
    ("GpuSchedulerSilent", {WAITING + '{pod="a"}': "1x180"}, 1),
    ("GpuSchedulerSilent", {WAITING + '{pod="a"}': "0x180"}, 0),
    # Whichever of two exporters scraped, or both: a container is one.
    (
        "GpuContainerPastMemoryLimit",
        _always(_seen(c.MEMORY_USED, "a"), "104")
        | _always(_seen(c.MEMORY_USED, "b"), "104")
        | _always(_seen(c.MEMORY_LIMIT, "b"), "100"),
        1,
    ),
    # An exporter's target is gone: an agent's too. Not if the node is gone, or another pod took its place.
    ("GpuExporterDown", {_EXPORTER_ON_NODE: "1x100 _x80"}, 1),
    ("GpuExporterDown", {_EXPORTER_ON_NODE: "1x100 _x80", _NODE_INFO: "1x180"}, 1),
    ("GpuExporterDown", {_EXPORTER_ON_NODE: "1x100 _x80", _NODE_INFO: "1x100 _x80"}, 0),
    ("GpuExporterDown", {_EXPORTER_ON_NODE: "1x100 _x80", _NODE_INFO: "1x100 _x40 1x40"}, 1),  # rejoined
    (
        "GpuExporterDown",
        {_EXPORTER_ON_NODE: "1x100 _x80", _EXPORTER_ON_NODE.replace("0.1", "0.2"): "_x101 1x80"},
        0,
    ),
    ("GpuAgentNotRegistered", {"up" + _AGENT: "1x100 _x80", REGISTERED + _AGENT: "1x100 _x80"}, 1),
    # The clocks of the nodes are an hour ahead or behind: an Xid counts from when it is seen.
    (
        "GpuXidCritical",
        {_card(c.XID_LAST, ',xid="79"'): "14000x180", _card(c.XID_ERRORS, ',xid="79"'): "1x180"},
        0,
    ),
    (
        "GpuXidCritical",
        {_card(c.XID_LAST, ',xid="79"'): "_x175 60x5", _card(c.XID_ERRORS, ',xid="79"'): _LATE},
        1,
    ),
    # Before the alert, for a pod that is younger than two hours.
    ("GpuHeldIdle", {_app(c.SM_UTILIZATION): "_x250 0x50", _app(c.MEMORY_ALLOCATED): "_x250 5x50"}, 0),
    # An agent that restarts again and again reports nothing about itself.
    ("GpuAgentNotRegistered", {REGISTERED + _AGENT: "1x100 _x80", "up" + _AGENT: "1x100 0x80"}, 1),
)
"""Alert, series, and whether it fires at the end of the series."""


def rule_tests() -> dict[str, Any]:
    """A file for ``promtool test rules``: whether each alert fires at the end of its series."""
    tests = []
    for alert in ALERTS:
        fires, quiet = CASES[alert.name]
        tests += [_test(alert.name, fires, 1), _test(alert.name, quiet, 0)]
    tests += [_test(*case) for case in FURTHER]
    tests.append(_balance())
    tests += [_case(*case) for case in _one_container()]
    # each test evaluates all rules: every minute, as in Prometheus, takes 37 s instead of 9
    return {"rule_files": ["gpuslice.rules.yaml"], "evaluation_interval": "10m", "tests": tests}


def _test(name: str, series: Series, firing: int) -> dict[str, Any]:
    counted = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    return _case(f"{name} {'fires' if firing else 'stays quiet'}", series, counted, firing)


def _case(name: str, series: Series, expression: str, value: float) -> dict[str, Any]:
    minutes = 300 if any("300" in values or "250" in values for values in series.values()) else 180
    sample = {"labels": "{}", "value": value}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": f"{minutes}m", "exp_samples": [sample]}],
    }


def _balance() -> dict[str, Any]:
    """The recorded balance of a card is 0 if containers and the rest add up."""
    series = (
        _always(_app(c.MEMORY_USED), "60")
        | _always(_card(c.UNATTRIBUTED_MEMORY, ',reason="driver"'), "10")
        | _always(_card(c.GPU_MEMORY_USED), "70")
    )
    return _case("a card adds up", series, "sum(gpu:gpuslice_memory_balance:bytes)", 0)


def _one_container() -> list[tuple[str, Series, str, float]]:
    """What autoscalers and records say of one container, whichever exporters have reported it."""
    pod = 'namespace="default",pod="app-0"'
    node = {'node="n1"': 'node="n2"', "GPU-a": "GPU-b"}
    other_node = _seen(c.SM_UTILIZATION, "b")
    for before, after in node.items():
        other_node = other_node.replace(before, after)
    renumbered = _seen(c.SM_UTILIZATION, "b").replace('gpu="0"', 'gpu="1"')
    ways = {
        "its exporter was replaced": (_seen(c.SM_UTILIZATION, "b"), "0.4x179 _", "_x179 0.4x2"),
        "two exporters report it": (_seen(c.SM_UTILIZATION, "b"), "0.4x180", "0.4x180"),
        "its pod was restarted": (_seen(c.SM_UTILIZATION, "b"), "0.4x170 _x5 0.4x10", "_"),
        "its node came back with other numbers of its cards": (renumbered, "0.4x179 _", "_x179 0.4x2"),
        "its pod moved to another node": (other_node, "0.4x179 _", "_x179 0.4x2"),
    }
    queries = {
        "the adapter": (busy_percent(f"{{{pod}}}", "pod"), 40),
        "a record": ("namespace_pod:gpuslice_sm_utilization:ratio", 0.4),
    }
    cases = [
        (f"{name} where {way}", {_seen(c.SM_UTILIZATION, "a"): first, series: second}, f"sum({query})", value)
        for way, (series, first, second) in ways.items()
        for name, (query, value) in queries.items()
    ]
    both = _always(_app(c.SM_UTILIZATION), "0.25") | _always(
        _app(c.SM_UTILIZATION).replace('"main"', '"side"'), "0.5"
    )
    cases += [
        (f"{name} of two containers", both, f"sum({query})", 1.875 * value)
        for name, (query, value) in queries.items()
    ]
    return cases
