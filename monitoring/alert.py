"""One alert, and the rule that Prometheus loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNBOOK = "docs/operate/alerts.md"


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` and `action` may name labels: {{ $labels.pod }}."""

    name: str
    expression: str
    severity: str
    summary: str
    action: str
    lasting: str = "0s"

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.action,
                "runbook_url": self.runbook,
            },
        }

    @property
    def runbook(self) -> str:
        """Its section on the runbook page; the chart puts the address before it."""
        return f"{RUNBOOK}#{self.name.lower()}"
