"""What the agent makes of labels, flags, units, faults and the operator's words."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from gpuslice.adapters.gpu.source import DriverCard, XidEvent
from gpuslice.adapters.kube.objects import Node, NodeStatus
from gpuslice.adapters.region.limits import LimitsEntry, read_limits
from gpuslice.adapters.region.reader import read_region
from gpuslice.apps.agent.command import translated
from gpuslice.apps.agent.device_list import TooManyUnitsError, cut, memory_unit
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.health import (
    Health,
    excluded_cards,
    recorded_faults,
    unhealthy_data,
)
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.node_reconciler import amounts_to_write, wanted_amounts
from gpuslice.apps.agent.owner import Owner, token
from gpuslice.apps.agent.settings import AgentSettings, SwitchSettings
from gpuslice.apps.settings import SettingsError, describe, load
from gpuslice.core.container_files import LIBRARY_FOLDER, hiding_mount
from gpuslice.core.errors import ContractError
from gpuslice.core.grant import CardLimit as GrantedLimit
from gpuslice.core.mode import ComputePolicy, Rules
from gpuslice.core.model import Card, NodeMode
from tests.builders import make_node


# -- units -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("memory_mib", "units"), [(16130, 15), (15079, 14), (15360, 15), (11019, 10), (81559, 79), (143771, 140)]
)
def test_a_card_is_cut_by_its_own_size(memory_mib: int, units: int) -> None:
    (card,) = cut([DriverCard(3, "GPU-a", memory_mib)], "GiB")
    assert (card.index, card.units) == (3, units)


@pytest.mark.parametrize("wanted", ["gib", "GB", "", "KiB"])
def test_an_unknown_unit_means_gib_with_a_warning(wanted: str) -> None:
    unit, warning = memory_unit(wanted)
    assert unit == "GiB"
    assert f'"{wanted}"' in warning
    assert memory_unit("MiB") == ("MiB", "")


def test_eight_large_cards_in_gib_fit_one_message_and_in_mib_do_not() -> None:
    uuid = "GPU-5f3a0c1e-77aa-4b1c-9d5e-0f6f2f1f9a0"
    cards = [DriverCard(index, f"{uuid}{index}", 288 * 1024) for index in range(8)]
    assert sum(gpu.units for gpu in cut(cards, "GiB")) == 2304
    with pytest.raises(TooManyUnitsError, match="2359296 devices"):
        cut(cards, "MiB")


def test_what_node_status_has_wrong_is_found_on_either_side() -> None:
    wanted = wanted_amounts(2, Rules(divides_compute=True))
    whole = {"aliyun.com/gpu-count": "2", "aliyun.com/gpu-core.percentage": "200"}
    assert {name: amount for name, amount in wanted.items() if amount is not None} == whole
    half = {"aliyun.com/gpu-count": "2", "aliyun.com/gpu-core.percentage": "0"}
    status = NodeStatus(capacity=whole, allocatable=half)
    assert amounts_to_write(Node(status=status), wanted) == {"aliyun.com/gpu-core.percentage": "200"}
    assert amounts_to_write(Node(), wanted) == whole


@pytest.mark.parametrize("rules", [Rules(), Rules(NodeMode.EXCLUSIVE)])
def test_what_the_node_does_not_give_out_any_more_is_taken_off_its_status(rules: Rules) -> None:
    wanted = wanted_amounts(1, rules)
    assert wanted["aliyun.com/gpu-core.percentage"] is None
    before = {"aliyun.com/gpu-count": "1", "aliyun.com/gpu-core.percentage": "100", "cpu": "2"}
    node = Node(status=NodeStatus(capacity=before, allocatable={"aliyun.com/gpu-core.percentage": "100"}))
    gone = {name for name, amount in amounts_to_write(node, wanted).items() if amount is None}
    assert gone == {name for name in before if name in wanted and wanted[name] is None}
    assert amounts_to_write(Node(status=NodeStatus(capacity={}, allocatable={})), dict.fromkeys(gone)) == {}


# -- flags and settings ----------------------------------------------------------------------------------
def test_the_vendors_command_line_is_understood() -> None:
    line = [
        "-logtostderr", "--v=5", "-v", "3", "-mps=true", "-query-kubelet", "-kubelet-address", "10.0.0.1",
        "--kubelet-port=10250", "-memory-unit", "MiB", "-health-check=true", "--root=/x",
    ]  # fmt: skip
    assert list(translated(line)) == ["--memory-unit", "MiB", "--health-check", "--root=/x"]
    assert list(translated(["-health-check=false"])) == ["--no-health-check"]


def test_a_missing_node_name_says_which_env_to_set() -> None:
    with pytest.raises(SettingsError, match=r"^Please set env NODE_NAME$"):
        load(AgentSettings, {}, {})
    assert load(AgentSettings, {}, {"NODE_NAME": "n1"}).node_name == "n1"


# -- health ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("xid", [31, 43, 45, 13, 68, 109])
def test_faults_of_applications_are_ignored(xid: int) -> None:
    assert Health(60).event(XidEvent(xid, "GPU-a"), ["GPU-a"], 0).reasons() == {}


def test_a_fault_heals_in_its_time_and_twice_as_slowly_the_next_time() -> None:
    sick = Health(60).event(XidEvent(79, "GPU-a"), [], 0)
    assert sick.reasons() == {"GPU-a": "Xid 79"}
    assert sick.aged(59).reasons() == {"GPU-a": "Xid 79"}
    well = sick.aged(60)
    assert well.reasons() == {}
    again = well.event(XidEvent(79, "GPU-a"), [], 100)
    assert again.aged(219).reasons() == {"GPU-a": "Xid 79"}
    assert again.aged(220).reasons() == {}
    assert Health(0).event(XidEvent(79, "GPU-a"), [], 0).aged(1e9).reasons() == {"GPU-a": "Xid 79"}


def test_a_report_without_a_card_means_all_and_a_lost_card_itself_only() -> None:
    assert set(Health(60).event(XidEvent(119), ["GPU-a", "GPU-b"], 0).reasons()) == {"GPU-a", "GPU-b"}
    assert Health(60).seen(["GPU-a"], ["GPU-a", "GPU-b"]).reasons() == {"GPU-b": "does not answer"}


def test_the_operators_file_names_cards_by_index_or_uuid() -> None:
    cards = make_node(cards=(15, 15, 15)).cards
    assert excluded_cards(b'{"index":["1"],"uuid":["GPU-n1-2"]}', cards) == {"GPU-n1-1", "GPU-n1-2"}
    assert excluded_cards(b'{"index":[0]}', cards) == {"GPU-n1-0"}
    for text in (b'{"x":' + b"[" * 100_000, b"", b"[]", b'{"index":"0"}', b"\xff", b'{"uuid":["\xff"]}'):
        with pytest.raises(ContractError, match=r"unhealthyDevices\.json"):
            excluded_cards(text, cards)


def test_the_configmap_keeps_what_an_operator_wrote() -> None:
    first = unhealthy_data({"gpus": "2"}, {1: "Xid 79", 3: "lost"}, ["GPU-1"])
    assert first == {"gpus": "1,2,3", "agent": "1,3", "faults": "GPU-1", "reasons": "1: Xid 79; 3: lost"}
    assert unhealthy_data(first, {}, []) == {"gpus": "2", "agent": "", "faults": "", "reasons": ""}
    assert unhealthy_data({"gpus": "x, 3,,"}, {0: "lost"}, [])["gpus"] == "0,3"


def test_faults_are_known_from_the_configmap() -> None:
    assert recorded_faults({"gpus": "1,2", "agent": "1,2", "faults": "GPU-1,MIG-2"}) == {"GPU-1", "MIG-2"}
    assert recorded_faults({"gpus": "1,2,3", "agent": "1,3", "faults": ""}) == frozenset()
    assert recorded_faults({"gpus": "1"}) == recorded_faults(None) == frozenset()


# -- folders ---------------------------------------------------------------------------------------------
def test_a_folders_name_depends_on_the_set_of_ids_alone() -> None:
    assert token(["b", "a"]) == token(["a", "b"]) != token(["a"])
    assert token(["GPU-a-_-1"]).isalnum()


def test_mounts_name_the_hosts_own_path(tmp_path: Path) -> None:
    folders = Folders(tmp_path, Path("/opt/gpuslice"))
    name = folders.prepare(["GPU-a-_-0"])
    assert (tmp_path / "containers" / name / "etc").is_dir()
    assert {mount.container_path: mount.host_path for mount in folders.mounts(name)} == {
        "/etc/ld.so.preload": f"/opt/gpuslice/containers/{name}/ld.so.preload",
        # all that Nix's glibc reads
        "/etc/ld-nix.so.preload": f"/opt/gpuslice/containers/{name}/ld.so.preload",
        "/usr/lib/gpuslice": "/opt/gpuslice/lib",
        "/etc/gpuslice": f"/opt/gpuslice/containers/{name}/etc",
        "/var/lib/gpuslice": f"/opt/gpuslice/containers/{name}/var",
    }


def test_whatever_is_mounted_cannot_be_mounted_over(tmp_path: Path) -> None:
    for each in Folders(tmp_path).mounts("name", ["GPU-a"]):
        assert hiding_mount("main", [{"mountPath": each.container_path}], None, None), each.container_path


HIDING = [
    "/etc/ld.so.preload",
    "etc/ld.so.preload",  # kubelet puts a "/" in front
    "//etc/./x/../ld.so.preload/",
    "/etc/gpuslice/limits",
    "/usr/lib/gpuslice",
    "/run/gpuslice/GPU-a/own/claim",
    "/proc/self/root/etc/ld.so.preload",
    "/proc//1/cwd",
    "/proc/net/../root/usr/lib/gpuslice",
    "/var/lock/../gpuslice",
]


@pytest.mark.parametrize("path", HIDING)
def test_a_mount_at_or_below_one_of_ours_hides_it(path: str) -> None:
    assert f'mountPath is "{path}", must be' in hiding_mount("main", [{"mountPath": path}], None, None)


ELSEWHERE = ["/", "/etc", "/usr/lib", "/etc/gpuslice-2", "/data/etc/ld.so.preload", ""]
ELSEWHERE += ["/proc/cpuinfo", "/proc/sys/crypto/fips_enabled", "/data/..more/x"]  # some tools mount these


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_mount_above_ours_or_elsewhere_hides_nothing(path: str) -> None:
    """Runtimes mount what is deeper later."""
    assert not hiding_mount("main", [{"mountPath": path}], None, "/dev/termination-log")


def test_where_compute_is_limited_a_container_meets_its_neighbours_on_each_card(tmp_path: Path) -> None:
    """It writes in its own folder alone, and what it told before it was started again is gone."""
    folders, ids = Folders(tmp_path, Path("/opt/gpuslice"), boot="this"), ["GPU-a-_-0", "GPU-b-_-0"]
    (tmp_path / "built.so").write_bytes(b"library")
    folders.library.install(str(tmp_path / "built.so"))
    mounts = folders.grant(ids, limits_compute=True)
    name = folders.current(ids)
    assert [(each.container_path, each.host_path, each.read_only) for each in mounts[-2:]] == [
        ("/run/gpuslice/GPU-b/own/claim", f"/opt/gpuslice/cards/GPU-b/{name}/claim", False),
        ("/run/gpuslice/GPU-b/all", "/opt/gpuslice/cards/GPU-b", True),
    ]
    claim = tmp_path / "cards/GPU-a" / name / "claim"
    assert claim.stat().st_mode & 0o7777 == 0o666
    claim.write_bytes(b"told" * 10_000)
    card = Card(index=0, memory_mib=15360, units=15, uuid="GPU-a")
    folders.start(ids, entries([GrantedLimit(card, 4, 4096, 30)]), Owner(ids))
    assert claim.read_bytes() == bytes(4096)
    claim.write_bytes(b"told" * 10_000)
    folders.grant(["GPU-a-_-1"], limits_compute=True)
    assert claim.stat().st_size == 4096  # a neighbour came
    folders.discard(name)
    assert not claim.parent.exists()


def test_the_region_is_there_for_every_user_before_the_container_starts(tmp_path: Path) -> None:
    """A process that came while another one made it, under a tight umask, was refused for its whole life."""
    folders, ids = Folders(tmp_path, boot="this"), ["GPU-a-_-0"]
    mask = os.umask(0o077)
    try:
        region = tmp_path / "containers" / folders.prepare(ids) / "var" / "region"
        before = region.stat()
        folders.start(ids, [], Owner(ids))
    finally:
        os.umask(mask)
    after = region.stat()
    assert [stat.S_IMODE(each.st_mode) for each in (before, after)] == [0o666] * 2
    assert before.st_ino != after.st_ino
    assert read_region(region) is None
    assert stat.S_IMODE(region.parent.stat().st_mode) == 0o1777


@pytest.mark.parametrize(
    ("policy", "percent", "written"),
    [
        (ComputePolicy.CAP, 30, (30, None)),
        (ComputePolicy.CAP, 0, (None, None)),
        (ComputePolicy.OFF, 30, (None, None)),
        (ComputePolicy.FAIR, 30, (30, 100)),
        (ComputePolicy.FAIR, 0, (26, 100)),  # what part of the memory it has
        (ComputePolicy.FAIR, 100, (100, None)),
    ],
)
def test_the_nodes_policy_says_what_a_percentage_of_compute_means(
    tmp_path: Path, policy: ComputePolicy, percent: int, written: tuple[int | None, int | None]
) -> None:
    folders, ids = Folders(tmp_path, boot="this"), ["GPU-a-_-0"]
    card = Card(index=0, memory_mib=15360, units=15, uuid="GPU-abcde")
    limits = [GrantedLimit(card, 4, 4096, percent)]
    folders.start(ids, entries(limits, policy=policy), Owner(ids))
    (found,) = read_limits(tmp_path / "containers" / folders.current(ids) / "etc/limits") or ()
    assert (found.compute_percent, found.cap_percent) == written
    folders.start(ids, entries(limits, limited=False, policy=policy), Owner(ids))
    assert read_limits(tmp_path / "containers" / folders.current(ids) / "etc/limits") == (
        LimitsEntry("GPU-abcde", None),
    )


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    with pytest.raises(IsolationMissingError, match=r"lib/libgpuslice\.so is missing"):
        folders.library.check()
    with pytest.raises(IsolationMissingError, match="cannot be read"):
        folders.library.install(str(tmp_path / "nothing.so"))


def test_a_container_keeps_the_library_that_it_was_granted(tmp_path: Path) -> None:
    """Until it ends: then that version goes as well. What is removed by hand comes back with the next one."""
    source = tmp_path / "built.so"
    folders = Folders(tmp_path / "root", boot="this")
    granted = {}
    for content in (b"one", b"two"):
        source.write_bytes(content)
        folders.library.install(str(source))
        mounts = folders.grant([f"GPU-a-_-{content.decode()}"])
        (mounted,) = [each.host_path for each in mounts if each.container_path == LIBRARY_FOLDER]
        granted[content] = Path(mounted)
    folders.sweep_libraries(older_than_s=-1)
    for content, folder in granted.items():
        assert (folder / "libgpuslice.so").read_bytes() == content
    folders.discard(folders.current(["GPU-a-_-one"]))
    folders.sweep_libraries(older_than_s=60)
    assert granted[b"one"].exists(), "it may be that of an agent that begins"
    folders.sweep_libraries(older_than_s=-1)
    assert not granted[b"one"].exists()
    shutil.rmtree(granted[b"two"])
    folders.grant(["GPU-a-_-two"])
    assert (granted[b"two"] / "libgpuslice.so").read_bytes() == b"two"


# -- the documentation -----------------------------------------------------------------------------------
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "agent.md"


def test_every_setting_is_documented_with_its_default() -> None:
    text = DOCUMENT.read_text()
    for info in describe(AgentSettings):
        row = next((line for line in text.splitlines() if line.startswith(f"| `{info.flag}` |")), "")
        assert info.meaning in row, info.flag
        default = str(info.default).lower() if isinstance(info.default, bool) else str(info.default)
        assert not info.default or f"`{default}` |" in row, info.flag


def test_every_setting_of_the_switch_is_documented_with_its_default() -> None:
    text = (DOCUMENT.parents[1] / "operate" / "modes.md").read_text()
    for info in describe(SwitchSettings):
        assert f"| `{info.flag}` | {info.meaning}" in text
        assert f"| `{info.default}` |" in text or info.default == ""


def test_every_metric_is_documented() -> None:
    source = Path(__file__).parents[2] / "src" / "gpuslice" / "apps" / "agent"
    text = DOCUMENT.read_text()
    names = {
        name
        for path in source.glob("*.py")
        for name in re.findall(r'"(gpuslice_agent_[a-z_]+)"', path.read_text())
    }
    assert len(names) > 8
    assert {name for name in names if f"`{name}" not in text} == set()
