"""Tests of command-line flags that are derived from Structs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Struct

from simulator.cli.flags import Either, Group, Place, Whole, add_flags, given_flags, options_of


class Pool(Struct):
    """A section of options within a command's options."""

    workers: Annotated[int | None, "how many"] = None
    wait_ms: Annotated[float, "at most"] = 2.5
    profile: Annotated[tuple[str, ...], "P", "repeat"] = ()


class Asked(Struct, kw_only=True):
    """The options of a command that exists only in these tests."""

    trace: Annotated[str, Place(), "TRACE", "a file"]
    seed: Annotated[Whole, "of draws"] = 0
    fast: Annotated[bool, Either("pace"), "in a hurry"] = False
    slow: Annotated[bool, Either("pace"), "not so"] = False
    rule: Annotated[Literal["all", "some"], "what counts"] = "all"
    pool: Annotated[Pool, Group("workers")]
    out: Annotated[Path | None, "to write"] = None
    kept: int = 7


def parsed(*given: str) -> Asked:
    return options_of(Asked, vars(parser().parse_args(given)))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="x")
    add_flags(made, Asked)
    return made


def test_missing_flags_have_the_structs_defaults() -> None:
    assert parsed("log") == Asked(trace="log", pool=Pool())


def test_flags_are_parsed_by_the_type_of_their_field() -> None:
    flags = ["--seed=3k", "--slow", "--workers=2", "--profile=a", "--profile=b", "--out=b.json"]
    found = parsed("log", *flags)
    pool = Pool(workers=2, profile=("a", "b"))
    assert found == Asked(trace="log", seed=3000, slow=True, pool=pool, out=Path("b.json"))
    assert parsed("log", *given_flags(found)) == found


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--workers", "0"], "argument --workers: 0 is not a whole number of 1 or more"),
        (["--wait-ms", "-1"], "argument --wait-ms: -1 is not a number above 0"),
        (["--seed", "x"], "argument --seed: 'x' is not a whole number"),
        (["--rule", "none"], "argument --rule: invalid choice: 'none'"),
        (["--fast", "--slow"], "argument --slow: not allowed with argument --fast"),
        (["--kept", "1"], "unrecognized arguments: --kept 1"),
    ],
)
def test_the_error_for_a_wrong_value_names_the_flag(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("log", *flags)
    assert why in capsys.readouterr().err


def test_help_has_sections_defaults_and_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = parser().format_help()
    for line in ("--seed N ", "workers:\n", "at most; default 2.5\n", "--profile P "):
        assert line in text
    assert "what counts; default all" in text
