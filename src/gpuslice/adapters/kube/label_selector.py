"""Label selectors of objects, and their text in a list request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Requirement(msgspec.Struct):
    """One line of a selector's ``matchExpressions``."""

    key: str = ""
    operator: str = ""
    values: list[str] | None = None

    def __str__(self) -> str:
        values = ",".join(self.values or ())
        words = {"In": f"{self.key} in ({values})", "NotIn": f"{self.key} notin ({values})"}
        words |= {"Exists": self.key, "DoesNotExist": f"!{self.key}"}
        return words[self.operator]


class LabelSelector(msgspec.Struct, rename="camel"):
    match_labels: Mapping[str, str] | None = None
    match_expressions: list[Requirement] | None = None

    def __str__(self) -> str:
        """As in a list request; empty if it selects everything."""
        equal = [f"{key}={value}" for key, value in (self.match_labels or {}).items()]
        return ",".join([*equal, *map(str, self.match_expressions or ())])
