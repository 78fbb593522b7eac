"""What a careless user gets from the command line: a sentence that names the thing, and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests import HANG_S, warm_start

PROGRAM = "from gpuslice.apps.cli.main import main; main()"
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{{name: here, cluster: {{server: "{server}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
users: [{{name: me, user: {{token: "{token}"}}}}]
"""
UNUSABLE = "/" + "x" * 300  # for root too, who may enter any folder
EMPTY = json.dumps({"kind": "List", "metadata": {}, "items": []}).encode()


def gpuslice(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return warm_start.run(arguments, {**os.environ, **environ})


def assert_said(told: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    """One line of its own words; a wrong command line also gets click's hint at the help."""
    lines = told.stderr.strip().splitlines()
    assert (told.returncode, sentence in lines[-1]) == (code, True), told.stderr
    assert len(lines) == 1 or lines[0].startswith("Usage: "), told.stderr


class Answers(BaseHTTPRequestHandler):
    """Each folder of the server is another cluster: the first part of the path says what it answers."""

    def do_GET(self) -> None:
        kind, _, path = self.path.lstrip("/").partition("/")
        code, body = self.answer(kind, path)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, kind: str, path: str) -> tuple[int, bytes]:
        if kind == "stranger":
            return 401, b'{"kind":"Status","message":"Unauthorized","code":401}'
        if kind == "forbidden":
            return 403, b'{"kind":"Status","message":"nodes is forbidden","code":403}'
        if kind == "nodes-only" and "/nodes" not in path:
            return 403, b'{"kind":"Status","message":"that is forbidden","code":403}'
        if kind == "login":
            return 302, b"<html><b>Please log in</b></html>"
        if kind == "page":
            return 200, b"# a page of somebody else\nup 1\nnot a sample\n"
        return 200, EMPTY

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def kubeconfig(folder: Path, server: str, token: str = "") -> str:
    path = folder / "kubeconfig"
    path.write_text(KUBECONFIG.format(server=server, token=token))
    return str(path)


@pytest.mark.parametrize("server", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "not a url", "https://"])
def test_a_server_that_is_no_address_is_named(tmp_path: Path, server: str) -> None:
    told = gpuslice("inspect", KUBECONFIG=kubeconfig(tmp_path, server))
    assert_said(told, 1, 'Error: cluster "here": server is "')


@pytest.mark.parametrize("token", ["a\\nb", "schlüssel☃"])
def test_a_token_that_no_header_can_carry_is_not_told(tmp_path: Path, token: str) -> None:
    told = gpuslice("inspect", KUBECONFIG=kubeconfig(tmp_path, "http://127.0.0.1:1", token))
    assert_said(told, 1, "Error: the token has a line break or another character")
    assert "schl" not in told.stderr


@pytest.mark.parametrize("command", ["inspect", "top --once", "explain p", "doctor", "console", "extender"])
def test_a_kubeconfig_that_is_not_there_is_a_clear_sentence(command: str) -> None:
    told = gpuslice(*command.split(), KUBECONFIG="/nonexist:/nowhere")
    why = "no such file or directory; set KUBECONFIG or give --kubeconfig"
    assert_said(told, 1, f"Error: kubeconfig /nonexist cannot be read: {why}")


def test_a_kubeconfig_that_is_no_yaml_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a: [1, 2\n b: {")
    told = gpuslice("inspect", KUBECONFIG=str(tmp_path / "config"))
    assert_said(told, 1, "config is not YAML: while parsing a flow sequence at line 1")


@pytest.mark.parametrize("command", ["inspect", "top", "doctor", "explain p", "simulate --from-cluster"])
@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ("stranger", "Unauthorized: the API server does not accept these credentials (HTTP 401)"),
        ("forbidden", "nodes is forbidden (HTTP 403)"),
        ("login", "Please log in (HTTP 302)"),
    ],
)
def test_a_cluster_that_cannot_be_read_is_code_1(
    tmp_path: Path, address: str, cluster: str, sentence: str, command: str
) -> None:
    told = gpuslice(*command.split(), KUBECONFIG=kubeconfig(tmp_path, f"{address}/{cluster}"))
    assert_said(told, 1, sentence)
    assert told.stdout == ""


def test_doctor_calls_nothing_absent_that_it_may_not_read(tmp_path: Path, address: str) -> None:
    told = gpuslice("doctor", "-o", "json", KUBECONFIG=kubeconfig(tmp_path, f"{address}/nodes-only"))
    findings = json.loads(told.stdout)["findings"]
    assert (told.returncode, {each["level"] for each in findings}) == (0, {"note"})
    assert {"pods", "services"} <= {each["where"] for each in findings}


def test_doctor_asks_addresses_and_says_which_does_not_answer(tmp_path: Path, address: str) -> None:
    words = [
        "--answers",
        f"{address}/any",
        "--answers",
        f"{address}/stranger",
        "--fail-on",
        "error",
        "-o",
        "json",
    ]
    known = kubeconfig(tmp_path, f"{address}/nodes-only")
    told = gpuslice("doctor", *words, KUBECONFIG=known)
    errors = [each for each in json.loads(told.stdout)["findings"] if each["level"] == "error"]
    assert (told.returncode, [each["where"] for each in errors]) == (3, [f"{address}/stranger"])
    assert "Unauthorized" in errors[0]["what"]
    assert gpuslice("doctor", *words[:2], *words[4:], KUBECONFIG=known).returncode == 0


@pytest.mark.parametrize("name", ["", "/", "a/b/c", "../x", "p?x=1", "ü", "a b"])
def test_what_is_no_name_of_a_pod_is_not_asked_for(tmp_path: Path, address: str, name: str) -> None:
    told = gpuslice("explain", name, KUBECONFIG=kubeconfig(tmp_path, f"{address}/any"))
    assert_said(told, 1, f'POD is "{name}", must be the name of a pod, NAMESPACE/NAME, or KIND/NAME')


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///etc/passwd", "file:///etc/passwd must be an http or https URL"),
        ("{address}/page", "/page: no gpuslice exporter answers there"),
        ("{address}/any/metrics", "no gpuslice exporter answers there"),
        ("http://127.0.0.1:1/metrics", "Connection refused"),
    ],
)
def test_an_address_without_an_exporter_is_named(address: str, url: str, sentence: str) -> None:
    told = gpuslice("top", "--once", "--exporter", url.format(address=address))
    assert_said(told, 1, sentence)
    assert told.stdout == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("top --every nan", "'--every': nan is no number to count with"),
        ("simulate --growth inf", "'--growth': inf is no number to count with"),
        ("simulate --seed -1", "'--seed': -1 is not in the range x>=0"),
        ("simulate --from-cluster --policy x", '--policy names "x", must be one or more of binpack'),
        ("load -d nan", "'--duration': nan is no number to count with"),
        ("load --tolerance nan", "'--tolerance': nan is no number to count with"),
        ("load -i " + "9" * 5000, "must be one number, or two"),
    ],
)
def test_a_wrong_command_line_is_code_2(words: str, sentence: str) -> None:
    assert_said(gpuslice(*words.split()), 2, sentence)


@pytest.fixture
def trace(tmp_path: Path) -> list[str]:
    pods, nodes = tmp_path / "pods.csv", tmp_path / "nodes.csv"
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np1,1000,1000,1,500,\n")
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,4,V100\n")
    return ["simulate", "--trace", str(pods), "--nodes", str(nodes)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--growth 1e12", "--growth 1e+12 makes 1000000000000 pods: 10000000 are the most"),
        ("--add 99999999999x8", '--add is "99999999999x8", must be NODESxCARDS'),
        ("--add 9999999x8", '--add is "9999999x8": 1000000 cards are the most'),
    ],
)
def test_a_slip_that_would_run_for_hours_is_refused(trace: list[str], words: str, sentence: str) -> None:
    assert_said(gpuslice(*trace, *words.split()), 1, sentence)


def test_a_picture_that_cannot_be_written_does_not_take_the_answer_with_it(trace: list[str]) -> None:
    told = gpuslice(*trace, "--plot", "/proc/filling.svg")
    assert_said(told, 1, "--plot: /proc/filling.svg cannot be written: No such file or directory")
    assert "opportunity-cost" in told.stdout


def test_a_path_that_cannot_be_looked_at_is_told_of() -> None:
    told = gpuslice("simulate", "--from-cluster", "--plot", f"{UNUSABLE}/plot.svg")
    before = sys.version_info < (3, 14)  # since then pathlib says of such a path that it is no folder
    code, sentence = (1, f"{UNUSABLE}: File name too long") if before else (2, "in a folder that exists")
    assert_said(told, code, sentence)


@pytest.mark.parametrize("words", ["version", "--help", "completion bash", "explain --help"])
def test_a_full_disk_is_told_of(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert_said(told, 1, "Error: the output cannot be written: No space left on device")


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as closed:
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM, "version"], stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert (told.returncode, told.stderr) == (1, b"")


def test_a_terminal_that_cannot_draw_gets_lines_in_place_of_the_live_view() -> None:
    ours, theirs = os.openpty()
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, "top", "--exporter", "http://127.0.0.1:1/metrics"],
        env={**os.environ, "TERM": "dumb"},
        stdout=theirs,
        stderr=subprocess.PIPE,
        check=False,
        timeout=HANG_S,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # nobody else writes: Linux ends so
        shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert told.returncode == 1, "it comes to its end"
    assert b"\x1b" not in shown + told.stderr


def test_a_terminal_without_the_characters_gets_others() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, "explain", "ü"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "KUBECONFIG": "/none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_said(told, 1, 'POD is "')


@pytest.mark.parametrize("process", ["extender", "webhook", "switch", "agent"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, process: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [process, "--host", "localhost" if process == "agent" else "127.0.0.1", "--port", port]
        if process == "agent":  # waits for the agent before it; an address that is none it refuses at once
            words[2] = "999.1.1.1"
        known = kubeconfig(tmp_path, "http://127.0.0.1:1")
        told = gpuslice(*words, KUBECONFIG=known, NODE_NAME="n1")
    last = told.stderr.strip().splitlines()[-1]
    why = "Name or service not known" if process == "agent" else "another program uses it"
    assert (told.returncode, last) == (1, f"Error: cannot listen on {words[2]}:{port}: {why}")
    assert "Traceback" not in told.stderr
    assert "Warning" not in told.stderr


@pytest.mark.parametrize("process", ["extender", "webhook"])
def test_a_certificate_that_is_none_is_named(tmp_path: Path, process: str) -> None:
    flags = ("--tls-certificate", "/none.crt", "--tls-key", "/none.key", "--port", "0")
    told = gpuslice(process, *flags, KUBECONFIG=kubeconfig(tmp_path, "http://127.0.0.1:1"))
    assert "certificate and key /none.crt and /none.key cannot be used: No such file" in told.stderr
    assert (told.returncode, "Traceback" in told.stderr) == (1, False)


def test_a_settings_file_that_cannot_be_read_says_why_once() -> None:
    assert_said(
        gpuslice("webhook", "--config", "/none.yaml"),
        1,
        "/none.yaml cannot be read: No such file or directory",
    )


def test_a_log_level_that_is_not_known_is_said_and_does_not_stop_the_start() -> None:
    told = gpuslice("webhook", "--log-level", "loud", "--host", "999.1.1.1")
    first = json.loads(told.stderr.splitlines()[0])
    assert (first["level"], first["given"]) == ("warning", "loud")


def test_the_demo_says_which_folder_cannot_be_made() -> None:
    told = gpuslice("demo", "--story", "cgpu", "--dir", "/dev/null")
    assert_said(told, 1, "/dev/null/cgpu cannot be made: Not a directory")


def test_many_exporters_that_are_away_are_no_wall_of_lines() -> None:
    away = [word for _ in range(9) for word in ("--exporter", "http://127.0.0.1:1/metrics")]
    told = gpuslice("top", "--once", *away)
    lines = told.stderr.splitlines()
    assert (told.returncode, len(lines)) == (1, 6), told.stderr
    assert lines[-1] == "Error: … and 4 more; -o json has all of them"
    assert len(json.loads(gpuslice("top", "-o", "json", *away).stdout)["problems"]) == 9


def test_a_proxy_that_is_away_is_named_and_its_password_is_not(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(KUBECONFIG.format(server="https://api.example.com", token="t"))
    told = gpuslice("--kubeconfig", str(path), "inspect", HTTPS_PROXY="http://me:secret@127.0.0.1:1")
    assert_said(told, 1, "https://api.example.com, through the proxy 127.0.0.1:1: Connection refused")
    assert "secret" not in told.stderr
