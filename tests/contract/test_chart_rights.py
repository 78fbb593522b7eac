"""What the chart's roles grant, as the threat model's table has it, and what narrows it.

python -m tests.contract.test_chart_rights    # writes the table anew
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.guarded_cluster import Grant, grants_of, rendered

PAGE = Path(__file__).resolve().parents[2] / "docs" / "user" / "security.md"
BEGIN, END = "<!-- rights -->\n", "<!-- end of rights -->\n"
VALUES = (
    "webhook.enabled=true", "exporter.enabled=true", "console.enabled=true", "dra.enabled=true",
    "installers.enabled=true", "scheduler.enabled=true", "wholeCards.daemonSet=nvidia/plugin",
    "extender.autoscaling=buffers", "extender.cardFit=true",
    "devicePlugin.parkingHostMemoryMiB=1",
)  # fmt: skip
OPERATIONS = {"create": "CREATE", "update": "UPDATE", "patch": "UPDATE", "delete": "DELETE"}
AGENT = "gpushare-device-plugin"
SYNTHETIC = "resourceclaims/driver"  # of no object: the API server asks for it of who writes a claim's status


def policies(objects: list[dict[str, Any]], account: str) -> dict[str, list[dict[str, Any]]]:
    """The rules of the policies that hold an account to something."""
    return {
        each["metadata"]["name"]: each["spec"]["matchConstraints"]["resourceRules"]
        for each in objects
        if each["kind"] == "ValidatingAdmissionPolicy"
        and any(
            f":{account}'" in condition["expression"] and "!(" not in condition["expression"]
            for condition in each["spec"].get("matchConditions", ())
        )
    }


def narrowing(grant: Grant, rules: dict[str, list[dict[str, Any]]]) -> str:
    """The policy that looks at what this right is used for; "" for none."""
    for name, each in rules.items():
        for rule in each:
            if (
                grant.group in rule["apiGroups"]
                and grant.resource in rule["resources"]
                and OPERATIONS.get(grant.verb) in rule["operations"]
            ):
                return name
    return ""


@pytest.mark.parametrize("version", ["1.30.0", "1.33.0", "1.34.0", "1.35.0", "1.36.0"])
def test_each_right_of_an_agent_to_write_is_held_to_its_node(version: str) -> None:
    """By resource, subresource and verb: a subresource that no rule names is not looked at."""
    values = ["exporter.enabled=true", *(["dra.enabled=true"] if version >= "1.34" else [])]
    objects = rendered(*values, version=version)
    rules = policies(objects, AGENT)
    grants = grants_of(objects)
    free = {
        grant
        for grant in grants[AGENT]
        if grant.verb in OPERATIONS and grant.resource != SYNTHETIC and not narrowing(grant, rules)
    }
    assert free == set()
    assert {grant.verb for grant in grants["gpuslice-exporter"]} <= {"get", "list", "watch"}


def table() -> str:
    objects = rendered(*VALUES)
    rows = ["| account | verbs | resources | held to |", "|---|---|---|---|"]
    for account, grants in sorted(grants_of(objects).items()):
        rules = policies(objects, account)
        verbs: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        for grant in sorted(grants):
            held = " ".join(
                filter(
                    None,
                    (grant.namespace and f"namespace `{grant.namespace}`", grant.name and f"`{grant.name}`"),
                )
            )
            policy = narrowing(grant, rules)
            held = "; ".join(filter(None, (held, policy and f"its own node, by `{policy}`")))
            resource = f"{grant.resource}.{grant.group}" if grant.group else grant.resource
            verbs[account, resource, held].append(grant.verb)
        resources: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for (_, resource, held), given in verbs.items():
            resources[", ".join(given), held].append(f"`{resource}`")
        rows += [
            f"| `{account}` | {given} | {', '.join(those)} | {held} |"
            for (given, held), those in resources.items()
        ]
    return "\n".join(rows) + "\n"


def test_the_threat_model_lists_every_right() -> None:
    page = PAGE.read_text()
    shown = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert shown == table(), "python -m tests.contract.test_chart_rights"


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN)] + BEGIN + table() + page[page.index(END) :])
