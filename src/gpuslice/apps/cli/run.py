"""``gpuslice run`` and ``gpuslice ps``: the same isolation on one machine without Kubernetes."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.source import Card, GpuUnavailableError
from gpuslice.adapters.region.budget import Budget, BudgetError, Budgets, Member
from gpuslice.adapters.region.limits import CardLimit
from gpuslice.adapters.region.living import start_time_of
from gpuslice.apps.cli.output import output_flag, print_document
from gpuslice.apps.cli.table import aligned, row
from gpuslice.core.units import MIB, card_units, limit_bytes

BASE = Path("/tmp/gpuslice-budgets")
LIBRARIES = (
    Path("/usr/lib/gpuslice/libgpuslice.so"),
    Path("/usr/local/lib/gpuslice/libgpuslice.so"),
    Path(__file__).resolve().parents[4] / "native/build/lib/libgpuslice.so",
)
GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
MEMORY = re.compile(r"(?P<amount>[1-9][0-9]*)(?P<unit>MiB|GiB|)")


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants to run with."""

    memory: str
    share_percent: int | None
    gpu: str
    group: str


base_flag = click.option(
    "--base", type=click.Path(path_type=Path), default=BASE, show_default=True, help="Where budgets are kept."
)


@click.command(
    "run",
    short_help="Run a program with a part of a card.",
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "--mem",
    "memory",
    required=True,
    metavar="AMOUNT",
    help="GiB of the card's memory, or an amount like 512MiB.",
)
@click.option(
    "--share",
    "share_percent",
    type=click.IntRange(1, 100),
    help="Percent of the card's compute. [default: no limit]",
)
@click.option(
    "--gpu", default="", metavar="INDEX|UUID", help="Which card. [default: the one with the most room]"
)
@click.option(
    "--group", default="", metavar="NAME", help="Share one budget with all who name it. [default: one's own]"
)
@click.option("--library", type=click.Path(path_type=Path), help="Where libgpuslice.so is.")
@base_flag
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(program: tuple[str, ...], library: Path | None, base: Path, **wish: Any) -> None:
    """Run PROGRAM with a part of a card's memory, and of its compute if you say so.

    \b
    Examples:
      gpuslice run --mem 4 -- python train.py
      gpuslice run --mem 4 --share 25 --group alice -- jupyter lab
    """
    start(Wish(**wish), program, library or found_library(), Budgets(base))


def start(wish: Wish, program: Sequence[str], library: Path, budgets: Budgets) -> NoReturn:
    """Becomes the program: its exit status, signals and terminal are its own."""
    if shutil.which(program[0]) is None:
        raise BudgetError(f'there is no program "{program[0]}"')
    if wish.group and not GROUP.fullmatch(wish.group):
        raise BudgetError(f'the group is "{wish.group}", wants letters, digits, dots and dashes')
    cards = machine_cards()
    with budgets.locked():
        name, limit = given_budget(wish, cards, budgets, library)
        preload = budgets.join(name, own_member(program))
    sys.stdout.flush()
    os.execvpe(program[0], list(program), program_environment(limit, preload))


def given_budget(wish: Wish, cards: Sequence[Card], budgets: Budgets, library: Path) -> tuple[str, CardLimit]:
    """A budget as wished: the group's if there is one, else a new one on a card that has the room."""
    running = budgets.list()
    name = wish.group or f"{getpass.getuser()}-{os.getpid()}"
    joined = next((budget for budget in running if budget.name == name), None)
    if joined is not None:
        return name, same_budget(wish, cards, joined)
    card = chosen_card(wish, cards, running)
    limit = CardLimit(card.uuid, memory_bytes(wish.memory, card), wish.share_percent)
    budgets.make(name, limit, library)
    return name, limit


def same_budget(wish: Wish, cards: Sequence[Card], budget: Budget) -> CardLimit:
    card = next((card for card in cards if card.uuid == budget.limit.uuid), None)
    memory = memory_bytes(wish.memory, card) if card else None
    wished = CardLimit(budget.limit.uuid, memory, wish.share_percent)
    if wished != budget.limit:
        raise BudgetError(
            f'group "{budget.name}" runs with {described(budget.limit)}, not {described(wished)}:'
            " ask for the same, or name another group"
        )
    return budget.limit


def chosen_card(wish: Wish, cards: Sequence[Card], running: Sequence[Budget]) -> Card:
    wanted = [card for card in cards if wish.gpu in ("", str(card.index), card.uuid)]
    if not wanted:
        known = ", ".join(f"{card.index} ({card.uuid})" for card in cards) or "none"
        raise BudgetError(f'there is no card "{wish.gpu}": this machine has {known}')
    card = max(wanted, key=lambda card: room_bytes(card, running))
    room, asked = room_bytes(card, running), memory_bytes(wish.memory, card)
    if asked > room:
        raise BudgetError(
            f"{asked // MIB} MiB are asked for and {room // MIB} MiB are the most that is left on a card"
            " (`gpuslice ps` shows who has the rest)"
        )
    return card


def room_bytes(card: Card, running: Sequence[Budget]) -> int:
    """What no budget has been given of a card."""
    given = sum(budget.limit.memory_bytes or 0 for budget in running if budget.limit.uuid == card.uuid)
    return card.memory_mib * MIB - given


def memory_bytes(memory: str, card: Card) -> int:
    """A number of GiB is that many units of the card, as in a cluster; MiB are taken as they are."""
    found = MEMORY.fullmatch(memory)
    if not found:
        raise BudgetError(f'--mem is "{memory}", wants a whole number of GiB, or an amount like 512MiB')
    amount, units = int(found["amount"]), card_units(card.memory_mib)
    if found["unit"] == "MiB":
        return amount * MIB
    return limit_bytes(card.memory_mib, amount, units) if amount <= units else amount * 1024 * MIB


def described(limit: CardLimit) -> str:
    share = f" and {limit.share_percent} % of compute" if limit.share_percent else ""
    return f"{(limit.memory_bytes or 0) // MIB} MiB{share}"


def machine_cards() -> tuple[Card, ...]:
    async def ask() -> tuple[Card, ...]:
        source = NvmlSource()
        try:
            return (await source.inventory()).cards
        finally:
            await source.close()

    try:
        cards = asyncio.run(ask())
    except GpuUnavailableError as error:
        raise BudgetError(f"this machine has no NVIDIA driver that answers: {error}") from error
    if not cards:
        raise BudgetError("the NVIDIA driver of this machine shows no card")
    return cards


def found_library() -> Path:
    found = next((path for path in LIBRARIES if path.exists()), None)
    if found is None:
        raise BudgetError(
            f"libgpuslice.so is in none of {', '.join(map(str, LIBRARIES))}: say --library PATH"
        )
    return found


def own_member(program: Sequence[str]) -> Member:
    return Member(os.getpid(), start_time_of(os.getpid()) or 0, getpass.getuser(), tuple(program))


def program_environment(limit: CardLimit, preload: Path) -> dict[str, str]:
    """The library first, and no other card in sight."""
    others = os.environ.get("LD_PRELOAD", "")
    return os.environ | {
        "LD_PRELOAD": os.pathsep.join(filter(None, (str(preload), others))),
        "CUDA_VISIBLE_DEVICES": limit.uuid,
    }


@click.command("ps", short_help="Show what runs with a part of a card on this machine.")
@base_flag
@output_flag
def ps(base: Path, output: str) -> None:
    """Show the budgets of this machine, what is used of them, and by whom."""
    budgets = Budgets(base).list()
    if output != "table":
        print_document([document(budget) for budget in budgets], output)
    elif not budgets:
        click.echo("Nothing runs here with `gpuslice run`.")
    else:
        click.echo(aligned(table(budgets)), nl=False)


def document(budget: Budget) -> dict[str, object]:
    usage = budget.usage
    return {
        "name": budget.name,
        "gpu": budget.limit.uuid,
        "limitBytes": budget.limit.memory_bytes,
        "sharePercent": budget.limit.share_percent,
        "usedBytes": usage.used_bytes if usage else None,
        "peakBytes": usage.peak_bytes if usage else None,
        "refused": usage.refused if usage else None,
        "throttledSeconds": usage.throttled_ns / 1e9 if usage else None,
        "programs": [
            {"pid": member.pid, "user": member.user, "command": list(member.command)}
            for member in budget.members
        ],
    }


def table(budgets: Sequence[Budget]) -> str:
    lines = [row("NAME", "GPU", "USED", "LIMIT", "SHARE", "REFUSED", "WAITED", "USER", "PID", "COMMAND")]
    for budget in budgets:
        cells = (*amounts(budget),)
        for member in budget.members or (None,):
            who = (member.user, member.pid, " ".join(member.command)) if member else ("-", "-", "(ended)")
            lines.append(row(*cells, *who))
    return "".join(lines)


def amounts(budget: Budget) -> tuple[str, ...]:
    limit, usage = budget.limit, budget.usage
    return (
        budget.name,
        limit.uuid[:12],
        f"{usage.used_bytes // MIB}MiB" if usage else "-",
        f"{(limit.memory_bytes or 0) // MIB}MiB",
        f"{limit.share_percent}%" if limit.share_percent else "-",
        str(usage.refused) if usage else "-",
        f"{usage.throttled_ns / 1e9:.1f}s" if usage else "-",
    )
