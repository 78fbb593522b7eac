"""Sentences about what a pod on a card uses: too much, nothing, or what its neighbours lack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod
from gpuslice.core.units import MIB
from gpuslice.core.words import counted
from gpuslice.diagnosis.advise.facts import suggestion_of
from gpuslice.diagnosis.usage import ContainerUsage
from gpuslice.diagnosis.waste import UsageOf, pod_usage_of


def neighbours_of(view: Pod, ledger: Ledger) -> tuple[tuple[str, int], ...]:
    """The other pods on its cards, by name, with the units that they hold there."""
    holds = ledger.holds.on(view.node) if view.node else None
    return holds.beside(view) if holds is not None else ()


def about_use(view: Pod, ledger: Ledger, usage: Sequence[ContainerUsage]) -> Iterator[str]:
    """What it uses beyond what it asked for, and what it holds in vain."""
    for each in usage:
        if each.excess_bytes:
            why = "nothing limits it on this node" if each.limit_bytes is None else "the library is not in it"
            yield (
                f"Container {each.container} uses {(each.used_bytes or 0) / MIB:.0f} MiB, "
                f"{each.excess_bytes / MIB:.0f} more than it asked for: {why}, and its neighbours lack them."
            )
        if each.borrowed_bytes:
            yield (
                f"Container {each.container} has borrowed {each.borrowed_bytes / MIB:.0f} MiB beyond its "
                "request: programs that keep them are ended once others request them (event "
                "GPUMemoryCalledBack)."
            )
    own = pod_usage_of(view, ledger, usage)
    if own is not None and own.is_spare:
        yield f"It {own.sentence}: others may wait for that. gpuslice waste says who."


def taken_by_neighbours(view: Pod, ledger: Ledger, usage_of: UsageOf) -> Iterator[str]:
    """Who on its cards uses what it was promised."""
    for key, _ in neighbours_of(view, ledger):
        excess = sum(each.excess_bytes for each in usage_of(key) if each.node == view.node)
        if excess:
            yield (
                f"{key} on its card uses {excess / MIB:.0f} MiB more than it asked for: this pod may be "
                f"refused what it was promised, and fail by that. gpuslice explain {key} says why."
            )


def about_size(view: Pod, ledger: Ledger, usage: Sequence[ContainerUsage]) -> Iterator[str]:
    """What was refused, and a better size if one is known."""
    for each in usage:
        if each.refused:
            times = "once" if each.refused == 1 else f"{each.refused:.0f} times"
            yield f"Container {each.container} asked for more memory than its limit, and was refused {times}."
    better, cards = suggestion_of(ledger, view, usage), view.request.card_count if view.request else 1
    if better is None:
        return
    units, mib = counted(better.units * cards, "unit"), better.limit_mib * cards
    if better.more:
        yield (
            f"Ask for at least {units} ({mib} MiB): how much it needs is not known, because it was refused."
        )
    else:
        peak = max(each.peak_bytes or 0 for each in usage) / MIB
        yield (
            f"{units} ({mib} MiB) would have been enough so far: its peak since the start is {peak:.0f} MiB."
        )
