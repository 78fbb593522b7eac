"""``gpuslice run``: the same isolation on a single machine, without Kubernetes."""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from gpuslice.adapters.gpu.source import DriverCard
from gpuslice.adapters.region.budget import LIBRARY, Budget, BudgetError, Budgets, Member
from gpuslice.adapters.region.layout import CARDS
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.adapters.region.living import start_time_of
from gpuslice.apps.cli.completion import files
from gpuslice.apps.cli.executable import why_not_held, why_not_loaded
from gpuslice.apps.cli.machine import (
    chosen_cards,
    machine_cards,
    memory_bytes,
    named_cards,
    parse_memory,
    room_bytes,
)
from gpuslice.apps.cli.ps import base_flag
from gpuslice.core.units import MIB

LIBRARIES = (
    Path("/usr/lib/gpuslice/libgpuslice.so"),
    Path("/usr/local/lib/gpuslice/libgpuslice.so"),
    Path(__file__).resolve().parents[2] / "lib/libgpuslice.so",  # in a wheel for one platform
    Path(__file__).resolve().parents[4] / "native/build/lib/libgpuslice.so",
)
GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
TRIES, LONGEST_PAUSE_S = 20, 0.3
REFUSED, CANNOT_START, NOT_FOUND = 125, 126, 127
"""Exit codes of `run` itself, as in env(1) and timeout(1); all others are the program's."""


class RunError(click.ClickException):
    """The program was not started."""

    exit_code = REFUSED

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"gpuslice run: {self.message}", err=True, file=file)


class CannotStartError(RunError):
    """The program exists and cannot be executed."""

    exit_code = CANNOT_START


class NotFoundError(RunError):
    """There is no program of that name."""

    exit_code = NOT_FOUND


@dataclass(frozen=True, slots=True)
class Wish:
    """What a program is to be run with."""

    memory: str
    compute_percent: int | None
    gpu: str
    gpus: int | None
    group: str


@click.command(
    "run",
    # Everything after the program's name belongs to the program, even if it looks like one of our options.
    context_settings={"allow_interspersed_args": False},
    options_metavar="--mem AMOUNT [OPTIONS] [--]",
)
@click.option(
    "--mem",
    "memory",
    required=True,
    metavar="AMOUNT",
    help="Units of the card, as aliyun.com/gpu-mem, or an amount like 512MiB; of each card, if several.",
)
@click.option(
    "--share",
    "compute_percent",
    type=click.IntRange(1, 100),
    help="Percent of the card's compute. [default: no limit]",
)
@click.option(
    "--gpu",
    default="",
    metavar="INDEX|UUID[,...]",
    help="Which card, or cards. [default: the one with the most room]",
)
@click.option("--gpus", type=click.IntRange(1, CARDS), metavar="N", help="How many cards. [default: 1]")
@click.option(
    "--group",
    default="",
    metavar="NAME",
    help="Share one budget with all who use this name. [default: its own]",
)
@click.option("--library", type=click.Path(path_type=Path), help="Where libgpuslice.so is.")
@base_flag
@click.argument(
    "program",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="PROGRAM [ARGUMENTS]",
    shell_complete=files,
)
def command(program: tuple[str, ...], library: Path | None, base: Path, **wish: Any) -> None:
    """Run PROGRAM with part of a card's memory, and optionally of its compute.

    \b
    Examples:
      gpuslice run --mem 4 python train.py            4 units (GiB) of the card with the most room
      gpuslice run --mem 4 --share 25 python serve.py and a quarter of its compute
      gpuslice run --mem 512MiB --gpu 1 ./a.out       of card 1
      gpuslice run --mem 8 --gpus 2 torchrun t.py     of two cards, 8 GiB each
      gpuslice run --mem 8 --group lab bash           one budget for all who use --group lab

    The program replaces the gpuslice process: exit code, signals and terminal are its own. If it cannot be
    started, the exit code is 125, 126 (it cannot be executed) or 127 (there is no such program).
    """
    try:
        start(Wish(**wish), program, library, Budgets(base.absolute()))
    except BudgetError as error:
        raise RunError(str(error)) from error


def start(wish: Wish, program: Sequence[str], library: Path | None, budgets: Budgets) -> NoReturn:
    """Replaces this process by the program: exit status, signals and terminal are the program's."""
    check(wish, program)
    cards, member = machine_cards(), own_member(program)
    with budgets.locked() as why_not:
        if why_not:
            click.echo(f"gpuslice run: {why_not}: going on without it", err=True)
        folder, limits = given_budget(wish, cards, budgets, library, member)
    preload = folder / LIBRARY
    if re.search(r"[\s:]", str(preload)):
        raise BudgetError(f'the path "{preload}" has a blank or a colon, and the loader splits there')
    preloads = filter(None, (str(preload), os.environ.get("LD_PRELOAD", "")))
    environment = os.environ | {
        "LD_PRELOAD": os.pathsep.join(preloads),
        "CUDA_VISIBLE_DEVICES": ",".join(limit.uuid for limit in limits),
    }
    warn(program[0])
    sys.stdout.flush()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvpe(program[0], list(program), environment)
    except OSError as error:
        raise CannotStartError(f'"{program[0]}" cannot be started: {error.strerror}') from error


def warn(name: str) -> None:
    """The program is started all the same: launchers are often linked like this, and what they start is
    limited.
    """
    found = shutil.which(name)
    why = why_not_held(Path(found)) if found else ""
    if why:
        click.echo(f'gpuslice run: "{name}" is {why}: only programs that it starts are limited', err=True)


def check(wish: Wish, program: Sequence[str]) -> None:
    """Errors that can be found without looking at a card."""
    parse_memory(wish.memory)
    if shutil.which(program[0]) is None:
        try:
            Path(program[0]).stat()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f'there is no program "{program[0]}"') from None
        except OSError as error:
            raise CannotStartError(f'"{program[0]}" cannot be started: {error.strerror}') from error
        raise CannotStartError(f'"{program[0]}" is no program that may be executed')
    if wish.group and not GROUP.fullmatch(wish.group):
        raise BudgetError(
            f'the group is "{wish.group}", must be letters, digits, dots, dashes and underscores, at most 63'
        )
    if b"libgpuslice.so" in Path("/proc/self/maps").read_bytes():
        raise BudgetError(
            "this shell has a part of a card already, and what it starts shares that:"
            " start the program without `gpuslice run`, or from another shell"
        )


def given_budget(
    wish: Wish, cards: Sequence[DriverCard], budgets: Budgets, library: Path | None, member: Member
) -> tuple[Path, tuple[LimitsEntry, ...]]:
    """A budget as requested, containing this program: the group's if there is one, otherwise a new one.

    Without the lock, others may choose at the same time: whoever finds the card overcommitted removes its own
    budget and chooses again, no matter who was first. At least one of two is certain to find it, because both
    look after both have written.
    """
    name = wish.group or f"{member.user}-{member.pid}"
    for _ in range(TRIES):
        running = budgets.list()
        joined = next(of_the_group(wish, running), None)
        if joined is not None:
            folder, limits = joined.folder, same_budget(wish, cards, joined)
            budgets.join(folder, member)
        else:
            limits = tuple(
                LimitsEntry(card.uuid, memory_bytes(wish.memory, card), wish.compute_percent)
                for card in chosen_cards(wish.gpu, wish.gpus, wish.memory, cards, running)
            )
            folder = budgets.make(name, limits, checked_library(library or found_library()), member)
        running = budgets.list()
        is_too_much = joined is None and is_over_or_double(folder, wish, cards, running)
        if is_member(folder, member, running) and not is_too_much:
            return folder, limits
        budgets.leave(folder, member)
        time.sleep(random.uniform(0, LONGEST_PAUSE_S))  # so that the two do not choose at the same time again
    raise BudgetError("others choose cards at the same moment, again and again: try once more")


def of_the_group(wish: Wish, running: Sequence[Budget]) -> Iterator[Budget]:
    """None if no group is named: a budget with our name would then be somebody else's bait."""
    return (budget for budget in running if wish.group and budget.name == wish.group)


def is_member(folder: Path, member: Member, running: Sequence[Budget]) -> bool:
    return any(
        budget.folder == folder and member.pid in {each.pid for each in budget.members} for budget in running
    )


def is_over_or_double(
    folder: Path, wish: Wish, cards: Sequence[DriverCard], running: Sequence[Budget]
) -> bool:
    """Whether a budget just created overcommits its cards, or is the second of its group."""
    taken = {limit.uuid for budget in running if budget.folder == folder for limit in budget.limits}
    over = any(room_bytes(card, running) < 0 for card in cards if card.uuid in taken)
    return over or any(budget.folder != folder for budget in of_the_group(wish, running))


def same_budget(wish: Wish, cards: Sequence[DriverCard], budget: Budget) -> tuple[LimitsEntry, ...]:
    known = {card.uuid: card for card in cards}
    wished = tuple(
        LimitsEntry(
            limit.uuid,
            memory_bytes(wish.memory, known[limit.uuid]) if limit.uuid in known else None,
            wish.compute_percent,
        )
        for limit in budget.limits
    )
    if wish.gpu and {card.uuid for card in named_cards(wish.gpu, "--gpu", cards)} != {
        limit.uuid for limit in budget.limits
    }:
        on = ", ".join(limit.uuid for limit in budget.limits)
        raise BudgetError(f'group "{budget.name}" runs on {on}: leave --gpu out, or name another group')
    if wished != budget.limits or (wish.gpus or len(wished)) != len(wished):
        raise BudgetError(
            f'group "{budget.name}" runs with {described(budget.limits)},'
            f" not {described(wished[: wish.gpus])}: ask for the same, or name another group"
        )
    return budget.limits


def described(limits: Sequence[LimitsEntry]) -> str:
    first = limits[0]
    share = f" and {first.compute_percent} % of compute" if first.compute_percent else ""
    cards = f" on each of {len(limits)} cards" if len(limits) > 1 else ""
    return f"{(first.memory_bytes or 0) // MIB} MiB{share}{cards}"


def found_library() -> Path:
    found = next((path for path in LIBRARIES if path.exists()), None)
    if found is None:
        raise BudgetError(
            f"libgpuslice.so is in none of {', '.join(map(str, LIBRARIES))}:"
            " `make native` in a checkout builds it; copy it to one of them, or name it with --library"
        )
    return found


def checked_library(path: Path) -> Path:
    """Checked because the loader only warns if it cannot load a library, and starts the program without
    limits.
    """
    if not path.is_file():
        raise BudgetError(f"--library: there is no file {path}")
    found = path.resolve().parent / Path(LIBRARY).name  # budgets link to the folder
    if why := why_not_loaded(found):
        raise BudgetError(f"--library: {found} cannot limit a program: {why}")
    return found


def own_member(program: Sequence[str]) -> Member:
    return Member(os.getpid(), start_time_of(os.getpid()) or 0, user_name(), tuple(program))


def user_name() -> str:
    """From the user id: the environment may say anything, and some users have no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid{os.getuid()}"
