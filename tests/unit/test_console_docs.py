"""What can be set and measured of the console is written down, and its page is made as it promises."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuslice.apps.cli.main import command
from gpuslice.apps.console.pages import HEADERS, TYPES
from gpuslice.apps.console.settings import ConsoleSettings
from gpuslice.apps.settings import SettingInfo, SettingsError, describe, load
from tests.tools import find

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operate/console.md").read_text()
STATIC = ROOT / "src/gpuslice/apps/console/static"
SCRIPTS = sorted(STATIC.glob("*.js"))


@pytest.mark.parametrize("info", describe(ConsoleSettings), ids=lambda info: info.name)
def test_every_setting_is_documented_in_its_own_words(info: SettingInfo) -> None:
    assert f"| `{info.flag}` | {info.meaning}" in PAGE
    assert info.meaning.endswith(".")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tls_key": "key.pem"}, "--tls-certificate and --tls-key go together"),
        ({"host": "0.0.0.0"}, "must be 127.0.0.1 or ::1 with --access=kubeconfig"),
        ({"base_path": "gpuslice/"}, "must be a path like /gpuslice"),
        ({"access": "nobody"}, "must be one of kubeconfig, token"),
    ],
)
def test_what_cannot_be_honoured_stops_the_start(flags: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        load(ConsoleSettings, flags, {})


def test_a_cluster_that_cannot_be_reached_is_told_in_a_sentence(tmp_path: Path) -> None:
    told = CliRunner().invoke(command, ["console", "--kubeconfig", str(tmp_path / "none")])
    assert told.exit_code != 0
    assert "kubeconfig" in str(told.exception) + told.output


def test_the_page_runs_no_script_and_takes_no_style_but_its_own_files() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page)
    assert not re.search(r"(src|href)=\"(https?:)?//", page)


def test_nothing_that_the_cluster_says_is_ever_read_as_html_or_code() -> None:
    risky = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc")
    assert [path.name for path in SCRIPTS if risky.search(path.read_text())] == []
    assert {path.suffix[1:] for path in STATIC.iterdir()} <= set(TYPES)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_only_what_is_there(script: Path) -> None:
    for name in re.findall(r'from "\./([\w.]+)"', script.read_text()):
        assert (STATIC / name).exists()


# Machado, Oliveira and Fernandes 2009: what is seen of linear RGB without one kind of cone
COLOUR_BLIND = {
    "nobody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deuteranopia": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
FAR_APART = 20  # in CIELAB, where 2.3 is just noticeable


def seen(colour: str, eyes: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """A colour of the style sheet in CIELAB, as these eyes see it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in eyes
    )
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0888,
    )
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", COLOUR_BLIND)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_teams_have_colours_that_everybody_tells_apart(theme: str, eyes: str) -> None:
    style = (STATIC / "style.css").read_text().split(':root[data-theme="dark"]')
    hues = re.findall(r"--hue\d: (#\w{6})", style[theme == "dark"])
    assert len(hues) == 9
    for one, other in itertools.combinations((seen(each, COLOUR_BLIND[eyes]) for each in hues), 2):
        assert math.dist(one, other) >= FAR_APART


def test_both_languages_say_everything() -> None:
    text = (STATIC / "words.js").read_text()
    english, chinese = text.partition("  zh: {")[::2]
    names = [
        set(re.findall(r"[{,\s](\w+): \"", part.partition("let language")[0])) for part in (english, chinese)
    ]
    assert names[0] == names[1]
    used = {name for path in SCRIPTS for name in re.findall(r"\bt\(\"(\w+)\"", path.read_text())}
    assert used - names[0] == set()


def test_scripts_are_well_formed(tmp_path: Path) -> None:
    node = find("node")
    for script in SCRIPTS:
        copy = tmp_path / f"{script.stem}.mjs"
        copy.write_text(script.read_text())
        subprocess.run([node, "--check", copy], check=True)


def test_the_page_asks_for_all_scripts_at_once() -> None:
    """Found one after the other, each would cost a round trip before anything is shown."""
    asked = re.findall(r"static/(\w+\.js)", (STATIC / "index.html").read_text())
    assert sorted(asked) == [path.name for path in SCRIPTS]
