"""What the dashboards have in common: which series are selected, how they are named, and where a click leads.

`cluster` is a label added by Prometheus' own ``external_labels`` or by a federation; if it does not exist,
"All" matches everything.
"""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c
from gpuslice.diagnosis.prometheus import CARD_LABELS, one
from monitoring.panels import Variable

CLUSTER = 'cluster=~"$cluster"'
APP = f'{{{CLUSTER},namespace=~"$namespace",pod=~"$pod"}}'
CARD = f'{{{CLUSTER},node=~"$node",gpu=~"$gpu"}}'
TEAM = f'{{{CLUSTER},namespace=~"$namespace"}}'
EXTENDER = f"{{{CLUSTER}}}"
DCGM = '{instance=~"$instance",gpu=~"$gpu"}'
WHO = "{{namespace}}/{{pod}} {{container}}"
WHERE = "{{node}} GPU {{gpu}}"
GIB = 1 << 30
MOST = 20


RATE = "rate({}[5m])"


def of_containers(metric: c.Metric, chosen: str = "", of: str = "{}") -> str:
    """One series for each container on a card, whichever exporters report it; `of`: what is made of each."""
    return one(of.format(metric.name + chosen), "gpu")


def of_cards(metric: c.Metric, chosen: str = "", of: str = "{}") -> str:
    """The same for each card, and what else the metric distinguishes of it."""
    more = [label for label in metric.labels if label not in {"node", "gpu_uuid"}]
    return one(of.format(metric.name + chosen), *more, labels=CARD_LABELS)


def most(expression: str) -> str:
    """The highest values at each moment: as many as a panel can draw and a person can read."""
    return f"topk({MOST}, {expression})"


CLUSTERS = Variable("cluster", f"label_values({c.GPU_UP.name}, cluster)")
IN_CLUSTER = f"{{{CLUSTER}}}"
NODES = Variable("node", f"label_values({c.GPU_UP.name}{IN_CLUSTER}, node)")
NAMESPACES = Variable("namespace", f"label_values({c.CONTAINER_INFO.name}{IN_CLUSTER}, namespace)")
CARRIED = "${__url_time_range}&${cluster:queryparam}"
TO_NODE = ("the node's cards", f"/d/gpuslice-node?var-node=${{__field.labels.node}}&{CARRIED}")
TO_APP = (
    "the application",
    "/d/gpuslice-app?var-namespace=${__field.labels.namespace}&var-pod=${__field.labels.pod}&" + CARRIED,
)
TO_TEAM = ("the namespace", f"/d/gpuslice-teams?var-namespace=${{__field.labels.namespace}}&{CARRIED}")
