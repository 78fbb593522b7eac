"""The page on autoscaling has the table of what the real cluster-autoscaler did."""

from __future__ import annotations

from tests.e2e.autoscaler_scenarios import CLAIMS_ALONE, SCENARIOS
from tests.e2e.cluster import ROOT
from tests.e2e.cluster_autoscaler import Outcome

PAGE = ROOT / "docs" / "operate" / "autoscaling.md"


def test_the_page_says_what_the_autoscaler_did() -> None:
    """What differs is a table, what does not a sentence."""
    rows = [(each.name, shown(each.alone), shown(each.right)) for each in SCENARIOS]
    rows.append(("claims", shown(CLAIMS_ALONE), shown(CLAIMS_ALONE)))
    lines = PAGE.read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    table = {each[0].partition(":")[0]: tuple(each[1:]) for each in cells if len(each) == 3}
    assert {name: table.get(name) for name, *_ in rows} == {
        name: (alone, right) if alone != right else None for name, alone, right in rows
    }
    (same,) = (line for line in lines if line.startswith("The same without and with: "))
    assert same == f"The same without and with: {', '.join(f'{n} ({a})' for n, a, r in rows if a == r)}."


def shown(outcome: Outcome) -> str:
    """In the table's words."""
    nodes = ", ".join(f"{number:+d} {name}".replace("-", "−") for name, number in outcome.nodes.items())
    waiting = f"{outcome.waiting} wait{'s' * (outcome.waiting == 1)}" if outcome.waiting else ""
    return "; ".join(filter(None, (nodes or "none", waiting)))
