"""What a scrape gets: bytes made once for each sample, with the figures of this moment behind them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gpuslice.adapters.web.exposition import Family, Format, Piece, end_of, pieces, whole_page
from gpuslice.apps.exporter import ack, dcgm, page
from gpuslice.apps.exporter.counters import CounterKind
from gpuslice.apps.exporter.entities import DcgmStyle, patterns_of
from gpuslice.apps.exporter.sampler import Snapshot
from gpuslice.apps.exporter.settings import parse_devices

if TYPE_CHECKING:
    from gpuslice.apps.exporter.main import Exporter


class View:
    """Renders lazily: a sample that nobody scrapes costs nothing here."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._key: tuple[float, int, int] | None = None
        self._pages: dict[Format, list[Piece]] = {}
        settings = exporter.settings
        self._context = page.PageContext(
            exporter.node, exporter.directory, exporter.xids, settings.max_series
        )
        self._series = 0
        self._style = self._make_style()

    def metrics(self, format: Format) -> list[Piece]:
        """The whole page now. Pieces that did not change since it was asked for last are the same."""
        snapshot = self._current()
        key = (snapshot.taken_at_s, self._exporter.config.version, self._exporter.directory.version)
        if key != self._key:
            self._pages.clear()
            self._key = key
        if format not in self._pages:
            self._pages[format] = pieces(self._families(snapshot), format)
            self._series = sum(piece.samples for piece in self._pages[format])
        own = page.self_families(self._exporter.node, self._report(snapshot))
        return [*self._pages[format], *pieces(own, format), *end_of(format)]

    def legacy(self, format: Format) -> list[Piece]:
        """The page of the vendor's old exporter."""
        return whole_page(ack.legacy_families(self._current(), self._exporter.node), format)

    def not_ready(self) -> str:
        return "" if self._exporter.sampler.snapshot.taken_at_s else "no sample of the cards yet"

    def state(self) -> dict[str, Any]:
        """For ``/debug/state``."""
        exporter = self._exporter
        return {
            "node": exporter.node,
            "settings": exporter.shown_settings(),
            "collectors": {name: str(reading) for name, reading in exporter.health.readings.items()},
            "cards": [str(card) for card in exporter.sampler.snapshot.cards],
            "lost": [str(card) for card in exporter.sampler.snapshot.lost],
            "config_problems": list(exporter.config.file.problems),
        }

    def _current(self) -> Snapshot:
        """The last sample, or an empty one when it is too old to be shown."""
        snapshot = self._exporter.sampler.snapshot
        age_s = time.monotonic() - snapshot.taken_at_s
        return snapshot if snapshot.taken_at_s and age_s <= self._exporter.settings.stale_s else Snapshot()

    def _families(self, snapshot: Snapshot) -> list[Family]:
        exporter, settings = self._exporter, self._exporter.settings
        found = page.families(snapshot, self._context)
        found += dcgm.families(self._dcgm_inputs(snapshot))
        if settings.ack_metrics:
            owners = exporter.sampler.last_owners
            found += ack.custom_families(
                snapshot, owners, exporter.node, settings.ack_node_pool, name_of=exporter.owners.program
            )
        if settings.kubernetes_enable_pod_labels:
            allowed = self._style.labels_of_pods or ()
            found.append(page.pod_label_family(exporter.directory, snapshot, exporter.node, allowed))
        return found

    def _dcgm_inputs(self, snapshot: Snapshot) -> dcgm.DcgmInputs:
        exporter = self._exporter
        return dcgm.DcgmInputs(
            counters=exporter.config.file.counters,
            snapshot=snapshot,
            xids=exporter.xids,
            directory=exporter.directory,
            clock_windows=exporter.clocks.counts(),
            rises=exporter.rises.by_card(),
            jobs=exporter.jobs.read(),
            now_s=time.time(),
            style=self._style,
        )

    def _make_style(self) -> DcgmStyle:
        settings = self._exporter.settings
        chosen = parse_devices(settings.devices)
        allowed = patterns_of(settings.kubernetes_pod_label_allowlist_regex)
        return DcgmStyle(
            hostname="" if settings.no_hostname else self._exporter.node,
            hostname_label=settings.compat_hostname_label,
            old_labels=settings.use_old_namespace,
            join_model=settings.replace_blanks_in_model_name,
            upstream_types=settings.metric_types == "upstream",
            pod_labels=settings.compat_pod_labels == "exclusive",
            virtual=settings.kubernetes_virtual_gpus,
            claims=settings.kubernetes_enable_dra,
            pod_uid=settings.kubernetes_enable_pod_uid,
            labels_of_pods=allowed if settings.kubernetes_enable_pod_labels else None,
            cards=chosen.whole,
            instances=chosen.divided,
            chosen_instances=chosen.instances,
            xid_window_ms=settings.xid_count_window_size,
            clock_window_ms=settings.clock_events_count_window_size,
        )

    def _report(self, snapshot: Snapshot) -> page.SelfReport:
        exporter = self._exporter
        taken_at_s = exporter.sampler.snapshot.taken_at_s
        return page.SelfReport(
            readings=exporter.health.readings,
            sample_age_s=time.monotonic() - taken_at_s if taken_at_s else None,
            attributed=self._attributed(snapshot),
            devices=len(snapshot.cards) if snapshot.taken_at_s else None,
            expected=exporter.sampler.expected,
            supported=self._supported(snapshot),
            config_ok=exporter.config.ok,
            config_problems=len(exporter.config.file.problems),
            series=self._series,
        )

    def _attributed(self, snapshot: Snapshot) -> bool | None:
        if not self._exporter.settings.kubernetes or not snapshot.cards:
            return None
        return all(card.attributed for card in snapshot.cards)

    def _supported(self, snapshot: Snapshot) -> dict[str, bool]:
        """Which counters of the file any card gives; nothing while no card answers."""
        if not snapshot.cards:
            return {}
        given = {number for card in snapshot.cards for number in card.sample.fields} | {dcgm.XID_FIELD}
        given |= {n for card in snapshot.cards for device in card.sample.mig for n in device.fields}
        return {
            counter.name: counter.field.id in given
            for counter in self._exporter.config.file.counters
            if counter.field is not None and counter.kind is not CounterKind.LABEL
        }
