"""What the API server assigns only once: uids, suffixes of generated names, service addresses, node ports."""

from __future__ import annotations

import random
import uuid

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_FIRST_NODE_PORT, _LAST_NODE_PORT = 30000, 32767


class Identities:
    """All from one random number generator, so that a run can be repeated exactly."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._services = 0

    def new_uid(self) -> str:
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    def new_suffix(self) -> str:
        return "".join(self._dice.choice(_SUFFIX_LETTERS) for _ in range(5))

    def new_service_ip(self) -> str:
        self._services += 1
        return f"10.96.{self._services // 250}.{self._services % 250 + 1}"

    def new_node_port(self) -> int:
        return self._dice.randint(_FIRST_NODE_PORT, _LAST_NODE_PORT)
