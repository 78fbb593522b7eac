"""Figures of the page add up: cards, teams, waste and header, of any cluster."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from gpuslice.core.units import limit_mib
from tests.unit.test_console_words import scripted

SUMS = """
import { readFileSync } from "node:fs";
import { store, apply, totals, capacity, unitsInMiB } from "./store.js";
import { teams } from "./teams.js";
import { wasters } from "./waste.js";
globalThis.document.documentElement.lang = "en";
const sum = (rows, name) => rows.reduce((total, each) => total + each[name], 0);
console.log(JSON.stringify(JSON.parse(readFileSync("given.json")).map((given) => {
  apply({ full: true, version: "1", cluster: { now: 0, mayListNodes: true }, ...given });
  const [all, waste, header] = [teams(), wasters(), totals()];
  const nodes = [...store.tables.nodes.values()];
  const wall = (node) => node.cards.map((card) => [unitsInMiB(card[3], card), capacity(node, card)]);
  const cards = nodes.flatMap(wall);
  return {
    header,
    teams: { held: sum(all, "heldMiB"), used: sum(all, "usedMiB"), unused: sum(all, "unusedMiB") },
    waste: Object.fromEntries(["held", "used", "unused", "excess"].map((name) => [name, sum(waste, name)])),
    wall: { held: sum(cards, 0), capacity: sum(cards, 1) },
  };
})));
"""
SIZES = ((16130, 15), (23028, 22), (81559, 79), (16384, 16384))


def cluster(dice: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Nodes that are ready or not, cards out of use, pods with and without limits and measurements."""
    nodes, pods, usage = [], [], []
    for number in range(dice.randint(1, 4)):
        name, (mib, units) = f"n{number}", dice.choice(SIZES[:3])
        isolated, cards = dice.random() < 0.6, []
        for index in range(dice.randint(1, 4)):
            left = units
            for pod in range(dice.randint(0, 3)):
                if (asked := dice.randint(1, units)) > left:
                    continue
                left -= asked
                who = {"namespace": f"team-{dice.randint(0, 2)}", "name": f"p-{number}-{index}-{pod}"}
                pods.append({**who, "units": asked, "node": name, "slices": [[index, asked]]})
                if dice.random() < 0.8:
                    held = limit_mib(mib, asked, units)
                    used = round(held * dice.choice((0, 0.3, 1, 1 if isolated else 1.8)))
                    usage.append({**who, "used": used, "held": held} | ({"limit": held} if isolated else {}))
            cards.append([index, units, mib, units - left, 0])
        state = dice.choice(({}, {}, {"state": "notReady"}, {"state": "cordoned"}))
        sick = {"sick": [0]} if dice.random() < 0.3 else {}
        nodes.append({"name": name, "cards": cards, "shared": True, **state, **sick})
    return {"nodes": nodes, "pods": pods, "podUsage": usage}


def test_header_wall_teams_and_waste_tell_the_same_of_any_cluster(tmp_path: Path) -> None:
    given = [cluster(random.Random(seed)) for seed in range(200)]
    for of, found in zip(given, scripted(tmp_path, SUMS, given), strict=True):
        header, teams, waste, wall = (found[name] for name in ("header", "teams", "waste", "wall"))
        assert teams["held"] == waste["held"]
        assert 0 <= header["held"] - waste["held"] <= len(of["pods"])  # each part is cut to whole MiB
        assert (header["held"], header["capacity"]) == (wall["held"], wall["capacity"])
        assert header["used"] == teams["used"] == waste["used"]
        assert header["unused"] == teams["unused"] == waste["unused"]
        assert header["heldMeasured"] - header["used"] == header["unused"] - waste["excess"]
        assert header["held"] <= header["capacity"]
        usable = [node for node in of["nodes"] if "state" not in node and "sick" not in node]
        if usable == of["nodes"]:
            assert header["capacity"] == sum(card[2] for node in of["nodes"] for card in node["cards"])
