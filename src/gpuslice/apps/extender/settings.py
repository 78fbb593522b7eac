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
            "How nodes and cards are chosen, except where a node's label ack.node.gpu.placement decides "
            "about its cards. Choose spread to give pods cards to themselves while there are enough."
        ),
    ] = "opportunity-cost"
    nominate: Annotated[
        bool,
        about(
            "Nominate the best node for queued pods, which saves kube-scheduler most of its search. Turn "
            "it off if something else nominates for the same pods."
        ),
    ] = True
    nominate_from: Annotated[
        int,
        about(
            "Nominate only from this many nodes on: for fewer, the write per pod costs more than it saves.",
            ge=1,
        ),
    ] = 700
    filter_best: Annotated[
        int,
        about(
            "How many of the fitting nodes filter lets pass, the best first; 0 means all. Set it to 1 if "
            "kube-scheduler schedules in batches and packing matters most.",
            ge=0,
        ),
    ] = 64
    explain_refusals: Annotated[
        bool,
        about(
            "Append the request and what is free to each node's reason. Off, because kube-scheduler "
            "combines equal reasons into one line."
        ),
    ] = False
    preemption: Annotated[
        bool,
        about(
            "Evict pods of lower priority where only that frees enough of one card. Turn it off if "
            "kube-scheduler's own preemption is off, or no pod may be evicted."
        ),
    ] = True
    autoscaling: Annotated[
        Literal["off", "buffers", "pods"],
        about(
            "Ask an autoscaler for nodes that the sum of a node's cards hides from it, by CapacityBuffers or "
            "by pods that never run, and keep nodes whose pods fit on no other cards."
        ),
    ] = "off"
    card_fit: Annotated[
        bool,
        about(
            "Answer Kueue's admission checks of gpuslice.io/card-fit: a workload goes once cards for all of "
            "its pods are held. Needs Kueue 0.19 or later."
        ),
    ] = False
    bind_errors_as_500: Annotated[
        bool,
        about(
            "Answer HTTP 500 when a bind fails, as the open-source gpushare does; kube-scheduler then "
            "hides the reason."
        ),
    ] = False
    bind_timeout_s: Annotated[
        float,
        about(
            "How long bind waits for the API server before it answers that the outcome is unknown. Keep "
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
            "Be ready only while holding the Lease. Required if two replicas may run at once, as during "
            "an update."
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
            "Label our own pod gpuslice.io/leader=true while it answers, and no other, for a Service "
            "that selects by it. Needs the pod's name as --lease-identity."
        ),
    ] = False
    lease_duration_s: Annotated[
        float,
        about(
            "How long a lease is valid without renewal: the longest time until another replica takes over.",
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
            "PEM file with a CA: only its clients may decide or read. Without it, anyone who can reach "
            "the port can bind pods."
        ),
    ] = ""
    tls_client_names: Annotated[
        tuple[str, ...],
        about(
            "Common or DNS names of which a client's certificate must have one, if the CA signs for "
            "others too."
        ),
    ] = ()
    http2: Annotated[
        bool,
        about(
            "Offer HTTP/2, which saves a TLS handshake for nearly every bind. Needs --tls-certificate. "
            "Turn it off if a proxy in between cannot do it."
        ),
    ] = True
    anonymous: Annotated[
        tuple[Literal["inspect", "metrics"], ...],
        about("What may be read without a certificate: inspect, metrics or both."),
    ] = ()

    debug_tokens: Annotated[
        bool,
        about("Accept bearer tokens of accounts that may get /debug. Needs --tls-certificate."),
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
