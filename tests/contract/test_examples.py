"""Every example asks for something that can be given, is explained, and is taken by an API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl_rig import kubectl_rig

from tests.unit.admission_rig import mutated

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text()
FILES = sorted(EXAMPLES.rglob("*.yaml"))
BUILT_IN = {"Deployment", "StatefulSet", "Job", "Pod", "Service", "ConfigMap", "Namespace", "ResourceQuota"}
BUILT_IN.add("HorizontalPodAutoscaler")
Object = dict[str, Any]


def templates(thing: Any) -> list[Object]:
    """Every pod template in an object, wherever its kind keeps it."""
    if isinstance(thing, list):
        return [found for each in thing for found in templates(each)]
    if not isinstance(thing, dict):
        return []
    own = [thing["template"]] if "containers" in thing.get("template", {}).get("spec", {}) else []
    return own + [found for each in thing.values() for found in templates(each)]


def objects(file: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_every_example_asks_for_what_can_be_given_and_is_explained(file: Path) -> None:
    assert str(file.relative_to(EXAMPLES)) in README
    for template in templates(objects(file)):
        made = {"metadata": template.get("metadata") or {}, "spec": template["spec"]}
        limits = [each.get("resources", {}).get("limits", {}) for each in template["spec"]["containers"]]
        changed = mutated(made)  # an AssertionError with the sentence where it is denied
        asked = [each.get("resources", {}).get("limits", {}) for each in changed["spec"]["containers"]]
        assert asked == limits


def test_no_service_sets_a_variable_that_vllm_takes_for_its_own() -> None:
    """Kubernetes gives every pod VLLM_PORT=tcp://… where there is a Service vllm, as in an example."""
    specs = [template["spec"] for file in FILES for template in templates(objects(file))]
    vllm = [spec for spec in specs if any("/vllm" in each["image"] for each in spec["containers"])]
    assert len(vllm) == 2
    assert [spec for spec in vllm if spec.get("enableServiceLinks") is not False] == []


async def test_an_api_server_takes_every_built_in_kind(tmp_path: Path) -> None:
    async with kubectl_rig(tmp_path) as rig:
        for file in FILES:
            things = [each for each in objects(file) if each["kind"] in BUILT_IN]
            if not things:
                continue
            whole = {"apiVersion": "v1", "kind": "List", "items": things}
            out = await rig.ok("apply", "--validate=strict", "-f", "-", text=json.dumps(whole))
            assert len(out.splitlines()) == len(things), file
