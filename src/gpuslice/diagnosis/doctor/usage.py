"""Checks of what exporters measure: does anybody use more than it asked for, and who holds a lot in vain?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from gpuslice.core.units import MIB
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level


def past_request(facts: Facts) -> Iterator[Finding]:
    """Containers that use memory which others were promised, whatever should have prevented it."""
    for each in chain.from_iterable(facts.usage.values()):
        if not each.excess_bytes:
            continue
        where = f"pod {each.namespace}/{each.pod}"
        used, promised = (each.used_bytes or 0) / MIB, (each.promised_bytes or 0) / MIB
        what = (
            f"container {each.container} uses {used:.0f} MiB of GPU {each.gpu} on {each.node} and asked for "
        )
        what += f"{promised:.0f}: its neighbours lack the rest, and fail by that"
        if each.limit_bytes is None:
            fix = (
                "nothing limits it there: raise its request, have the program limit itself, or enable "
                "isolation on the node"
            )
        else:
            fix = (
                "the library is not in it: it is linked statically, or evades it. Delete the pod and ask its "
                f"owner: gpuslice explain {each.namespace}/{each.pod}"
            )
        yield Finding(Level.ERROR if each.limit_bytes is not None else Level.WARNING, where, what, fix)
