"""What can be set about the extender."""

from __future__ import annotations

from typing import Annotated, Literal

from gpuslice.apps.settings import (
    Host,
    Kubeconfig,
    LogLevel,
    OtlpEndpoint,
    OtlpHeaders,
    Port,
    Settings,
    SettingsError,
    about,
)

SHORTEST_ANSWER_S = 0.1


class ExtenderSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice extender``."""

    port: Port = 12345
    host: Host = "::"
    log_level: LogLevel = "info"
    kubeconfig: Kubeconfig = ""
    policy: Annotated[
        Literal["binpack", "spread", "bestfit", "fgd", "opportunity-cost"],
        about(
            "How nodes and cards are chosen. A node's label ack.node.gpu.placement takes precedence for "
            "its own cards. Choose spread if pods should have cards to themselves while there are enough."
        ),
    ] = "opportunity-cost"
    nominate: Annotated[
        bool,
        about(
            "Nominate the best node for queued pods, so that kube-scheduler tries it first and need not "
            "look at all nodes: a large cluster then schedules several times as many pods per second. Not "
            "for pods with node preferences, nor if fewer than 100 nodes fit. Turn it off if something "
            "else nominates nodes for the same pods."
        ),
    ] = True
    nominate_from: Annotated[
        int,
        about(
            "Nominate only if kube-scheduler has at least this many nodes to look at: a nomination is one "
            "more write per pod, which costs more than looking at a few nodes.",
            ge=1,
        ),
    ] = 250
    filter_best: Annotated[
        int,
        about(
            "How many of the fitting nodes filter lets pass, the best first, so that kube-scheduler need "
            "not score the others; 0 lets all pass. For a pod with node preferences (preferred affinity, "
            "spreading with ScheduleAnyway) all pass. Set it to 1 if kube-scheduler schedules in batches, "
            "which skip prioritize, and packing matters most.",
            ge=0,
        ),
    ] = 64
    explain_refusals: Annotated[
        bool,
        about(
            "Append the request and what is free to each node's reason. Off, because kube-scheduler "
            "combines equal reasons into one line; an event on the pod has the details either way."
        ),
    ] = False
    preemption: Annotated[
        bool,
        about(
            "Evict pods of lower priority if that frees enough of a card and kube-scheduler, which sees "
            "only the node's sum, would evict none. On, like kube-scheduler's own preemption. Turn it off "
            "if that is off, or if no pod may be evicted for a card."
        ),
    ] = True
    bind_errors_as_500: Annotated[
        bool,
        about(
            "Answer HTTP 500 when a bind fails, as the open-source gpushare does. Off, because "
            "kube-scheduler would then hide the reason from the user."
        ),
    ] = False
    bind_timeout_s: Annotated[
        float,
        about(
            "How long a bind call waits for the API server before it answers that the outcome is not "
            "known yet. The default allows for ten answers in a row that ask to retry in a second. Keep "
            "it below kube-scheduler's httpTimeout.",
            unit="s",
            ge=SHORTEST_ANSWER_S,
        ),
    ] = 12.0
    api_timeout_s: Annotated[
        float, about("How long one request to the API server may take.", unit="s", ge=SHORTEST_ANSWER_S)
    ] = 10.0
    leader_elect: Annotated[
        bool,
        about(
            "Be ready only while holding the Lease. Required if two replicas may run at once, including "
            "during an update."
        ),
    ] = False
    lease_name: Annotated[str, about("Name of the Lease.")] = "gpushare-schd-extender"
    lease_namespace: Annotated[str, about("Namespace of the Lease.", env=("POD_NAMESPACE",))] = "kube-system"
    lease_identity: Annotated[
        str,
        about("Our identity in the Lease; the host's name and process if empty.", env=("POD_NAME",)),
    ] = ""
    label_leader: Annotated[
        bool,
        about(
            "Label our own pod gpuslice.io/leader=true while this replica answers, and remove the label "
            "from all others. Needed if a Service selects by it; --lease-identity must then be the pod's "
            "name."
        ),
    ] = False
    lease_duration_s: Annotated[
        float,
        about(
            "How long a lease is valid without renewal, and so the longest time until another replica "
            "takes over.",
            unit="s",
            ge=1,
        ),
    ] = 10.0
    tls_certificate: Annotated[
        str, about("PEM file with the server certificate; plain HTTP without it. Renewals are picked up.")
    ] = ""
    tls_key: Annotated[str, about("PEM file with the key of the certificate.")] = ""
    tls_client_ca: Annotated[
        str,
        about(
            "PEM file with a CA: kube-scheduler's calls are answered only for clients with a certificate "
            "of this CA, as set by the extender's tlsConfig in kube-scheduler's configuration. Without "
            "it, anyone who can reach the port can bind pods. Probes and /version need no certificate; "
            "everything else needs one, or a call from this machine."
        ),
    ] = ""
    tls_client_names: Annotated[
        tuple[str, ...],
        about(
            "Names of which a client's certificate must have one, as common name or DNS name. Needed if "
            "the CA signs for others too; if empty, any certificate of the CA is accepted."
        ),
    ] = ()
    http2: Annotated[
        bool,
        about(
            "Offer HTTP/2, which kube-scheduler uses: one connection for all calls, instead of a TLS "
            "handshake for nearly every bind. Needs --tls-certificate. Turn it off if a proxy in between "
            "does not support it."
        ),
    ] = True
    anonymous: Annotated[
        tuple[Literal["inspect", "metrics"], ...],
        about("What may be read without a certificate despite --tls-client-ca: inspect, metrics or both."),
    ] = ()

    debug_tokens: Annotated[
        bool,
        about(
            "Accept bearer tokens for /debug, if a TokenReview knows the token and a SubjectAccessReview "
            "lets its owner get the path. Only with --tls-certificate: tokens must not be sent over plain "
            "HTTP."
        ),
    ] = False
    otlp_endpoint: OtlpEndpoint = ""
    otlp_headers: OtlpHeaders = ""

    def __post_init__(self) -> None:
        if self.tls_client_ca and not self.tls_certificate:
            raise SettingsError("--tls-client-ca needs --tls-certificate: plain HTTP knows no certificates")
        if self.debug_tokens and not self.tls_certificate:
            raise SettingsError("--debug-tokens needs --tls-certificate: a token is not for plain HTTP")
        if self.tls_client_names and not self.tls_client_ca:
            raise SettingsError("--tls-client-names needs --tls-client-ca: without it nobody shows one")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("--tls-certificate and --tls-key go together: one of them is missing")
        if self.label_leader and not self.lease_identity:
            raise SettingsError("--label-leader needs the pod's name: set env POD_NAME or --lease-identity")
