"""The contract's annotations and ConfigMap, written and read.

Written: the vendor's first protocol (``ALIYUN_COM_GPU_MEM_*``), and
``scheduler.framework.gpushare.allocation``, which the public command-line tools prefer and which alone can
show a pod whose containers are on different cards.

Read: the amounts are what the pod asks for, if that is known, since a bound pod's request cannot be changed
and annotations can. If the allocation has the same amount, it wins over the first protocol because it is more
exact; else the first protocol wins, because every extender and device plugin writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from gpuslice.core.contract import (
    ANN_ALLOCATION,
    ANN_ASSIGNED,
    ANN_ASSUME_TIME,
    ANN_CARD_UNITS,
    ANN_CORE,
    ANN_INDEX,
    ANN_MEANT,
    ANN_POD_UNITS,
    ANN_TIERS,
    ANN_VISIBLE,
    NODE_GPUS,
    NODE_ORPHANS,
    POD_ANNOTATION_WRITERS,
    UNHEALTHY_CONFIGMAP_PREFIX,
)
from gpuslice.core.errors import ContractError, InvalidRequestError, printable
from gpuslice.core.model import (
    TIERS,
    Card,
    CardSlice,
    ContainerKind,
    ContainerRequest,
    Node,
    Orphan,
    Placement,
    Request,
    Tier,
)
from gpuslice.core.placement import on_cards
from gpuslice.core.request import held_at_peak
from gpuslice.core.units import MOST_UNITS

PLACEMENT_ANNOTATIONS = (
    ANN_INDEX,
    ANN_POD_UNITS,
    ANN_CARD_UNITS,
    ANN_ASSUME_TIME,
    ANN_ASSIGNED,
    ANN_ALLOCATION,
    ANN_CORE,
    ANN_VISIBLE,
    ANN_MEANT,
)
"""Every pod annotation that a placement writes and that a withdrawn one removes."""

LARGEST_BYTES = 256 << 10
"""Of all annotations of an object, names and values together. A Binding may pass it, and then kubelet can
write no status of the pod: the API server checks that, not the Binding (``TotalAnnotationSizeLimitB``)."""

NOT_ALWAYS_WRITTEN = (ANN_CORE, ANN_MEANT)
"""Those that not every placement writes, so that a Binding, which removes nothing, would leave them."""

Table = dict[str, dict[str, int]]
"""{"<container>": {"<card>": amount}}, the shape of the allocation and of the core annotation."""

_TABLE = msgspec.json.Decoder(dict[str, dict[str, int]])
MOST_CARDS = 128
"""Of one node: NVIDIA's driver takes 32 (NV_MAX_DEVICES, nvlimits.h), 16 cards of 7 MIG devices would be 112.

The node with the most cards determines the width of the extender's arrays for every node.
"""


class _GpuRecord(msgspec.Struct, frozen=True):
    index: int
    uuid: str
    memory_mib: int
    units: int
    model: str = ""


class _OrphanRecord(msgspec.Struct):
    pod: str
    cards: dict[int, int]


_ORPHANS = msgspec.json.Decoder(list[_OrphanRecord])
MOST_ORPHANS_TEXT = 64 << 10
_GPUS = msgspec.json.Decoder(list[_GpuRecord])


def placement_annotations(placement: Placement, request: Request, node: Node, now_ns: int) -> dict[str, str]:
    """The annotations that say where a pod was placed; `now_ns` since the epoch.

    ``_DEV`` is the size of the (first) chosen card, not the node's average, so that a container's share of
    *its* card is right on nodes with different cards.
    """
    cards = {gpu.index: gpu for gpu in node.cards}
    written = {
        ANN_INDEX: ",".join(str(part.card) for part in placement.slices),
        ANN_POD_UNITS: str(placement.units),
        ANN_CARD_UNITS: str(cards[placement.slices[0].card].units),
        ANN_ASSUME_TIME: str(now_ns),
        ANN_ASSIGNED: "false",
        ANN_ALLOCATION: encode_table(
            {
                container_key(container, request.app_containers): {
                    str(part.card): amount // len(placement.slices) for part in placement.slices
                }
                for container, amount in held_at_peak(request)
            }
        ),
        ANN_VISIBLE: ",".join(cards[part.card].uuid or str(part.card) for part in placement.slices),
    }
    if request.compute_percent:
        card = str(placement.slices[0].card)
        written[ANN_CORE] = encode_table(
            {
                container_key(container, request.app_containers): {card: container.compute_percent}
                for container, _ in held_at_peak(request)
                if container.compute_percent
            }
        )
    return written


def check_room(annotations: Mapping[str, str], request: Request) -> None:
    """Raises `InvalidRequestError` if a pod's own annotations leave no room for those that it is to get."""
    own = [text for pair in annotations.items() if pair[0] not in POD_ANNOTATION_WRITERS for text in pair]
    containers, cards = len(request.containers), request.card_count
    # a card's uuid and index, a container's name with its tier and its grant, and its amounts on each card
    needed = 1024 + 96 * cards + containers * (208 + 20 * cards)
    if sum(map(len, own)) > (LARGEST_BYTES - needed) // 4:  # else they are few, whatever they are
        size = sum(len(text.encode()) for text in own)
        if size > LARGEST_BYTES - needed:
            must_be = f"at most {LARGEST_BYTES - needed}, so that what the pod is given fits in as well"
            raise InvalidRequestError("metadata.annotations: size in bytes", size, must_be)


def container_key(container: ContainerRequest, app_containers: int) -> str:
    """A container's key in the allocation: app containers by index, init containers counted after them."""
    return str(container.index if container.kind is ContainerKind.APP else app_containers + container.index)


def encode_table(table: Mapping[str, Mapping[str, int]]) -> str:
    return msgspec.json.encode(table).decode()


def decode_table(name: str, text: str) -> Table:
    """The allocation or core annotation `name`. Raises `ContractError` when it has another shape."""
    try:
        table = _TABLE.decode(text)
    except msgspec.DecodeError as error:
        raise ContractError(f'annotation "{name}"', text, '{"<container>":{"<card>":amount}}') from error
    for cards in table.values():
        for card, amount in cards.items():
            if not _is_card(card) or not 0 <= amount <= MOST_UNITS:
                must_be = f"card indices and amounts from 0 to {MOST_UNITS}"
                raise ContractError(f'annotation "{name}"', text, must_be)
    return table


def per_card(name: str, text: str) -> dict[int, int]:
    """The amounts of the allocation or core annotation `name` by card. Raises `ContractError`."""
    sums: dict[int, int] = defaultdict(int)
    for cards in decode_table(name, text).values():
        for card, amount in cards.items():
            sums[int(card)] += amount
    return dict(sums)


def decode_placement(
    annotations: Mapping[str, str], node_name: str, request: Request | None = None
) -> Placement | None:
    """Where the annotations place a pod on `node_name`; None if they do not say.

    Memory and compute are the request's, as in the vendor's inspect command; if that is unknown, the
    annotations'. Raises `ContractError` naming the annotation that cannot be read.
    """
    if ANN_INDEX not in annotations:
        text = annotations.get(ANN_ALLOCATION)
        amounts = per_card(ANN_ALLOCATION, text) if text else {}
        if amounts and request is not None and sum(amounts.values()) != request.units:
            amounts = _evenly(request.units, list(amounts))
        return _placement(node_name, amounts, annotations, request) if amounts else None
    cards = _cards(annotations[ANN_INDEX])
    if request is not None:
        units = request.units
    else:
        text = annotations.get(ANN_POD_UNITS)
        if text is None or not (text.isascii() and text.isdecimal() and 0 < len(text) <= 9):
            raise ContractError(f'annotation "{ANN_POD_UNITS}"', text or "absent", "a whole number of units")
        units = int(text)
    try:
        amounts = per_card(ANN_ALLOCATION, annotations.get(ANN_ALLOCATION, "{}"))
    except ContractError:
        amounts = {}  # only the first protocol is left
    if not amounts or sum(amounts.values()) != units:
        amounts = _evenly(units, cards)
    return _placement(node_name, amounts, annotations, request)


def decode_meant(annotations: Mapping[str, str], node_name: str, request: Request) -> Placement | None:
    """The cards that are meant for a pod that was taken off its card; None if nothing readable says so."""
    if ANN_MEANT not in annotations:
        return None
    try:
        cards = _cards(annotations[ANN_MEANT])
    except ContractError:
        return None
    if len(cards) != request.card_count:
        return None
    return on_cards(node_name, cards, request)


def decode_assume_time(annotations: Mapping[str, str]) -> int:
    """Nanoseconds since the epoch at which the pod was placed; 0 when absent or unreadable."""
    text = annotations.get(ANN_ASSUME_TIME, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def encode_cards(cards: tuple[Card, ...]) -> str:
    """The node annotation ``gpuslice.io/gpus``."""
    records = [_GpuRecord(card.index, card.uuid, card.memory_mib, card.units, card.model) for card in cards]
    return msgspec.json.encode(records).decode()


def decode_cards(text: str) -> tuple[Card, ...]:
    """The cards of the node annotation in index order. Raises `ContractError`."""
    try:
        records = _GPUS.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ContractError(
            f'annotation "{NODE_GPUS}"', text, f"a list of index, uuid, memory_mib, units ({error})"
        ) from error
    indices = {record.index for record in records}
    sane = all(0 <= each.index < MOST_CARDS and 0 <= each.units <= MOST_UNITS for each in records)
    if not sane or len(indices) != len(records):
        must_be = f"cards with different indices below {MOST_CARDS} and units from 0 to {MOST_UNITS}"
        raise ContractError(f'annotation "{NODE_GPUS}"', text, must_be)
    cards = (Card(each.index, each.uuid, each.memory_mib, each.units, each.model) for each in records)
    return tuple(sorted(cards, key=lambda gpu: gpu.index))


def encode_orphans(orphans: Iterable[Orphan]) -> str | None:
    """The node annotation ``gpuslice.io/orphans``; None for no annotation."""
    records = [_OrphanRecord(each.pod, {part.card: part.units for part in each.slices}) for each in orphans]
    return msgspec.json.encode(records).decode() if records else None


def decode_orphans(text: str, cards: Iterable[Card]) -> tuple[Orphan, ...]:
    """What runs on a node with these cards without its pod, by its annotation. Raises `ContractError`."""
    try:
        records = _ORPHANS.decode(text[:MOST_ORPHANS_TEXT])
    except (msgspec.DecodeError, RecursionError) as error:
        must_be = f"a list of pod and units by card ({error})"
        raise ContractError(f'annotation "{NODE_ORPHANS}"', text, must_be) from error
    most = {card.index: card.units for card in cards}
    held = [(card, units) for each in records for card, units in each.cards.items()]
    if not all(0 < units <= most.get(card, 0) for card, units in held):
        must_be = "cards of the node, with no more units than each has"
        raise ContractError(f'annotation "{NODE_ORPHANS}"', text, must_be)
    return tuple(
        Orphan(printable(each.pod), tuple(CardSlice(*part) for part in sorted(each.cards.items())))
        for each in records
    )


def decode_unhealthy(data: Mapping[str, str] | None) -> tuple[frozenset[int], str]:
    """The cards that ConfigMap ``unhealthy-gpu-<node>`` takes out of use, and what in it could not be read.

    An empty or unreadable entry takes no card out of use: a typing error must not stop card 0.
    """
    parts = [part.strip() for part in (data or {}).get("gpus", "").split(",")]
    cards = frozenset(int(part) for part in parts if _is_card(part))
    unreadable = [part for part in parts if part and not _is_card(part)]
    if not unreadable:
        return cards, ""
    problem = f'ConfigMap {UNHEALTHY_CONFIGMAP_PREFIX}<node>: data.gpus has "{", ".join(unreadable)[:80]}"'
    return cards, f'{problem}, must be card indices such as "0,2"; left out'


def _cards(text: str) -> list[int]:
    parts = text.split(",")
    cards = [int(part) for part in parts if _is_card(part)]
    if len(cards) != len(parts) or len(set(cards)) != len(cards):
        raise ContractError(f'annotation "{ANN_INDEX}"', text, 'card indices such as "0" or "0,2"')
    return cards


def _is_card(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4 and int(text) < MOST_CARDS


def _evenly(units: int, cards: list[int]) -> dict[int, int]:
    each, rest = divmod(units, len(cards))
    if rest:
        must_be = f"a multiple of {len(cards)}, the number of cards in {ANN_INDEX}"
        raise ContractError(f'annotation "{ANN_POD_UNITS}"', units, must_be)
    return dict.fromkeys(cards, each)


def _placement(
    node_name: str, units: Mapping[int, int], annotations: Mapping[str, str], request: Request | None
) -> Placement:
    if request is not None:
        core = dict.fromkeys(units, request.compute_percent // len(units))
    else:
        core = per_card(ANN_CORE, annotations[ANN_CORE]) if annotations.get(ANN_CORE) else {}
    shares = (CardSlice(card, amount, core.get(card, 0)) for card, amount in sorted(units.items()))
    return Placement(node_name, tuple(shares))


def encode_tiers(tiers: Mapping[str, Tier]) -> str | None:
    """By container, what enforces its limits if that differs from its node; None for no annotation."""
    words = {name: tier.word for name, tier in sorted(tiers.items())}
    return msgspec.json.encode(words).decode() if words else None


def decode_tiers(annotations: Mapping[str, str]) -> dict[str, Tier]:
    """What cannot be read counts as absent: the node's tier applies."""
    try:
        words = msgspec.json.decode(annotations.get(ANN_TIERS, "{}"), type=dict[str, str])
    except msgspec.MsgspecError:
        return {}
    return {name: TIERS[word] for name, word in words.items() if word in TIERS}
