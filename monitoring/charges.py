"""What each container is charged of its cards: with what is idle and what is nobody's it is the whole card.

A container is charged the larger of what it was guaranteed and what it uses. Where these are together more
than the card, as without isolation, each is charged in proportion. Energy is divided by device time.
Everything is taken at one moment: where a card is not measured, nobody is charged.
"""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c
from gpuslice.diagnosis import bill
from gpuslice.diagnosis.prometheus import CARD_LABELS, one

_ON_CARD = f"on ({CARD_LABELS})"
_TO_CARD = f"{_ON_CARD} group_left ()"


def _card(metric: c.Metric, *more: str, of: str = "{}") -> str:
    return one(of.format(metric.name), *more, labels=CARD_LABELS)


_ALLOCATED, _USED = one(c.MEMORY_ALLOCATED.name), one(c.MEMORY_USED.name)
_HELD = one(f'{{__name__=~"{c.MEMORY_ALLOCATED.name}|{c.MEMORY_USED.name}"}}')
_TOTAL = _card(c.GPU_MEMORY_TOTAL)
_NONE, _WHOLE = f"0 * {_TOTAL}", f"(0 * {_TOTAL} + 1)"
# from the driver's own counter, which goes on where an exporter is replaced; cards before Volta have none
_WATTS = f"((rate({_card(c.GPU_ENERGY)}[5m:30s]) or {_card(c.GPU_POWER)}) and {_ON_CARD} {_TOTAL})"


def _charged(of_container: str, card: str) -> str:
    share = f"clamp_min(sum by ({CARD_LABELS}) ({of_container}) / {_ON_CARD} {card}, 1)"
    return f"({of_container} / {_TO_CARD} {share})"


def _rest(charged: str, card: str, strange: str) -> tuple[str, str]:
    """What nobody is charged for: what is idle, and what `strange` processes have."""
    left = f"({card} - (sum by ({CARD_LABELS}) ({charged}) or {_NONE}))"
    idle = f"clamp_min({left} - clamp_min({strange}, 0), 0)"
    return idle, f"({left} - {idle})"


_MEMORY = _charged(_HELD, _TOTAL)
_MEMORY_IDLE, _MEMORY_OF_NOBODY = _rest(
    _MEMORY,
    _TOTAL,
    f"((sum by ({CARD_LABELS}) ({_card(c.UNATTRIBUTED_MEMORY, 'reason')}) or {_NONE})"
    f" + ({_card(c.GPU_MEMORY_RESERVED)} or {_NONE}))",
)
_SM = _charged(one(f"rate({c.SM_SECONDS.name}[5m])"), _WHOLE)
_SM_IDLE, _SM_OF_NOBODY = _rest(
    _SM,
    _WHOLE,
    f"(sum by ({CARD_LABELS}) ({_card(c.UNATTRIBUTED_SM, 'reason', of='avg_over_time({}[5m])')}) or {_NONE})",
)

CHARGES = {
    bill.GUARANTEED: _ALLOCATED,
    bill.BORROWED: f"clamp_min({_USED} - ({_ALLOCATED} or 0 * {_USED}), 0)",
    bill.USED: _USED,
    bill.MEMORY.charged: _MEMORY,
    bill.MEMORY.idle: _MEMORY_IDLE,
    bill.MEMORY.unattributed: _MEMORY_OF_NOBODY,
    bill.MEMORY.card: _TOTAL,
    bill.SM.charged: _SM,
    bill.SM.idle: _SM_IDLE,
    bill.SM.unattributed: _SM_OF_NOBODY,
    bill.SM.card: _WHOLE,
    bill.POWER.charged: f"{_SM} * {_TO_CARD} {_WATTS}",
    bill.POWER.idle: f"{_SM_IDLE} * {_ON_CARD} {_WATTS}",
    bill.POWER.unattributed: f"{_SM_OF_NOBODY} * {_ON_CARD} {_WATTS}",
    bill.POWER.card: _WATTS,
    # cards, by the name under which OpenCost reads them
    "container_gpu_allocation": "sum by (cluster, node, namespace, pod, container) "
    f"({_MEMORY} / {_TO_CARD} {_TOTAL})",
}
