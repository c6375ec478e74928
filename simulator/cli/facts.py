"""The command `check-facts`: plays a router's recording to this version's decision core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Struct
from rich.console import Console

from policies.load import PolicyError
from router.config.paths import unreadable
from router.record.facts import Player
from simulator.cli.flags import Place, command
from simulator.cli.usage import UsageError

DIFFERENCES_SHOWN = 20


class CheckFacts(Struct):
    """The options of `check-facts`."""

    file: Annotated[Path, Place(), "recording that a router with record_facts has written"]


@command(
    "FILE",
    "example:\n  warmroute serve --record-facts facts.bin ...\n"
    "  warmroute-sim check-facts facts.bin\n",
)
def check_facts(options: CheckFacts, console: Console) -> bool:
    """Plays the recording of a router with `record_facts` to a fresh decision core, and prints
    every action that differs. Ends with 0 if all actions are the same.
    """
    try:
        player = Player(options.file)
    except OSError as error:
        raise UsageError(unreadable(options.file, error)) from error
    except PolicyError as error:
        raise UsageError(f"{options.file}: {error}") from error
    different = 0
    for difference in player.differences():
        different += 1
        if different <= DIFFERENCES_SHOWN:
            console.print(f"[red]{different}[/] {difference}", highlight=False)
    console.print(
        f"{player.facts:,} facts played, {player.actions:,} answers compared, {different:,} differ "
        f"(the recording ends: {player.ended})",
        highlight=False,
    )
    return not different
