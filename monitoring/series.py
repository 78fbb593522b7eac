"""Series of processes other than the exporter, as alerts and boards read them."""

from __future__ import annotations

REGISTERED = "gpuslice_agent_registered"
BARE_POD = "gpuslice_agent_pod_without_devices"
FORGOTTEN = "gpuslice_agent_container_forgotten"
REFUSALS = "gpuslice_agent_refusals_total"
BORROWERS_ENDED = "gpuslice_agent_borrowers_ended_total"
PARKED_WAITING = "gpuslice_agent_parked_waiting"
EXTENDER_READY = "gpuslice_extender_ready"
SAMPLED = "gpuslice_extender_sampled_pods_total"
REJECTIONS = "gpuslice_extender_rejections_total"
WAITING = "gpuslice_extender_waiting_pods"
ASKED = "gpuslice_extender_requests_total"
ASKED_IN_VAIN = "gpuslice_extender_asked_while_not_ready_total"
WATCH_LATE = "gpuslice_extender_watch_late_seconds"
WATCH_DELAY = "gpuslice_extender_watch_delay_seconds_bucket"
EXTENDER_SILENT, AGENT_SILENT = (f"gpuslice_{each}_watch_silent_seconds" for each in ("extender", "agent"))
CARD_HEALTHY = "gpuslice_agent_card_healthy"
CERTIFICATE_EXPIRY = "gpuslice_process_certificate_expiry_timestamp_seconds"
TOKENS_IN_CLEAR = "gpuslice_process_tokens_in_clear"
WEBHOOK_UP = 'up{job=~".*gpuslice-webhook"}'
_OF_AGENT = {
    REGISTERED,
    BARE_POD,
    FORGOTTEN,
    REFUSALS,
    BORROWERS_ENDED,
    PARKED_WAITING,
    AGENT_SILENT,
    CARD_HEALTHY,
}
OF_OTHERS = frozenset({*_OF_AGENT, EXTENDER_READY, SAMPLED, REJECTIONS, CERTIFICATE_EXPIRY, TOKENS_IN_CLEAR})
"""Metrics of the agent, the extender and every process; the rest is the exporter's catalogue."""
