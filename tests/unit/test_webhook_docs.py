"""What can be set and measured of the webhook, and what doctor and explain know, is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpuslice.apps.settings import SettingInfo, SettingsError, describe, load
from gpuslice.apps.webhook.settings import WebhookSettings
from gpuslice.core.admission import RESERVED
from gpuslice.core.hami import CORES, MEMORY, MEMORY_PERCENT, NO_TYPE, PRIORITY, UNTRANSLATED, USE_TYPE
from gpuslice.core.request import ContainerSpec, pod_request

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operate/webhook.md").read_text()
REQUESTS = (DOCS / "user/requests.md").read_text()
OTHERS = (DOCS / "user/other-systems.md").read_text()


@pytest.mark.parametrize("info", describe(WebhookSettings), ids=lambda info: info.name)
def test_every_setting_is_documented_in_its_own_words(info: SettingInfo) -> None:
    assert f"| `{info.flag}` | {info.meaning}" in PAGE
    assert info.meaning.endswith(".")


def test_every_variable_that_is_taken_out_is_told_to_users() -> None:
    for name in RESERVED:
        assert f"`{name}`" in REQUESTS


def test_hamis_names_are_told_with_what_becomes_of_them() -> None:
    for name in (MEMORY, MEMORY_PERCENT, CORES, PRIORITY, USE_TYPE, NO_TYPE, *UNTRANSLATED):
        assert name in OTHERS or name.partition("/")[2] in OTHERS


def test_the_example_is_a_request() -> None:
    example = yaml.safe_load(REQUESTS.split("```yaml\n")[1].split("```")[0])
    (container,) = example["spec"]["containers"]
    request = pod_request([ContainerSpec(container["name"], 0, container["resources"]["limits"])])
    assert request is not None
    assert request.units == 4


def test_half_of_a_certificate_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="--tls-certificate and --tls-key go together"):
        load(WebhookSettings, {"tls_key": "key.pem"}, {})
