"""The programs ``gpuslice`` and ``kubectl-inspect-cgpu``.

A command is one line of `COMMANDS`. Its module is imported when it is called, and never for the help of other
commands: this keeps ``gpuslice --help`` fast, and keeps the processes independent of each other.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from gpuslice import __version__
from gpuslice.apps.cli.flags import Flags, cluster_flags
from gpuslice.apps.cli.output import complain
from gpuslice.apps.cli.program import end_quietly_on_interrupt, raise_on_interrupt

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


INTERRUPTED = 130  # 128 plus the number of the signal, as in shells


OF_DAEMONS = {"grpclib", "google", "numpy", "highspy", "bcrypt"}
"""Packages that the command line does without; pyproject.toml has them in the extra "daemons"."""

PLUGINS = "gpuslice.commands"  # entry points by which other distributions add a command


class Entry(NamedTuple):
    """One command: its name, its module in gpuslice.apps, its line in the help, and its name in the module.

    A command without a module comes with another distribution, which lists it among its entry points;
    `source` says how to install that.
    """

    name: str
    module: str
    help: str
    attribute: str = "command"
    source: str = ""


COMMANDS = (
    Entry("inspect", "cli.inspect", "Show what is allocated on which card."),
    Entry("top", "cli.top", "Watch what cards and containers use now."),
    Entry("console", "console.command", "Show a cluster in the browser."),
    Entry("run", "cli.run", "Run a program with part of a card, on this machine."),
    Entry("ps", "cli.ps", "Show the programs that `run` started."),
    Entry("explain", "cli.explain", "Say why a pod waits, or why it is on its card."),
    Entry("advise", "cli.advise", "Find requests that are too large or too small."),
    Entry("resize", "cli.resize", "Give a pod that runs more or less memory of its card."),
    Entry("park", "cli.park", "Move a pod's memory off its card until it is used."),
    Entry("wake", "cli.park", "Put a parked pod's memory back on its card.", "wake"),
    Entry("waste", "cli.waste", "Find who holds memory of cards without using it."),
    Entry("bill", "cli.bill", "Say who had how much of cards, for a bill."),
    Entry("capacity", "cli.capacity", "Find how many nodes are needed, and which could go."),
    Entry("doctor", "cli.doctor", "Find problems in a cluster, and how to fix them."),
    Entry("migrate", "cli.migrate", "Migrate from another system, or back to it."),
    Entry("simulate", "cli.simulate", "Place pods on empty nodes, and see what fits."),
    Entry(
        "demo",
        "",
        "Play the whole story on this machine, without a GPU.",
        source="in a checkout of gpuslice, `make demo` installs and plays it",
    ),
    Entry("extender", "extender.command", "Run the scheduler extender."),
    Entry("agent", "agent.command", "Run the node agent: kubelet's device plugin."),
    Entry("switch", "agent.command", "Switch a node between shared and whole cards.", "switch"),
    Entry("keep-off", "agent.command", "Keep a DaemonSet off nodes that share cards.", "keep_off"),
    Entry("install-library", "agent.command", "Keep the library on a node.", "install_library"),
    Entry(
        "install-extender",
        "agent.command",
        "Let a node's kube-scheduler call the extender.",
        "install_extender",
    ),
    Entry("exporter", "exporter.command", "Run the metrics exporter of a node."),
    Entry("webhook", "webhook.command", "Run the admission webhook."),
    Entry("claims", "claims.command", "Make the templates of pods' claims."),
    Entry("load", "load.main", "Put a known load on a card, and check the metrics."),
    Entry("completion", "cli.completion", "Print the completion script of a shell."),
    Entry("version", "cli.version", "Print the version."),
)


class LazyGroup(click.Group):
    """A group that knows the names of its commands and imports only the one that is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        entry = next((entry for entry in COMMANDS if entry.name == name), None)
        return load(entry) if entry is not None else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.help) for entry in COMMANDS])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the most similar commands if there is none of that name."""
        if context.resilient_parsing:  # completion continues with the list of commands, and prints no errors
            with contextlib.suppress(click.ClickException):
                if args[0] in self.list_commands(context):
                    return super().resolve_command(context, args)
            return None, None, []
        if args == ["help"]:  # as in kubectl and helm
            click.echo(context.get_help())
            context.exit()
        if args[0] == "help":
            args = [*args[1:], "--help"]
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(context):
            raise click.exceptions.NoSuchCommand(name, possibilities=self.list_commands(context), ctx=context)
        return super().resolve_command(context, args)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Tab must be as fast as the help, so it does not import the commands either."""
        from click.shell_completion import CompletionItem

        fitting = (entry for entry in COMMANDS if entry.name.startswith(incomplete))
        items = [CompletionItem(entry.name, help=entry.help) for entry in fitting]
        return items + click.Command.shell_complete(self, context, incomplete)


def load(entry: Entry) -> click.Command:
    """The click command of `entry`, or a sentence if this installation does not have it."""
    found: Any
    if entry.module:
        found = getattr(importlib.import_module(f"gpuslice.apps.{entry.module}"), entry.attribute)
    else:
        from importlib.metadata import entry_points

        plugins = entry_points(group=PLUGINS, name=entry.name)
        if not plugins:
            raise click.ClickException(f"{entry.name} is not part of this installation: {entry.source}")
        found = plugins[entry.name].load()
    assert isinstance(found, click.Command)
    return found


@click.group(
    "gpuslice",
    cls=LazyGroup,
    epilog="`gpuslice COMMAND --help` tells more of a command.",
)
@cluster_flags
@click.version_option(__version__, "--version", message="gpuslice %(version)s")
@click.pass_context
def command(context: click.Context, /, **cluster: Any) -> None:
    """Give containers fractions of a GPU, and see who uses them.

    \b
    Examples:
      gpuslice inspect               memory of shared cards, one line a node
      gpuslice inspect -d            with the pods that use it
      gpuslice top                   what they use right now
      gpuslice explain train-0       why a pod waits
    """
    context.obj = Flags(**cluster)


def run(
    program: click.Command,
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    sentence: Callable[[BaseException | str], str] = "Error: {}".format,
) -> NoReturn:
    """Run a click command and end the process: our own errors become one sentence and exit code 1.

    `sentence` phrases them. Ctrl-C ends the process without a message, as in other programs.
    """
    from gpuslice.core.errors import GpusliceError, words_of

    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows a substitute
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    raise_on_interrupt()
    try:
        code = program.main(
            args=list(arguments) if arguments is not None else None,
            prog_name=name,
            help_option_names=["-h", "--help"],
            standalone_mode=False,  # otherwise an interrupt would print "Aborted!" and exit with 1
        )
        sys.stdout.flush()
        end_quietly_on_interrupt()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):  # the latter while the last lines are written
        sys.exit(INTERRUPTED)
    except GpusliceError as error:
        _end(sentence(error))
    except ModuleNotFoundError as error:
        _end(sentence(_not_installed(error)))
    except ExceptionGroup as group:  # from a process's tasks
        ours, others = group.split(GpusliceError)
        if ours is None or others is not None:
            raise
        _end(sentence(_first(ours)))
    except OSError as error:
        if error.filename is not None:
            _end(sentence(f"{error.filename}: {words_of(error)}"))
        if error.errno not in (*_FULL, errno.EPIPE):
            raise
        # otherwise Python would try again to flush at exit, with a report and exit code 120
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if error.errno == errno.EPIPE:  # the reader has closed the pipe
            sys.exit(1)
        _end(sentence(f"the output cannot be written: {words_of(error)}"))
    sys.exit(code if isinstance(code, int) else 0)


def _not_installed(error: ModuleNotFoundError) -> str:
    """The sentence for a package that the command line does without; any other error is raised again."""
    package = (error.name or "").partition(".")[0]
    if package in sys.stdlib_module_names:  # fcntl, pwd, resource: only on Unix
        return f"this runs on Linux: Python on {sys.platform} has no module {package}"
    if package not in OF_DAEMONS:
        raise error
    return (
        f"this needs the package {package}, which comes with the extra `daemons`: "
        "pipx install --force '.[daemons]' in a checkout, 'FILE.whl[daemons]' of a release (or pip install)"
    )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def _end(sentence: str) -> NoReturn:
    complain(sentence)
    sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program ``gpuslice``, which kubectl also finds as ``kubectl gpuslice``."""
    run(command, "kubectl gpuslice" if _is_plugin() else "gpuslice", arguments)


def main_by_name() -> None:
    """One executable that is all of the programs, depending on the name by which it is called.

    krew cannot install a program with a two-word name: a plugin inspect-cgpu becomes ``kubectl
    inspect-cgpu``. Therefore its plugin is ``inspect``, and kubectl passes the second word on.
    """
    name = os.path.basename(sys.argv[0])
    if name == "kubectl-inspect":
        if sys.argv[1:2] not in (["cgpu"], ["gpushare"]):
            complain("Error: say `kubectl inspect cgpu`, or `kubectl inspect gpushare`, which is the same")
            sys.exit(2)
        inspect_main(sys.argv[2:])
    elif name.startswith("kubectl_complete"):
        complete_main()
    elif name.startswith("kubectl-inspect"):
        inspect_main()
    else:
        main()


def inspect_main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The programs ``kubectl-inspect-cgpu`` and ``kubectl-inspect-gpushare``, which kubectl finds by name.

    Their error messages are those of the plugin that they replace.
    """

    def sentence(error: BaseException | str) -> str:
        from gpuslice.adapters.kube.kubeconfig import MissingConfigError

        if isinstance(error, MissingConfigError):
            missing = f"kubeconfig {error.path} failed to find due to {error.reason}"
            return f"Failed due to {missing}, please set KUBECONFIG env"
        return f"Failed due to {error}"

    run(load(COMMANDS[0]), "kubectl inspect cgpu", arguments, sentence=sentence)


def complete_main(arguments: Sequence[str] | None = None) -> None:
    """The programs ``kubectl_complete-…``, which kubectl's completion calls for proposals."""
    from gpuslice.apps.cli.completion import kubectl_answer

    of = command if _is_plugin() else load(COMMANDS[0])
    click.echo(kubectl_answer(of, sys.argv[1:] if arguments is None else arguments))


def _is_plugin() -> bool:
    return os.path.basename(sys.argv[0]) in {"kubectl-gpuslice", "kubectl_complete-gpuslice"}
