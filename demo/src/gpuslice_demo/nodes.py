"""The machines of a story."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node. `cards`: names of simulated profiles; `exclusive`: they are offered as ``nvidia.com/gpu``."""

    name: str
    address: str
    cards: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    exclusive: bool = False
    version: str = "v1.36.2"
    subnet: str = "172.20.64"
