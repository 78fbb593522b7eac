"""The command line starts at once, and its commands are where it says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from gpuslice import __version__
from gpuslice.apps.cli.main import COMMANDS, Entry, command, load
from tests import HANG_S

PROGRAM = "from gpuslice.apps.cli.main import main; main({arguments!r})"
TELL_MODULES = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
users: [{{name: me, user: {{}}}}]
"""
WIDEST = 100
ROOT = Path(__file__).resolve().parents[2]
CLI_PAGE = ROOT / "docs/reference/cli.md"
SLOW = {
    "asyncio",
    "aiohttp",
    "numpy",
    "rich",
    "yaml",
    "grpclib",
    "google.protobuf",
    "http.client",
    "ssl",
    "pynvml",
}


def python(
    *arguments: str, before: str = "", environ: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    program = before + PROGRAM.format(arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def imported(*arguments: str, environ: Mapping[str, str] = {}) -> set[str]:
    """The modules of a process at its end."""
    told = python(*arguments, before=TELL_MODULES, environ=environ).stderr
    return set(told.splitlines()[-1].split())


def test_help_imports_nothing_slow() -> None:
    modules = imported("--help")
    assert "click" in modules
    assert {name for name in modules if name in SLOW or name.partition(".")[0] in SLOW} == set()
    assert not any(name.startswith("gpuslice.adapters") for name in modules)


def test_reading_a_cluster_imports_only_what_it_needs() -> None:
    modules = imported("--kubeconfig", "/none", "inspect")
    assert "gpuslice.adapters.kube.client" in modules
    assert modules & (SLOW - {"asyncio", "ssl", "yaml"} | {"fractions", "shutil"}) == set()


@pytest.mark.parametrize("entry", COMMANDS, ids=[entry.name for entry in COMMANDS])
def test_the_help_of_a_command_imports_nothing_of_what_it_would_run(entry: Entry) -> None:
    """Options are known from the settings alone."""
    modules = imported(entry.name, "--help")
    assert (f"gpuslice.apps.{entry.module}" if entry.module else "gpuslice_demo.main") in modules
    assert modules & SLOW == set()
    assert not any(name.startswith("simcluster") for name in modules)


def test_help_names_every_command() -> None:
    told = CliRunner().invoke(command, ["--help"]).output
    for entry in COMMANDS:
        assert re.search(rf"^  {entry.name} +\S", told, re.MULTILINE)


@pytest.mark.parametrize("entry", COMMANDS, ids=[entry.name for entry in COMMANDS])
def test_every_command_is_where_the_registry_says(entry: Entry) -> None:
    found = load(entry)
    assert found.help
    told = CliRunner().invoke(command, [entry.name, "--help"])
    assert told.exit_code == 0, told.output


def test_a_command_that_is_not_installed_says_so() -> None:
    with pytest.raises(click.ClickException, match="walk is not part of this installation: buy shoes"):
        load(Entry("walk", "", "", "", source="buy shoes"))


@pytest.mark.parametrize(("name", "module"), [("run", "pwd"), ("ps", "fcntl")])
def test_where_python_has_no_modules_of_unix_a_command_says_that_it_runs_on_linux(
    name: str, module: str
) -> None:
    windows = "import sys; sys.modules.update(dict.fromkeys(['fcntl', 'pwd', 'resource']))"
    program = f"{windows}; from gpuslice.apps.cli.main import main; main(['{name}', '--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    sentence = f"Error: this runs on Linux: Python on {sys.platform} has no module {module}\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.parametrize("words", [[], ["inspect"], ["top", "node"]])
def test_help_is_a_command_too(words: list[str]) -> None:
    told = CliRunner().invoke(command, ["help", *words])
    assert (told.exit_code, told.output) == (0, CliRunner().invoke(command, [*words, "--help"]).output)


def test_it_starts_as_a_module_where_no_program_is_on_the_path() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "gpuslice", "version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"gpuslice {__version__}\n"


def test_an_unknown_command_names_the_nearest() -> None:
    told = CliRunner().invoke(command, ["inspct"])
    assert told.exit_code == 2
    assert "No such command 'inspct'. Did you mean 'inspect'?" in told.output


@pytest.mark.parametrize("words", ["gpuslice ", "gpuslice agent --", "gpuslice exporter --"])
def test_completing_imports_nothing_of_what_it_would_run(words: str) -> None:
    """A Tab that takes a second is not pressed twice."""
    place = str(words.count(" "))
    modules = imported(
        environ={"_GPUSLICE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
    )
    assert "click.shell_completion" in modules
    assert modules & SLOW == set()
    assert "gpuslice.apps.cli.inspect" not in modules


@pytest.mark.parametrize("before", [[], ["help"], ["inspct"]])
def test_a_shell_is_offered_the_commands_with_their_help(before: list[str]) -> None:
    offered = ShellComplete(command, {}, "gpuslice", "_GPUSLICE_COMPLETE").get_completions(before, "ex")
    assert [item.value for item in offered] == ["explain", "extender", "exporter"]
    assert all(item.help for item in offered)


def widths(*arguments: str) -> list[str]:
    told = CliRunner().invoke(command, [*arguments, "--help"], terminal_width=80)
    assert told.exit_code == 0, told.output
    return [line for line in told.output.splitlines() if len(line) > WIDEST]


@pytest.mark.parametrize("entry", COMMANDS, ids=[entry.name for entry in COMMANDS])
def test_help_fits_a_terminal(entry: Entry) -> None:
    """Examples stand as they are written; all else is wrapped."""
    assert widths(entry.name) == []


@pytest.mark.parametrize("entry", COMMANDS, ids=[entry.name for entry in COMMANDS])
def test_the_list_says_of_each_command_what_its_own_help_says(entry: Entry) -> None:
    """Both begin with the same verb, so that neither can become untrue alone."""
    own = load(entry).help
    assert own is not None
    assert own.split()[0] == entry.help.split()[0]


def test_version_is_that_of_the_package() -> None:
    assert python("version").stdout == python("--version").stdout == f"gpuslice {__version__}\n"


def test_an_interrupt_ends_it_without_words(tmp_path: Path) -> None:
    """In the middle of a question that the API server does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "config").write_text(KUBECONFIG.format(port=server.getsockname()[1]))
        words = ["--kubeconfig", str(tmp_path / "config"), "inspect"]
        heeding = ["env", "--default-signal=INT"]  # what a shell starts behind `&` is deaf to it
        program = [sys.executable, "-c", PROGRAM.format(arguments=words)]
        process = subprocess.Popen([*heeding, *program], stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=HANG_S)
    assert (process.returncode, told.strip()) == (130, "")


def test_every_command_is_documented() -> None:
    rows = re.findall(r"^\| (`.+?) \|", CLI_PAGE.read_text(), re.MULTILINE)
    told = {word for row in rows for code in re.findall(r"`([^`]+)`", row) for word in code.split()}
    assert {entry.name for entry in COMMANDS} - told == set()


def shown_lines() -> Iterator[tuple[str, str]]:
    """The command lines of ours that pages and help texts show, in the form `command arguments`."""
    pages = (path for place in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in ROOT.glob(place))
    for page in pages:
        is_block = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_block ^= line.startswith("```")
            whole = is_block or line.startswith("    ")
            found = re.findall(r"^ *(?:\$ )?gpuslice (.*)" if whole else r"`gpuslice ([^`]*)`", line)
            yield from ((f"{page.relative_to(ROOT)}:{number}", each) for each in found)
    for entry in COMMANDS:
        for line in re.findall(r"^ +gpuslice (.*)", load(entry).help or "", re.MULTILINE):
            yield f"gpuslice {entry.name} --help", line


def test_the_command_lines_of_pages_and_help_texts_are_understood() -> None:
    """Parsed as they stand, with the first of alternatives, and values in place of a few placeholders."""
    values = {"COUNT": "2", "SYSTEM": "hami", "pods.csv": os.devnull, "nodes.csv": os.devnull}
    read, wrong = 0, []
    for where, line in shown_lines():
        shown = re.split(r" {2,}| [#|\\]", line)[0]
        words = [word.split("\\")[0].split("|")[0] for word in re.sub(r"[\[\]…',:]", "", shown).split()]
        words = [values.get(word, word) for word in words]
        if words[0] not in command.list_commands(click.Context(command)):
            continue
        found, words = load(next(entry for entry in COMMANDS if entry.name == words[0])), words[1:]
        if isinstance(found, click.Group) and words and words[0] in found.commands:
            found, words = found.commands[words[0]], words[1:]
        read += 1
        try:
            found.make_context(found.name or "", words, parent=click.Context(command))
        except (click.exceptions.Exit, click.MissingParameter):  # --help, and fragments of a command line
            continue
        except click.UsageError as error:
            wrong.append(f"{where}: {line}: {error.format_message()}")
    assert (read > 200, wrong) == (True, [])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    told = CliRunner().invoke(command, ["completion", shell])
    assert told.exit_code == 0
    assert "_GPUSLICE_COMPLETE" in told.output


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("click.py", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"),
        (
            "sitecustomize.py",
            "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)",
        ),
    ],
)
def test_an_interrupt_while_python_starts_or_ends_is_no_traceback(
    file: str, code: str, tmp_path: Path
) -> None:
    """Most of a short command is the import of its packages."""
    (tmp_path / file).write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "gpuslice", "version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_program_whose_output_is_closed_lends_its_number_to_no_socket(tmp_path: Path) -> None:
    told = tmp_path / "number"
    (tmp_path / "click.py").write_text(
        f"import socket, os; open({str(told)!r}, 'w').write(str(socket.socket().fileno())); os._exit(0)"
    )
    program = f"exec {sys.executable} -m gpuslice version <&- >&- 2>&-"
    subprocess.run(["sh", "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert int(told.read_text()) > 2


def test_a_closed_output_is_a_stream_like_any_other() -> None:
    opens = "import sys; from gpuslice.apps.cli.program import open_standard_files; open_standard_files()"
    asks = opens + "; print(sys.{}.isatty())"
    for stream, closed in (("stdout", ">&-"), ("stderr", "2>&-")):
        words = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, asks.format(stream)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
