"""The chart's objects, as the real helm renders them."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

KUBE_SCHEDULER = "gpuslice-scheduler"  # no program of ours: it has no /readyz in old versions
CHART = Path(__file__).resolve().parents[1] / "charts" / "gpuslice"
EVERYTHING = "webhook.enabled=true,exporter.enabled=true,nodeLabel=gpushare"
WEBHOOKS = [("MutatingWebhookConfiguration", "mutate"), ("ValidatingWebhookConfiguration", "validate")]
NAMED = ("--set", "image.repository=registry.example.com/gpuslice")
"""The one value that has no default: where the image is."""


@functools.cache
def printed(*command: str) -> str:
    """What helm prints, once for each command: many tests ask for the same objects, and it takes its time."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def documents(text: str) -> list[dict[str, Any]]:
    """By libyaml where PyYAML has it: in Python alone reading takes as long as helm does."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all(text, loader) if each]


def render(helm: str, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The chart's objects by kind and name. A file of values that the arguments name must not change."""
    command = (helm, "template", "cgpu", str(CHART), "--namespace", "kube-system", *NAMED, *arguments)
    return {(each["kind"], each["metadata"]["name"]): each for each in documents(printed(*command))}


def extenders(helm: str, port: int, *arguments: str) -> list[dict[str, Any]]:
    """What the chart has kube-scheduler call: an extender without certificates, at `port` of this machine."""
    rendered = render(helm, "--set=extender.certificate.source=none", *arguments)
    found = yaml.safe_load(rendered["ConfigMap", "gpuslice-scheduler"]["data"]["config.yaml"])["extenders"]
    return [{**each, "urlPrefix": f"http://127.0.0.1:{port}/gpushare-scheduler"} for each in found]
