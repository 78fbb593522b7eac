"""Kubeconfig files mean here what they mean to kubectl."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice.adapters.kube.config import Connection, connect, in_cluster, proxy_for
from gpuslice.adapters.kube.credentials import Exec, Secret, Tls, TokenFile
from gpuslice.adapters.kube.errors import ConfigError
from gpuslice.adapters.kube.kubeconfig import MissingConfigError


def kubeconfig(path: Path, *, name: str = "main", **overrides: Any) -> Path:
    """A kubeconfig with one cluster, user and context, all called `name`."""
    parts: dict[str, Any] = {
        "cluster": {"server": f"https://{name}"},
        "user": {"token": f"token-{name}"},
        **overrides,
    }
    context = {"cluster": name, "user": name, **parts.get("context", {})}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": parts.get("current", name),
        "clusters": [{"name": name, "cluster": parts["cluster"]}],
        "users": [{"name": name, "user": parts["user"]}],
        "contexts": [{"name": name, "context": context}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


def of(path: Path, **options: Any) -> Connection:
    return connect({}, kubeconfig=str(path), **options)


def test_a_plain_file(tmp_path: Path) -> None:
    found = of(kubeconfig(tmp_path / "config", context={"namespace": "team"}))
    assert found.server == "https://main"
    assert found.namespace == "team"
    assert found.credentials.current() == Secret(token="token-main")


def test_home_is_the_default(tmp_path: Path) -> None:
    kubeconfig(tmp_path / ".kube" / "config")
    assert connect({"HOME": str(tmp_path)}).server == "https://main"


def test_the_first_file_of_several_wins_and_missing_ones_do_not_matter(tmp_path: Path) -> None:
    one = kubeconfig(tmp_path / "one", name="a", cluster={"server": "https://first"})
    two = kubeconfig(tmp_path / "two", name="a", cluster={"server": "https://second"})
    three = kubeconfig(tmp_path / "three", name="b")
    environ = {"KUBECONFIG": os.pathsep.join(map(str, [tmp_path / "none", one, two, three]))}
    assert connect(environ).server == "https://first"
    assert connect(environ, context="b").server == "https://b"
    assert connect(environ, namespace="mine").namespace == "mine"


def test_an_explicit_file_beats_the_environment(tmp_path: Path) -> None:
    one, two = kubeconfig(tmp_path / "one", name="a"), kubeconfig(tmp_path / "two", name="b")
    assert connect({"KUBECONFIG": str(one)}, kubeconfig=str(two)).server == "https://b"


def test_relative_paths_start_at_the_file_that_holds_them(tmp_path: Path) -> None:
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki" / "ca.crt").write_text("AUTHORITY")
    (tmp_path / "pki" / "me.crt").write_text("CERTIFICATE")
    (tmp_path / "pki" / "me.key").write_text("KEY")
    found = of(
        kubeconfig(
            tmp_path / "config",
            cluster={"server": "https://x", "certificate-authority": "pki/ca.crt", "tls-server-name": "y"},
            user={"client-certificate": "pki/me.crt", "client-key": "pki/me.key"},
        )
    )
    assert found.tls == Tls("AUTHORITY", server_name="y")
    assert found.files == tuple(
        str(tmp_path / each) for each in ("config", "pki/ca.crt", "pki/me.crt", "pki/me.key")
    )
    assert found.credentials.current() == Secret(certificate="CERTIFICATE", key="KEY")


def test_data_beats_files(tmp_path: Path) -> None:
    data = base64.b64encode(b"INLINE").decode()
    cluster = {"server": "https://x", "certificate-authority": "/none", "certificate-authority-data": data}
    assert of(kubeconfig(tmp_path / "config", cluster=cluster)).tls == Tls("INLINE")


def test_a_token_file_beats_an_inline_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    found = of(kubeconfig(tmp_path / "config", user={"token": "inline", "tokenFile": "token"}))
    assert isinstance(found.credentials, TokenFile)
    assert found.credentials.current().token == "from-file"


def test_an_exec_section_becomes_a_plugin(tmp_path: Path) -> None:
    section = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "./bin/login",
        "args": ["--region", "x"],
        "env": [{"name": "A", "value": "b"}],
        "interactiveMode": "Never",
        "provideClusterInfo": True,
    }
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "z"}}
    cluster = {"server": "https://x", "extensions": [extension]}
    found = of(kubeconfig(tmp_path / "config", cluster=cluster, user={"exec": section}))
    assert isinstance(found.credentials, Exec)
    plugin = found.credentials.plugin
    assert plugin.command == str(tmp_path / "bin" / "login")
    assert plugin.args == ("--region", "x")
    assert plugin.env == {"A": "b"}
    assert plugin.cluster == {"server": "https://x", "config": {"audience": "z"}}


def test_impersonation_becomes_headers(tmp_path: Path) -> None:
    found = of(kubeconfig(tmp_path / "config", user={"as": "jane", "as-groups": ["dev"]}))
    assert found.headers == {"Impersonate-User": "jane", "Impersonate-Group": "dev"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"current": ""}, "it has no current-context; its contexts are: main"),
        ({"current": "other"}, 'there is no context "other"; its contexts are: main'),
        ({"context": {"cluster": "other"}}, 'names cluster "other", which is not among its clusters: main'),
        ({"context": {"user": "other"}}, 'names user "other", which is missing'),
        ({"cluster": {}}, 'cluster "main" has no server'),
        ({"cluster": {"server": "ftp://x"}}, "must be an http or https URL"),
        ({"cluster": {"server": "ftp://me:secret@x"}}, 'server is "ftp://…@x", must be'),
        ({"cluster": {"server": 5}}, r"Expected `str`, got `int` - at `\$.clusters\[0\].cluster.server`"),
        ({"cluster": {"server": "https://x", "certificate-authority-data": "!"}}, "is not base64"),
        ({"cluster": {"server": "https://x", "certificate-authority": "/none"}}, "/none cannot be read"),
        ({"cluster": {"server": "https://x", "proxy-url": "socks5://y"}}, "proxy-url is"),
        ({"user": {"auth-provider": {"name": "gcp"}}}, "auth-provider was removed"),
        (
            {"user": {"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}}},
            "must be one of client.authentication.k8s.io/v1, client.authentication.k8s.io/v1beta1",
        ),
        ({"user": {"as": "x", "as-groups": ["a", "b"]}}, "several groups"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(kubeconfig(tmp_path / "config", **overrides))


def test_a_certificate_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.der").write_bytes(b"\x30\x82\xff")
    cluster = {"server": "https://x", "certificate-authority": "ca.der"}
    with pytest.raises(ConfigError, match=r"certificate-authority .*/ca\.der cannot be read: it is no text"):
        of(kubeconfig(tmp_path / "config", cluster=cluster))


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        of(tmp_path / "config")


ODD = {
    "a namespace of null": {"context": {"namespace": None}},
    "a token of null": {"user": {"token": None, "exec": None, "as-groups": None}},
    "certificates of null": {"user": {"client-certificate-data": None, "client-key": None, "token": "t"}},
    "an authority of null": {"cluster": {"server": "https://main", "certificate-authority-data": None}},
    "what we do not know": {"user": {"token": "t", "unheard-of": {"a": [None]}}, "context": {"x": None}},
    "extensions of null": {"cluster": {"server": "https://main", "extensions": None}},
    "an empty user": {"user": {}},
    "no user at all": {"user": None},
    "an exec plugin with nulls": {
        "user": {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": "x",
                "args": None,
                "env": None,
                "installHint": None,
                "interactiveMode": None,
                "provideClusterInfo": None,
            }
        }
    },
}


@pytest.mark.parametrize("overrides", ODD.values(), ids=ODD)
def test_null_is_as_good_as_nothing(tmp_path: Path, overrides: dict[str, Any]) -> None:
    found = of(kubeconfig(tmp_path / "config", **overrides))
    assert (found.server, found.namespace) == ("https://main", "default")


@pytest.mark.parametrize(
    "other",
    [
        {"users": [{"name": "u2", "user": {"exec": {"env": [{"name": None, "value": 5}]}}}]},
        {
            "users": [
                {"name": "u2", "user": {"token": 5, "auth-provider": {"name": "gcp"}}},
                None,
                {"name": None},
            ]
        },
        {"clusters": [{"name": "c2", "cluster": {"server": 5, "certificate-authority": "/nowhere"}}]},
        {"clusters": [{"name": "c2", "cluster": "nonsense"}], "preferences": None},
        {"contexts": [{"name": "x2", "context": {"cluster": None, "namespace": 7}}, {"name": "x3"}]},
        {"extensions": [{"name": "x", "extension": {"deep": [None]}}], "kind": None, "unheard-of": 1},
    ],
)
def test_what_is_not_chosen_does_not_matter(tmp_path: Path, other: dict[str, Any]) -> None:
    path = kubeconfig(tmp_path / "config")
    document = yaml.safe_load(path.read_text())
    for name, value in other.items():
        document[name] = document[name] + value if name in document and isinstance(value, list) else value
    path.write_text(yaml.safe_dump(document))
    assert of(path).credentials.current() == Secret(token="token-main")


@pytest.mark.parametrize("plural", ["clusters", "users", "contexts"])
def test_a_list_of_null_is_an_empty_one(tmp_path: Path, plural: str) -> None:
    path = kubeconfig(tmp_path / "config")
    other = kubeconfig(tmp_path / "other")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), plural: None}))
    both = os.pathsep.join(map(str, (path, other)))
    assert connect({"KUBECONFIG": both}).server == "https://main"


@pytest.mark.parametrize("more", ["---\napiVersion: v1\n", "---\n", "...\n---\n[\n"])
def test_of_several_documents_the_first_counts(tmp_path: Path, more: str) -> None:
    path = kubeconfig(tmp_path / "config")
    path.write_text(f"---\n{yaml.safe_dump(yaml.safe_load(path.read_text()))}{more}")
    assert of(path).server == "https://main"


def test_an_empty_file_is_a_config_without_contexts(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("")
    with pytest.raises(ConfigError, match="its contexts are: none"):
        of(tmp_path / "config")


def test_no_file_anywhere_tells_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(MissingConfigError, match="set KUBECONFIG") as caught:
        connect({"HOME": str(tmp_path)})
    assert caught.value.path == str(tmp_path / ".kube" / "config")


@pytest.fixture
def service_account(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("pod-token")
    (tmp_path / "ca.crt").write_text("POD-CA")
    (tmp_path / "namespace").write_text("kube-system")
    return str(tmp_path)


def test_in_a_pod_the_service_account_is_used(service_account: str, tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "KUBERNETES_SERVICE_PORT": "6443",
    }
    found = connect(environ, service_account=service_account)
    assert found.server == "https://10.0.0.1:6443"
    assert found.namespace == "kube-system"
    assert found.tls.authority == "POD-CA"
    assert found.credentials.current().token == "pod-token"


def test_in_a_pod_a_home_that_cannot_be_entered_does_not_matter(service_account: str) -> None:
    """As where an image's HOME is root's and the pod runs as somebody else; a long name stops root too."""
    home = {"HOME": "/" + "x" * 300}
    found = connect({**home, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, service_account=service_account)
    assert found.credentials.current().token == "pod-token"
    with pytest.raises(MissingConfigError, match="File name too long"):
        connect(home)


def test_a_pod_with_ipv6_gets_brackets(service_account: str) -> None:
    assert (
        in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}, service_account).server == "https://[fd00::1]:443"
    )


def test_outside_a_pod_in_cluster_says_so() -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        in_cluster({})


@pytest.mark.parametrize(
    ("server", "environ", "proxy"),
    [
        ("https://api:6443", {"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ("https://api:6443", {"https_proxy": "https://proxy"}, "https://proxy"),
        ("http://api", {"HTTPS_PROXY": "http://proxy"}, ""),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://proxy"}, ""),
        ("https://localhost", {"HTTPS_PROXY": "http://proxy"}, ""),
        ("https://10.1.2.3", {"HTTPS_PROXY": "http://proxy", "NO_PROXY": "10.0.0.0/8"}, ""),
        ("https://a.example.com", {"HTTPS_PROXY": "http://proxy", "NO_PROXY": "x, .example.com"}, ""),
        (
            "https://an-example.com",
            {"HTTPS_PROXY": "http://proxy", "NO_PROXY": "example.com"},
            "http://proxy",
        ),
        ("https://api", {"HTTPS_PROXY": "http://proxy", "NO_PROXY": "*"}, ""),
    ],
)
def test_proxies_of_the_environment(server: str, environ: dict[str, str], proxy: str) -> None:
    assert proxy_for(server, environ) == proxy


@pytest.mark.parametrize(
    ("entry", "server", "direct"),
    [
        ("10.1.2.3:6443", "https://10.1.2.3:6443", True),
        ("10.1.2.3:443", "https://10.1.2.3", True),
        ("10.1.2.3:80", "https://10.1.2.3", False),
        ("[fd00::1]:6443", "https://[fd00::1]:6443", True),
        ("fd00::/8", "https://[fd00::1]", True),
        ("fd00::1", "https://[fd00::1]", True),
        ("api:6443", "https://api:6443", True),
        ("api:6443", "https://api", False),
        ("Example.COM", "https://example.com", True),
        ("example.com", "https://a.example.com", True),
        (".example.com", "https://example.com", False),
        ("*.example.com", "https://a.example.com", True),
        ("*.example.com", "https://example.com", False),
        (".example.com:6443", "https://a.example.com:6443", True),
        (":6443", "https://api:6443", False),
        (".", "https://api", False),
    ],
)
def test_no_proxy_is_read_as_kubectl_reads_it(entry: str, server: str, direct: bool) -> None:
    """Source: golang.org/x/net/http/httpproxy, config.init and useProxy."""
    environ = {"HTTPS_PROXY": "http://proxy", "NO_PROXY": f"other, {entry}"}
    assert proxy_for(server, environ) == ("" if direct else "http://proxy")
