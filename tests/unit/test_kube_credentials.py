"""Tokens rotate and plugins fail; neither needs a restart, and a failure says which plugin and why."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.credentials import Exec, ExecPlugin, Secret, TokenFile, authorization
from gpuslice.adapters.kube.errors import ConfigError
from tests.unit.kube_wire import VirtualTime

V1 = "client.authentication.k8s.io/v1"


def test_a_rotated_token_is_used_once_it_is_written(tmp_path: Path) -> None:
    time, path = VirtualTime(), tmp_path / "token"
    path.write_text("first\n")
    credentials = TokenFile(str(path), clock=time.clock)
    assert credentials.current().token == "first"
    for half in ("", "sec", "second"):
        path.write_text(half)
        assert credentials.current().token == "first"
        time.now_s += 0.9
        assert credentials.current().token == "first"
    time.now_s += 0.2
    assert credentials.current().token == "second"


def test_a_refused_token_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    credentials = TokenFile(str(path))
    credentials.current()
    path.write_text("second")
    credentials.forget()
    assert credentials.current().token == "second"


def test_a_token_that_vanishes_for_a_moment_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "token"
    time = VirtualTime()
    path.write_text("first")
    credentials = TokenFile(str(path), clock=time.clock)
    credentials.current()
    path.unlink()
    for _ in range(2):
        assert credentials.current().token == "first"
        time.now_s += 100
    path.write_text("")
    for _ in range(2):
        assert credentials.current().token == "first"
        time.now_s += 100


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), (b"\n", "is empty"), (b"\xff", "cannot be read")]
)
def test_a_token_file_without_token_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"token file {path} {words}"):
        TokenFile(str(path)).current()


class Plugin:
    """A credential plugin as a shell script that notes each run and what it was told."""

    def __init__(self, folder: Path, output: Any, *, code: int = 0, complaint: str = "") -> None:
        self.runs, self.told = folder / "runs", folder / "told"
        self.path, answer = folder / "plugin", folder / "answer"
        answer.write_bytes(output if isinstance(output, bytes) else json.dumps(output).encode())
        self.path.write_text(
            f'#!/bin/sh\necho "$@" >> {self.runs}\necho "$KUBERNETES_EXEC_INFO" > {self.told}\n'
            f"cat {answer}\necho '{complaint}' >&2\nexit {code}\n"
        )
        self.path.chmod(0o755)

    def credentials(self, version: str = V1, **options: Any) -> Exec:
        section = {"args": ("get", "token"), "interactive_mode": "Never", **options}
        return Exec(ExecPlugin(version, str(self.path), **section))


def credential(version: str = V1, **status: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": "ExecCredential", "status": status}


@pytest.mark.parametrize("version", [V1, "client.authentication.k8s.io/v1beta1"])
def test_a_plugin_gives_a_token_once(tmp_path: Path, version: str) -> None:
    plugin = Plugin(tmp_path, credential(version, token="secret"))
    credentials = plugin.credentials(version, cluster={"server": "https://x"})
    assert credentials.blocks()
    assert credentials.current() == credentials.current() == Secret(token="secret")
    assert not credentials.blocks()
    assert plugin.runs.read_text() == "get token\n"
    assert json.loads(plugin.told.read_text()) == {
        "apiVersion": version,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": "https://x"}},
    }


def test_a_plugin_runs_again_when_its_answer_expires(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    plugin = Plugin(tmp_path, credential(token="secret", expirationTimestamp="2026-01-01T01:00:00Z"))
    credentials = plugin.credentials()
    credentials.now = lambda: now
    credentials.current()
    credentials.now = lambda: now + timedelta(minutes=59)
    credentials.current()
    assert plugin.runs.read_text().count("\n") == 1
    credentials.now = lambda: now + timedelta(minutes=60)
    assert credentials.blocks()
    credentials.current()
    assert plugin.runs.read_text().count("\n") == 2


def test_a_plugin_runs_again_when_its_token_was_refused(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, credential(token="secret"))
    credentials = plugin.credentials()
    credentials.current()
    credentials.forget()
    credentials.current()
    assert plugin.runs.read_text().count("\n") == 2


def test_a_plugin_may_give_a_certificate(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, credential(clientCertificateData="CERT", clientKeyData="KEY"))
    assert plugin.credentials().current() == Secret(certificate="CERT", key="KEY")


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        (b"not json", 0, "answered no ExecCredential"),
        (b'{"kind": "\xff"}', 0, "answered no ExecCredential"),
        (credential(token="x", expirationTimestamp="2026-01-01T00:00:00"), 0, "answered no ExecCredential"),
        (credential("client.authentication.k8s.io/v1beta1", token="x"), 0, "the kubeconfig says"),
        (credential(), 0, "neither a token nor a client certificate"),
        (credential(clientCertificateData="CERT"), 0, "only by half"),
        (b"", 3, "ended with code 3: please log in"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_words(
    tmp_path: Path, output: Any, code: int, words: str
) -> None:
    plugin = Plugin(tmp_path, output, code=code, complaint="please log in")
    with pytest.raises(ConfigError, match=words) as caught:
        plugin.credentials().current()
    assert str(plugin.path) in str(caught.value)


@pytest.mark.parametrize("denied", [False, True])
def test_a_plugin_that_is_missing_gives_its_install_hint(tmp_path: Path, denied: bool) -> None:
    """`denied`: the system answers "Permission denied", as for a PATH with a folder that may not be read."""
    if denied:
        (tmp_path / "no-such-plugin").mkdir()
    environ = {"PATH": f"{tmp_path}:/usr/bin"}
    plugin = ExecPlugin(V1, "no-such-plugin", env=environ, install_hint="Install it with x")
    with pytest.raises(
        ConfigError, match=r"no-such-plugin cannot be run: it is not on the PATH\. Install it"
    ):
        Exec(plugin).current()


@pytest.mark.parametrize(
    ("command", "why"), [("/nowhere/plugin", "No such file or directory"), ("/etc", "Permission denied")]
)
def test_a_plugin_by_its_path_that_cannot_be_run_says_why(command: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{command} cannot be run: {why}"):
        Exec(ExecPlugin(V1, command)).current()


def test_a_plugin_that_hangs_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "hang"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    credentials = Exec(ExecPlugin(V1, str(script)), timeout_s=0.2)
    with pytest.raises(ConfigError, match=r"gave no answer in 0.2 s"):
        credentials.current()


def test_a_plugin_that_must_ask_is_refused_without_a_terminal() -> None:
    with pytest.raises(ConfigError, match="there is no terminal"):
        Exec(ExecPlugin(V1, "login", interactive_mode="Always")).current()


@pytest.mark.parametrize(
    ("secret", "header"),
    [
        (Secret(), None),
        (Secret(token="t"), "Bearer t"),
        (Secret(username="u", password="p"), "Basic dTpw"),
    ],
)
def test_the_authorization_header(secret: Secret, header: str | None) -> None:
    assert authorization(secret).get("Authorization") == header


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(Secret(token="hush"))
