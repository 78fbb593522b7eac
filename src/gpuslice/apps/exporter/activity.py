"""When each container last computed on its card, and the most it held there: kept over restarts.

A container that is missing from a few samples is the same afterwards; one of another pod is not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from gpuslice.apps.exporter.card_snapshot import Active, CardSnapshot
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.core.attribution import ContainerKey

ACTIVE_RATIO = 0.01
"""Below this fraction of the card's time, a container is idle."""
FORGET_S = 600.0
KEEP_EVERY_S = 60.0


class _Kept(msgspec.Struct, frozen=True):
    uuid: str
    key: tuple[str, str, str]
    active: Active


_Known = dict[tuple[str, ContainerKey], Active]
_FILE = msgspec.json.Decoder(list[_Kept])


class Activity:
    """Of all cards. `folder`: where it is kept, None for nowhere."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._file = folder / "activity.json" if folder is not None else None
        self._clock = clock
        self._known: _Known = {}
        self._missed_s: dict[tuple[str, ContainerKey], float] = {}  # since when it is in no sample

    @property
    def kept(self) -> bool:
        return self._file is not None

    def load(self) -> None:
        """What was kept. Raises OSError; a file that is damaged is as good as none."""
        try:
            kept = _FILE.decode(self._file.read_bytes()) if self._file is not None else []
        except (FileNotFoundError, msgspec.DecodeError):
            return
        now_s = int(self._clock())  # which may have been set back
        for each in kept:
            active = msgspec.structs.replace(each.active, last_s=min(each.active.last_s, now_s))
            self._known[each.uuid, ContainerKey(*each.key)] = active
        self._missed_s = dict.fromkeys(self._known, float(now_s))

    def save(self) -> None:
        """Whole or not at all. Raises OSError."""
        if self._file is None:
            return
        kept = [_Kept(uuid, (key[0], key[1], key[2]), active) for (uuid, key), active in self._known.items()]
        temporary = self._file.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(kept))
        temporary.replace(self._file)

    def after(
        self, cards: Iterable[CardSnapshot], pods: NodePods
    ) -> Mapping[tuple[str, ContainerKey], Active]:
        """As of this sample. A container that is seen for the first time counts as active until now."""
        now_s = self._clock()
        shown: _Known = {}
        for card in cards:
            for key, each in card.containers.items():
                place = card.sample.uuid, key
                pod = pods.pod(key.namespace, key.pod)
                uid = pod.uid if pod is not None else ""
                last = self._known.get(place)
                if last is None or (uid and last.pod_uid and last.pod_uid != uid):
                    last = Active(uid, int(now_s), 0)
                active_s = int(now_s) if (each.sm_ratio or 0.0) >= ACTIVE_RATIO else last.last_s
                peak_bytes = max(last.peak_bytes, each.used_bytes or 0)
                if (active_s, peak_bytes) != (last.last_s, last.peak_bytes) or (uid and not last.pod_uid):
                    last = Active(uid or last.pod_uid, active_s, peak_bytes)
                shown[place] = last
        self._missed_s = {
            place: self._missed_s.get(place, now_s)
            for place in self._known.keys() - shown.keys()
            if now_s - self._missed_s.get(place, now_s) < FORGET_S
        }
        self._known = {**{place: self._known[place] for place in self._missed_s}, **shown}
        return shown
