"""What a scrape gets: bytes made once for each sample, followed by the values of this moment."""

from __future__ import annotations

import time
from typing import Any

from gpuslice.adapters.web.exposition import Format, Piece, pieces
from gpuslice.apps.exporter import ack, dcgm, own_families
from gpuslice.apps.exporter.card_snapshot import NodeSnapshot
from gpuslice.apps.exporter.dcgm_entities import DcgmStyle, patterns_of
from gpuslice.apps.exporter.node_state import NodeState
from gpuslice.apps.exporter.settings import ExporterSettings, parse_devices
from gpuslice.apps.settings import shown


class MetricsPage:
    """Renders lazily: a sample that nobody scrapes costs nothing here."""

    def __init__(self, settings: ExporterSettings, state: NodeState) -> None:
        self._settings = settings
        self._state = state
        self._key: tuple[float, int, int] | None = None
        self._pages: dict[Format, list[Piece]] = {}
        self._series = 0
        self._context = own_families.PageContext(
            state.node, state.pods, state.history.xids, settings.max_series
        )
        chosen = parse_devices(settings.devices)
        self._pod_labels = patterns_of(settings.kubernetes_pod_label_allowlist_regex)
        self._style = DcgmStyle(
            hostname="" if settings.no_hostname else state.node,
            hostname_label=settings.compat_hostname_label,
            old_labels=settings.use_old_namespace,
            join_model=settings.replace_blanks_in_model_name,
            upstream_types=settings.metric_types == "upstream",
            pod_labels=settings.compat_pod_labels == "exclusive",
            virtual=settings.kubernetes_virtual_gpus,
            claims=settings.kubernetes_enable_dra,
            pod_uid=settings.kubernetes_enable_pod_uid,
            labels_of_pods=self._pod_labels if settings.kubernetes_enable_pod_labels else None,
            cards=chosen.whole,
            instances=chosen.divided,
            chosen_instances=chosen.instances,
            xid_window_ms=settings.xid_count_window_size,
            clock_window_ms=settings.clock_events_count_window_size,
        )

    def render(self, format: Format) -> list[Piece]:
        """The current page without its end. Pieces that have not changed are the same objects."""
        settings, state, snapshot = self._settings, self._state, self._snapshot()
        key = (snapshot.taken_at_s, state.counters.version, state.pods.version)
        if key != self._key:
            self._pages.clear()
            self._key = key
        if format not in self._pages:
            found = own_families.families(snapshot, self._context)
            found += dcgm.families(
                dcgm.DcgmInputs(
                    counters=state.counters.file.counters,
                    snapshot=snapshot,
                    history=state.history,
                    pods=state.pods,
                    jobs=state.jobs.read(),
                    now_s=time.time(),
                    style=self._style,
                )
            )
            if settings.ack_metrics:
                found += ack.custom_families(
                    snapshot, state.node, settings.ack_node_pool, name_of=state.owners.program
                )
            if settings.kubernetes_enable_pod_labels:
                found.append(
                    own_families.pod_label_family(state.pods, snapshot, state.node, self._pod_labels)
                )
            self._pages[format] = pieces(found, format)
            self._series = sum(piece.samples for piece in self._pages[format])
        own = own_families.self_families(state, snapshot, self._series, kubernetes=settings.kubernetes)
        return [*self._pages[format], *pieces(own, format)]

    def render_legacy(self, format: Format) -> list[Piece]:
        """The page of the vendor's old exporter."""
        return pieces(ack.legacy_families(self._snapshot(), self._state.node), format)

    def not_ready(self) -> str:
        return "" if self._state.snapshot.taken_at_s else "no sample of the cards yet"

    def debug_state(self) -> dict[str, Any]:
        """For ``/debug/state``."""
        state = self._state
        return {
            "node": state.node,
            "settings": shown(self._settings),
            "collectors": {name: str(reading) for name, reading in state.collectors.readings.items()},
            "cards": [str(card) for card in state.snapshot.cards],
            "lost": [str(card) for card in state.snapshot.lost],
            "config_problems": list(state.counters.file.problems),
        }

    def _snapshot(self) -> NodeSnapshot:
        """The last one, or an empty one if it is too old to show."""
        snapshot = self._state.snapshot
        age_s = time.monotonic() - snapshot.taken_at_s
        return snapshot if snapshot.taken_at_s and age_s <= self._settings.stale_s else NodeSnapshot()
