"""Quotas and ranges of a namespace that are meant for shared cards and do not do what their author means.

Of a device plugin's resource a ResourceQuota counts ``requests.NAME`` alone; any other key is valid, and
counts nothing. A pod asks in the names that nodes offer once the webhook has seen it, so that the other set
of names, and HAMi's, count nothing either. Of a LimitRange, `max` is a default as well: the API server makes
it the limit of each container that has none (``SetDefaults_LimitRangeItem``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from gpuslice.core.contract import NAME_SETS, ResourceNames
from gpuslice.core.hami import CORES, MEMORY, MEMORY_PERCENT
from gpuslice.core.lookalikes import resource_hint
from gpuslice.core.model import Refusal
from gpuslice.core.quantity import whole_number

Object = Mapping[str, Any]
_REQUESTS, _LIMITS = "requests.", "limits."
_HAMI = {MEMORY: "memory", MEMORY_PERCENT: "memory", CORES: "compute"}


def quota_hints(quota: Object, offered: Collection[ResourceNames], others: Collection[str]) -> Iterator[str]:
    """What a ResourceQuota limits in vain. `offered`: the sets of names of the nodes; `others`: everything
    else that a node offers."""
    for key in (quota.get("spec") or {}).get("hard") or {}:
        name = key.removeprefix(_REQUESTS).removeprefix(_LIMITS).removeprefix("count/")
        if name in others:
            continue
        right = _meant(name, offered)
        if right and key != _REQUESTS + right:
            yield f"limits {key}, under which nothing is counted: limit {_REQUESTS}{right}"
        elif not right and (hint := resource_hint(name)):
            yield f"limits {key}, under which nothing is counted: {hint}"


def why_over_quota(quotas: Iterable[Object], name: str, added: int, asked: int) -> Refusal | None:
    """Why a namespace's quotas leave no room for `asked` more units of `name`; None if they do.

    `added`: what its pods hold beyond their specs, which the API server does not count.
    """
    for quota in quotas:
        status, key = quota.get("status") or {}, _REQUESTS + name
        hard = whole_number((status.get("hard") or {}).get(key))
        used = (whole_number((status.get("used") or {}).get(key)) or 0) + added
        if hard is not None and used + asked > hard:
            found = (quota.get("metadata") or {}).get("name", "")
            detail = f"asked for {asked} more, {used} of {hard} {key} are used"
            return Refusal(f"The namespace's quota {found} is exceeded", detail=detail)
    return None


def range_hints(limits: Object, offered: Collection[ResourceNames]) -> Iterator[str]:
    """What a LimitRange does to containers that want no part of a card, or that ask in other names."""
    for each in (limits.get("spec") or {}).get("limits") or ():
        most, given = each.get("max") or {}, each.get("default") or {}
        for name in dict.fromkeys([*most, *given, *(each.get("min") or {})]):
            right = _meant(name, offered)
            if right and right != name:
                yield f"limits {name}, in which no pod asks once it is stored: limit {right}"
            elif right and each.get("type") == "Container" and whole_number(given.get(name, most.get(name))):
                yield (
                    f"gives {given.get(name, most.get(name))} {name} to every container that has no limit of "
                    f'its own, sidecars too: set default and defaultRequest of {name} to "0"'
                )


def _meant(name: str, offered: Iterable[ResourceNames]) -> str:
    """The offered name of the same thing; "" if it is none of ours, or nothing is offered."""
    sets = list(offered)
    of_set = {getattr(names, part): part for names in NAME_SETS.values() for part in ("memory", "compute")}
    part = of_set.get(name) or _HAMI.get(name)
    if part is None:
        return ""
    right = [getattr(names, part) for names in sets] or [name if name in of_set else ""]
    return name if name in right else str(right[0])
