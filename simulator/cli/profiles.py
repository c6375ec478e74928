"""The command `profiles`: lists step-time profiles and compares them with tables of measured
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from engine.profiles import PROFILES, Profile, gpus_of, profile, write_profiles
from simulator.cli.flags import Place, Whole, Written, command
from simulator.cli.usage import UsageError, check_files, check_profile, write_json
from simulator.report.board import Board
from simulator.report.plots import errors_plot
from simulator.step_times.catalogue import BY_NAME, HELD_TOLERANCE, fitted
from simulator.step_times.compare import (
    TOLERANCE,
    Comparison,
    compare,
    points,
    read_rows,
    write_rows,
)
from simulator.step_times.tables import KINDS, TableError, TableRow, Tables

SHOWN_OUTSIDE = 3  # rows of each profile


class Profiles(Struct, kw_only=True):
    """The options of `profiles`."""

    names: Annotated[tuple[str, ...], Place("*"), "NAME", "profiles to list; default: all"] = ()
    against_aic: Annotated[bool, "compare with AIConfigurator's kernel tables; needs pip install "
        "'warmroute[aic]' (82 MB; nothing is downloaded at run time)"] = False  # fmt: skip
    against: Annotated[Path | None, "FILE.csv", "compare with a table of your own: "
        "profile,prefill_tokens,cached_tokens,decodes,context_tokens,seconds"] = None  # fmt: skip
    all_rows: Annotated[
        bool, "list every row beyond the limit of error, not only the worst three rows"
    ] = False
    svg: Annotated[Written, "file that gets a picture of all errors"] = None
    json: Annotated[Written, "file that gets all figures"] = None
    rows: Annotated[Written, "file that gets the tables' rows as CSV, for --against"] = None
    refit: Annotated[
        Written, "file that gets newly fitted built-in profiles, for engine/profiles.json"
    ] = None
    seed: Annotated[Whole, "seed that draws the held-out third of the rows; default 0"] = 0


@command(
    "[NAME]... [--against-aic | --against FILE.csv] [option]...",
    "examples:\n  warmroute-sim profiles\n"
    "  warmroute-sim profiles qwen3-32b-h100-tp2 --against-aic\n"
    "  warmroute-sim profiles --against-aic --svg errors.svg --json errors.json\n",
)
def profiles(options: Profiles, console: Console) -> bool:
    """Lists the profiles of step times with their sources. If a table of measured kernels is given,
    prints how far each profile is from the table by kind of step, without CPU time, which tables
    lack. Ends with 1 if a row is off by more than 10 % and the profile gives no reason.
    """
    if options.against_aic and options.against is not None:
        raise UsageError("--against-aic and --against exclude each other: give one of them")
    compared = options.against_aic or options.against is not None
    if not compared and any((options.svg, options.rows, options.json)):
        raise UsageError("--svg, --json and --rows are of a comparison: add --against-aic")
    if options.refit is not None and not options.against_aic:
        raise UsageError("--refit needs the tables: add --against-aic")
    check_files(
        [options.against],
        svg=options.svg, json=options.json, rows=options.rows, refit=options.refit,
    )  # fmt: skip
    for name in options.names:
        check_profile(name)
    if options.refit is not None:
        return _refit(options, console)
    if not compared:
        console.print(_list(options.names or PROFILES))
        return True
    found = list(_comparisons(options, console))
    for one in found:
        _show(one, options.all_rows, console)
    console.print(_summary(found))
    if options.svg is not None:
        options.svg.write_text(errors_plot(points(found), TOLERANCE))
    if options.rows is not None:
        write_rows({one.name: one.rows for one in found}, options.rows)
    write_json(options.json, found)
    unexplained = [one.name for one in found if one.outside and not _reason_of(one.name)]
    for name in unexplained:
        console.print(f"[red]{name}[/]: rows are off by more than {TOLERANCE:.0%}")
    return not unexplained


def _reason_of(name: str) -> str:
    """Return the catalogue's reason for the rows in which the profile is off, or "" if it
    has none.
    """
    return BY_NAME[name].why if name in BY_NAME else ""


def _comparisons(options: Profiles, console: Console) -> Iterator[Comparison]:
    if options.against is not None:
        tables = read_rows(options.against)
        missing = [name for name in options.names if name not in tables]
        if missing:
            raise TableError(f"{options.against}: no row for {', '.join(missing)}")
        for name in options.names or tables:
            check_profile(name)
            yield compare(profile(name), str(options.against), tables[name])
        return
    for name, (source, rows) in _with_progress(options.names or tuple(BY_NAME), console):
        yield compare(profile(name), source, rows)


def _with_progress(
    names: Sequence[str], console: Console
) -> Iterator[tuple[str, tuple[str, tuple[TableRow, ...]]]]:
    """Yield each profile's table, and show progress, because a table takes a second."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise TableError(
            f"no table is known for {', '.join(unknown)}; with one: {', '.join(sorted(BY_NAME))}"
        )
    with Board(console) as board:
        for number, name in enumerate(names):
            board.count("tables", number, len(names))
            tables = Tables(BY_NAME[name].instance)
            yield name, (tables.source(), tuple(tables.rows()))


def _refit(options: Profiles, console: Console) -> bool:
    """Fit the catalogue's profiles to their tables and write them."""
    assert options.refit is not None
    table = Table("profile", "held rows", "beyond", "median", "worst", title="rows held out")
    made = []
    with Board(console) as board:
        names = options.names or tuple(BY_NAME)
        for number, name in enumerate(names):
            board.count("fits", number, len(names))
            made_profile, found = fitted(BY_NAME[name], options.seed)
            off = sorted(
                abs(error)
                for place, error in enumerate(found.errors.tolist())
                if place in found.held
            )
            beyond = sum(error > HELD_TOLERANCE for error in off)
            table.add_row(
                name, str(len(off)), str(beyond), f"{off[len(off) // 2]:.1%}", f"{off[-1]:.1%}"
            )
            made.append(made_profile)
    write_profiles(made, options.refit)
    console.print(table)
    console.print(f"{options.refit}: {len(made)} profiles", highlight=False, soft_wrap=True)
    return True


def _list(names: Iterable[str]) -> Table:
    table = Table(
        "profile", "GPUs", "prefill 8,192", "64 decodes at 8,192", "KV tokens", "source",
        title="profiles of step times, CPU time included",
    )  # fmt: skip
    for name in names:
        one: Profile = profile(name)
        chunk_ms = 1e3 * one.step_time.prefill_s(8192)
        step_ms = 1e3 * one.step_time.decode_step_s(64, 64 * 8192)
        table.add_row(
            name,
            str(gpus_of(name)),
            f"{chunk_ms:,.0f} ms",
            f"{step_ms:,.1f} ms",
            f"{one.kv_capacity_tokens:,}",
            one.provenance,
        )
    return table


def _show(one: Comparison, all_rows: bool, console: Console) -> None:
    """Print the rows that are off, with the reason if one is known."""
    if not one.outside:
        return
    reason = _reason_of(one.name) or "no reason is known"
    console.print(
        f"{one.name}: {len(one.outside)} of {len(one.rows)} rows are off by more than "
        f"{TOLERANCE:.0%} ({reason})",
        highlight=False,
    )
    for row, off in one.outside[: None if all_rows else SHOWN_OUTSIDE]:
        console.print(f"  {row.what}: {row.seconds * 1e3:,.1f} ms, {off:+.1%}", highlight=False)


def _summary(found: Sequence[Comparison]) -> Table:
    table = Table(
        "profile", "table", *(f"{kind}: median, worst" for kind in KINDS), "prefill 8,192",
        title="kernels by profile / kernels by table - 1",
    )  # fmt: skip
    for one in found:
        by_kind = {error.kind: error for error in one.kinds}
        cells = (
            f"{by_kind[kind].median:.1%}, {by_kind[kind].worst:.1%}" if kind in by_kind else "-"
            for kind in KINDS
        )
        table.add_row(one.name, one.source, *cells, f"{1e3 * one.chunk_s:,.0f} ms")
    return table
