"""The page in Chinese: each sentence that the product says of a cluster is in the catalogue."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuslice
from tests.tools import find

SOURCE = Path(gpuslice.__file__).parent
STATIC = SOURCE / "apps" / "console" / "static"
CATALOGUE: dict[str, str] = json.loads((STATIC / "sentences.zh.json").read_text())
SAYING = (
    *(
        f"core/{name}.py"
        for name in ("explanation", "lookalikes", "node_filters", "placement", "request", "claim_shape")
    ),
    *(
        f"diagnosis/doctor/{name}.py"
        for name in ("nodes", "pods", "plugins", "rejections", "claims", "services")
    ),
    "diagnosis/explain/rule.py",
    "diagnosis/explain/use.py",
    "diagnosis/explain/others.py",
    "diagnosis/claims.py",
    "apps/console/usage_reader.py",
)
"""Files whose sentences the page shows."""
PIECES = {
    "{} gives",
    "{} are wanted {}",
    "{} give",
    "{} is",
    "{} are",
    "{} {}",
    "{} and {}",
    "{} of {}",
    "{} cards out by claims alone: to have a part of one there, label the pod's namespace {}=true and "
    "recreate the pod.",
    "MiB of memory",
    "{} {} are wanted, {} has {} of {} left",
    "card that has",
    "cards that have",
    "best joined and {}",
    "It is already on the {} {} room for it.",
    "Its {}",
    "kubectl label node {} --overwrite {}=true, {}",
    "which has cards",
    "where NODE is one with cards",
    "more pod",
    "{}: a pod's containers share one card",
}
"""Parts that sentences are put together from: the catalogue has the whole ones."""
ELSEWHERE = {
    "pod kube-system/{}",
    "makes at most {} claims a second (--kube-api-qps={}): pods that start in large numbers wait for it",
    "give kube-controller-manager --kube-api-qps={} and --kube-api-burst={}",
    "nodes give their cards out by claims and there is no DeviceClass {}",
    "install the chart with --set dra.enabled=true; Kubernetes must be 1.34 or newer",
}
"""What `gpuslice doctor` alone looks at."""


WORDS = re.compile(r"[A-Za-z]{2,} [a-z]{2,}")


def variants(node: ast.expr) -> list[str]:
    """The texts that a string in the source may become; `{}` stands for what is put in."""
    if isinstance(node, ast.Constant):
        return [re.sub(r"\{+\w*\}+", "{}", node.value)] if isinstance(node.value, str) else []
    parts: list[list[str]] = []
    for each in node.values if isinstance(node, ast.JoinedStr) else ():
        value = each.value if isinstance(each, ast.FormattedValue) else each
        if isinstance(value, ast.IfExp):
            parts.append(
                [
                    str(ast.literal_eval(one)) if isinstance(one, ast.Constant) else "{}"
                    for one in (value.body, value.orelse)
                ]
            )
        else:
            parts.append([_constant(each)])
    return ["".join(one) for one in itertools.product(*parts)]


def _constant(node: ast.expr) -> str:
    return re.sub(r"\{\w*\}", "{}", str(node.value)) if isinstance(node, ast.Constant) else "{}"


def sentences(path: Path) -> Iterator[str]:
    """All that reads like a sentence in a file, its docstrings and what is between quotation marks within."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    skipped = {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
    skipped |= {id(part) for each in nodes if isinstance(each, ast.JoinedStr) for part in each.values}
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped:
            yield from (
                each
                for each in variants(node)
                if re.search(r"[A-Za-z]{2,} [a-z]{2,}", each.replace("{}", "xx"))
            )


@pytest.mark.parametrize("name", SAYING)
def test_every_sentence_is_in_the_catalogue(name: str) -> None:
    known = {key.replace("{,}", "{}") for key in CATALOGUE} | PIECES | ELSEWHERE
    said = {each for each in sentences(SOURCE / name) if re.match(r"[\w{\"]", each)}
    commands = {each for each in said if re.match(r"(kubectl|gpuslice) [^,]*$|\{\} (logs|describe) ", each)}
    bare = {
        each: re.sub(r"(?<=[\w})])\{\}", "", each.replace("{}/{}", "{}")) for each in said - commands
    }  # without what may follow
    assert {each for each, short in bare.items() if not {each, short} & known} == set()


def test_the_catalogue_puts_in_everything_that_it_takes_out() -> None:
    for english, chinese in CATALOGUE.items():
        places = 0 if "best joined" in english else len(re.findall(r"\{,?\}", english))
        assert {*re.findall(r"\{(\d)\}", chinese)} == {str(at) for at in range(places)}, english


SAID = {
    "The free memory is fragmented: b1 has 31 units free in all, the most on one card is 19, and 20 are "
    "wanted of one card. It will fit when a pod ends.": (
        "空闲显存是零散的：b1 共有 31 个单位空闲，单卡最多 19，而需要单卡 20。有 Pod 离开时即可放下。"
    ),
    "has been waiting since 2026-01-01: aliyun.com/gpu-mm is not a resource of gpuslice or NVIDIA: did you "
    "mean aliyun.com/gpu-mem?": (
        "自 2026-01-01 起等待："
        "gpuslice 和 NVIDIA 都不提供资源 aliyun.com/gpu-mm：您是指 aliyun.com/gpu-mem 吗？"
    ),
    "Container main restarted 14 times, last ended with exit code 1 (Error) at 9:30.": (
        "容器 main 重启了 14 次，上次于 9:30 以退出码 1（Error）结束。"
    ),
    'container "a": limits["aliyun.com/gpu-mem"] is "4.5", must be a whole number of units from 1 to 99, '
    "such as 4 (no fraction, no Gi)": (
        '容器“a”：limits["aliyun.com/gpu-mem"] 的值为“4.5”，'
        "应为 1 到 99 的整数单位，如 4（不带小数，不带 Gi）"
    ),
    "0/5 nodes are available: 3 Insufficient GPU Memory in one device, 2 node(s) were unschedulable.": (
        "5 个节点都不可用：3 个单卡显存不足，2 个节点不可调度。"
    ),
    "asked for 16 units on one card; the most free on one card of n1 is 15 of 15 (card 1), its largest card "
    "has 15 (2 nodes with shared cards looked at)": (
        "申请单卡 16 个单位；n1 单卡最多空闲 15 中的 15（显卡 1），最大的显卡有 15（共查看 2 个节点）"
    ),
    "1 node: Cordoned.": "1 个节点：不可调度（cordon）",
    "Created container: main": "Created container: main",
    "CrashLoopBackOff": "CrashLoopBackOff",
}
BEGIN = """
globalThis.document = { documentElement: {} };
globalThis.sessionStorage = { getItem: () => null };
"""
SAY = """
import { readFileSync } from "node:fs";
import { learn, say } from "./sentences.js";
import { setLanguage } from "./words.js";
const read = (path) => JSON.parse(readFileSync(path.replace("static/", "")));
globalThis.fetch = async (path) => ({ json: async () => read(path) });
const given = read("given.json");
setLanguage("zh");
await learn();
const chinese = given.map(say);
setLanguage("en");
console.log(JSON.stringify([chinese, given.map(say)]));
"""
WASTE = """
import { readFileSync } from "node:fs";
import { store } from "./store.js";
import { wasteOf } from "./wall.js";
store.tables.podUsage.set("a/idle", { limit: 1000, used: 250 }).set("a/busy", { limit: 10, used: 20 });
const card = [0, 16, 16384, 12, 0];
const slice = ([key, units]) => ({ key, units });
const cards = JSON.parse(readFileSync("given.json"));
console.log(JSON.stringify(cards.map((slices) => wasteOf(card, slices.map(slice)))));
"""


def scripted(folder: Path, program: str, given: object) -> Any:
    """What `program` makes of `given`, run by Node.js beside the page's own scripts."""
    node = find("node")
    shutil.copytree(STATIC, folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "given.json").write_text(json.dumps(given))
    (folder / "begin.js").write_text(BEGIN)
    (folder / "program.js").write_text(f'import "./begin.js";\n{program}')
    done = subprocess.run([node, "program.js"], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_sentence_is_said_down_to_its_parts_and_what_is_unknown_stays(tmp_path: Path) -> None:
    assert scripted(tmp_path, SAY, list(SAID)) == [list(SAID.values()), list(SAID)]


def test_waste_is_what_is_held_and_not_used_by_those_who_are_measured(tmp_path: Path) -> None:
    idle, busy, unmeasured = ["a/idle", 8], ["a/busy", 4], ["a/unmeasured", 4]
    found = scripted(tmp_path, WASTE, [[idle], [idle, busy], [idle, unmeasured], [unmeasured], []])
    assert found == [0.375, 0.375, 0.375, None, None]
