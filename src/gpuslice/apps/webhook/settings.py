"""What can be set about the webhook."""

from __future__ import annotations

from typing import Annotated, Literal

from gpuslice.apps.settings import (
    Host,
    Kubeconfig,
    LogLevel,
    NamesSetting,
    Port,
    Settings,
    SettingsError,
    about,
)
from gpuslice.core.admission import AdmissionRules, EnvSource
from gpuslice.core.contract import NAME_SETS
from gpuslice.core.hami import HamiRules
from gpuslice.core.kai import KaiRules


class WebhookSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice webhook``."""

    port: Port = 8443
    host: Host = "::"
    log_level: LogLevel = "info"
    tls_certificate: Annotated[
        str,
        about(
            "PEM file with the server certificate; plain HTTP without it, which the API server does not "
            "support. Renewals are picked up."
        ),
    ] = ""
    tls_key: Annotated[str, about("PEM file with the key of the certificate.")] = ""
    scheduler_name: Annotated[
        str,
        about(
            "Scheduler for pods that request aliyun.com/gpu-mem and have the default scheduler. Set it if "
            "a second scheduler calls the extender; if empty, pods are not changed."
        ),
    ] = ""
    resource_names: NamesSetting = "aliyun.com"
    runtime_class_name: Annotated[
        str,
        about(
            "Runtime class for pods that request aliyun.com/gpu-mem and name none. Set it if the class, "
            "and not the runtime's default, makes the driver available in containers, as on k3s."
        ),
    ] = ""
    annotations_as_env: Annotated[
        Literal["hidden", "always", "never"],
        about(
            "When the pod's own placement annotations are written into its environment. hidden: in "
            "containers with envFrom, which could contain other values. always: for a device plugin that "
            "guesses which pod it serves; gpuslice's own does not."
        ),
    ] = "hidden"
    allow_cgpu_disable: Annotated[
        bool,
        about(
            "Let a container switch its memory limit off with CGPU_DISABLE=true, as the vendor documents. "
            "Set the agent's as well."
        ),
    ] = False
    hide_cards: Annotated[
        bool,
        about(
            "Show no card to containers of a GPU pod that request none. Turn it off if sidecars monitor "
            "cards."
        ),
    ] = True
    gate_groups: Annotated[
        bool,
        about(
            "Give members of a pod group (labels pod-group.scheduling.sigs.k8s.io/name, /min-available) "
            "the scheduling gate gpuslice.io/pod-group, which the extender removes once it holds cards "
            "for the whole group. Turn it off if no extender of this version runs."
        ),
    ] = True
    annotation_writers: Annotated[
        tuple[str, ...],
        about(
            "Users who may change a pod's placement annotations, such as "
            "system:serviceaccount:NAMESPACE:NAME of extender and device plugin; if empty, everyone who "
            "may change the pod. Group system:masters always may."
        ),
    ] = ()
    agent_account: Annotated[
        str,
        about(
            "The device plugins' account, system:serviceaccount:NAMESPACE:NAME: it may write only what is "
            "its own node's. For Kubernetes before 1.30, which has no policies; its pods are followed."
        ),
    ] = ""
    kubeconfig: Kubeconfig = ""
    accept_hami: Annotated[
        bool, about("Translate pods with HAMi's resource names (nvidia.com/gpumem and others).")
    ] = False
    memory_unit: Annotated[
        Literal["GiB", "MiB"],
        about(
            "Size of one aliyun.com/gpu-mem, to convert HAMi's and KAI's MiB; the same as the device "
            "plugin's."
        ),
    ] = "GiB"
    hami_card_units: Annotated[
        int,
        about(
            "Units of every card of the cluster, for HAMi's percentages; 0 refuses them. Only if all "
            "cards have the same size.",
            ge=0,
        ),
    ] = 0
    hami_model_label: Annotated[
        str, about("Node label that holds the model of the node's cards, for HAMi's use-gputype.")
    ] = "nvidia.com/gpu.product"
    hami_models: Annotated[
        tuple[str, ...],
        about("The values of that label in this cluster; without them use-gputype is refused."),
    ] = ()

    accept_kai: Annotated[
        bool, about("Translate pods with KAI's annotations (gpu-memory, gpu-fraction).")
    ] = False
    kai_card_units: Annotated[
        int,
        about(
            "Units of every card of the cluster, for KAI's gpu-fraction; 0 refuses it. Only if all cards "
            "have the same size.",
            ge=0,
        ),
    ] = 0

    kai_lends: Annotated[
        bool,
        about(
            "The nodes lend what nobody requested (the device plugin's --watchdog=stop): KAI's and Run:ai's "
            "requests are kept, and their limits may be borrowed. Without it, all of a limit is kept."
        ),
    ] = False

    def __post_init__(self) -> None:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("--tls-certificate and --tls-key go together: one of them is missing")

    @property
    def rules(self) -> AdmissionRules:
        return AdmissionRules(
            scheduler=self.scheduler_name,
            runtime_class=self.runtime_class_name,
            env=EnvSource(self.annotations_as_env),
            allow_no_isolation=self.allow_cgpu_disable,
            hide_cards=self.hide_cards,
            writers=frozenset(self.annotation_writers),
            names=NAME_SETS[self.resource_names],
            gate_groups=self.gate_groups,
        )

    @property
    def hami(self) -> HamiRules | None:
        if not self.accept_hami:
            return None
        return HamiRules(self.memory_unit, self.hami_card_units, self.hami_model_label, self.hami_models)

    @property
    def kai(self) -> KaiRules | None:
        rules = KaiRules(self.memory_unit, self.kai_card_units, self.kai_lends)
        return rules if self.accept_kai else None
