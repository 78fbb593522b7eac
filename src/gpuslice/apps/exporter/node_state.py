"""What the exporter's tasks know about this node so far. The tasks write it, the page reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuslice.apps.exporter.activity import Activity
from gpuslice.apps.exporter.card_history import CardHistory
from gpuslice.apps.exporter.card_snapshot import NodeSnapshot
from gpuslice.apps.exporter.collectors import CollectorHealth
from gpuslice.apps.exporter.counters import Counters
from gpuslice.apps.exporter.device_grants import DeviceGrants
from gpuslice.apps.exporter.fields import load as load_fields
from gpuslice.apps.exporter.flags import read_upstream_file
from gpuslice.apps.exporter.jobs import Jobs
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.apps.exporter.owners import Owners
from gpuslice.apps.exporter.settings import ExporterSettings


@dataclass(slots=True)
class NodeState:
    """One node. `snapshot` and `grants` are replaced, the others change in place."""

    node: str
    counters: Counters
    history: CardHistory
    jobs: Jobs
    pods: NodePods
    owners: Owners
    collectors: CollectorHealth
    grants: DeviceGrants
    snapshot: NodeSnapshot
    activity: Activity
    expected_cards: int = 0  # the most that were ever there


def initial_state(settings: ExporterSettings, node: str) -> NodeState:
    """Nothing is known yet except which counters to show."""
    counters = Counters(settings.collectors, load_fields())
    if settings.config_file and not settings.collectors:
        named = read_upstream_file(settings.config_file).counters
        if named:
            counters.use(named, settings.config_file)
    pods = NodePods()
    return NodeState(
        node=node,
        counters=counters,
        history=CardHistory(settings.clock_events_count_window_size / 1000),
        jobs=Jobs(settings.hpc_job_mapping_dir),
        pods=pods,
        owners=Owners(pods, Path(settings.proc)),
        collectors=CollectorHealth(),
        grants=DeviceGrants({}),
        snapshot=NodeSnapshot(),
        activity=Activity(Path(settings.state_dir) if settings.state_dir else None),
    )
