"""What can be set, measured and read of the extender is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.apps.extender.metrics import Metrics, api_times
from gpuslice.apps.extender.routes import PREFIX
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.settings import SettingInfo, SettingsError, describe, load
from gpuslice.core import placement
from gpuslice.core.ledger import Ledger

PAGE = (Path(__file__).parents[2] / "docs/reference/extender.md").read_text()


@pytest.mark.parametrize("info", describe(ExtenderSettings), ids=lambda info: info.name)
def test_every_setting_is_documented_in_its_own_words(info: SettingInfo) -> None:
    assert f"| `{info.flag}` | {info.meaning}" in PAGE
    assert info.meaning.endswith(".")


def test_every_metric_is_documented() -> None:
    metrics = Metrics(Ledger(), api_times())
    metrics.observe("filter", "yes", 0.1)
    for family in metrics.families(ready=True, leading=True):
        assert f"`{family.name}`" in PAGE


def test_the_reasons_are_documented() -> None:
    for reason in (placement.NO_ROOM, placement.NO_CORE, placement.CORE_REQUIRED, placement.TIER_TOO_LOW):
        assert f"`{reason.format(name='aliyun.com/gpu-core.percentage')}`" in PAGE
    assert PREFIX in PAGE


def test_half_of_a_certificate_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="--tls-certificate and --tls-key go together"):
        load(ExtenderSettings, {"tls_key": "key.pem"}, {})


def test_known_clients_without_a_certificate_of_our_own_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="--tls-client-ca needs --tls-certificate"):
        load(ExtenderSettings, {"tls_client_ca": "ca.pem"}, {})
