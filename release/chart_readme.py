"""The chart's README, made from its values, their comments and their schema.

``python -m release.chart_readme`` writes it. Above a key stands what it is for, behind it a short remark; a
default is the value itself. A test compares the file with what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "gpuslice"
INTRODUCTION = """\
# gpuslice

Fractions of a GPU for containers, with limits that hold. The names of objects, resources and annotations are
those of the vendor's shared-GPU add-on (`helm install cgpu … -n kube-system`), so that manifests and tools
written for it work unchanged.

    helm install cgpu charts/gpuslice -n kube-system --set image.repository=registry.example.com/gpuslice
    kubectl label node NODE cgpu=true
    helm test cgpu -n kube-system --logs

`image.repository` is the only value without a default. The folder `ci` has a file of values for EKS, GKE,
AKS, ACK, OpenShift, k3s, kind and machines of your own: `-f charts/gpuslice/ci/k3s-values.yaml`.

Written by `python -m release.chart_readme` from `values.yaml` and `values.schema.json`.
"""
WORKLOADS = """\
## What every workload takes

Each of {names} takes these keys for itself. Those marked with * can also be set once for all of them, at the
top of the values.

| key | what it does |
|---|---|
"""


@dataclass(frozen=True, slots=True)
class Value:
    """One value that can be set: where, what it is unless set, and what its comments say."""

    path: str
    default: Any
    about: str


def readme() -> str:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    root = yaml.compose(text)
    assert root is not None
    found = list(_values(root, text.splitlines(), schema, schema, ""))
    pages = [INTRODUCTION, _workloads(schema)]
    tops = list(dict.fromkeys(value.path.partition(".")[0] for value in found))
    alone = [value for value in found if "." not in value.path]
    pages.append(
        "## Of the whole release\n\n" + _table(value for value in alone if value.default is not None)
    )
    for top in tops:
        under = [value for value in found if value.path.startswith(f"{top}.")]
        if under:
            about = next((value.about for value in alone if value.path == top), "")
            pages.append(f"## {top}\n\n" + (f"{about}\n\n" if about else "") + _table(under))
    return "\n".join(pages)


def _values(node: yaml.Node, lines: list[str], shape: Any, schema: Any, path: str) -> Iterator[Value]:
    """The values below `node`, and before them each group that has a comment, with None for its default."""
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        name = f"{path}{key.value}"
        inner = shape.get("properties", {}).get(key.value, {})
        about = _comment(
            lines,
            key.start_mark.line,
            value.end_mark if value.start_mark.line == key.start_mark.line else key.end_mark,
        )
        group = isinstance(value, yaml.MappingNode) and "properties" in inner and value.value
        if group:
            yield Value(name, None, about)
            yield from _values(value, lines, inner, schema, f"{name}.")
        else:
            common = schema["definitions"]["workload"]["properties"].get(key.value, {})
            yield Value(name, yaml.safe_load(yaml.serialize(value)), about or common.get("description", ""))


def _comment(lines: list[str], at: int, end: yaml.Mark) -> str:
    """The comment lines right above, and what stands behind the value."""
    above: list[str] = []
    row = at - 1
    while row >= 0 and lines[row].strip().startswith("#"):
        above.insert(0, lines[row].strip().lstrip("# "))
        row -= 1
    behind = lines[end.line][end.column :].partition("#")[2].strip() if end.line == at else ""
    said = " ".join(above)
    return f"{said} ({behind})" if said and behind else said or behind


def _workloads(schema: Any) -> str:
    keys = schema["definitions"]["workload"]["properties"]
    ref = "#/definitions/workload/properties/affinity"
    takers = [
        f"`{name}`"
        for name, shape in schema["properties"].items()
        if shape.get("properties", {}).get("affinity", {}).get("$ref") == ref
    ]
    rows = []
    for key, shape in keys.items():
        named = shape["$ref"].rpartition("/")[2] if "$ref" in shape else ""
        about = shape.get("description") or schema["definitions"][named]["description"]
        rows.append(f"| `{key}`{'*' if key in schema['properties'] else ''} | {about} |\n")
    return WORKLOADS.format(names=", ".join(takers[:-1]) + f" and {takers[-1]}") + "".join(rows)


def _table(values: Iterator[Value] | list[Value]) -> str:
    rows = [
        f"| `{value.path}` | {value.about.replace('|', chr(92) + '|')} | {_shown(value.default)} |\n"
        for value in values
        if value.default is not None
    ]
    return "| value | what it does | default |\n|---|---|---|\n" + "".join(rows)


def _shown(default: Any) -> str:
    return f"`{json.dumps(default)}`" if default not in ("", {}, []) else ""


def main() -> None:
    (CHART / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
