"""Tests of an installed wheel's commands, also in a folder whose modules have our names."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from release.wheels import ROOT
from tests.release.bare import INSTALL_S, RUN_S, Bare

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
TAKEN = ("router", "simulator", "engine", "policies", "numpy")
SAMPLE = ROOT / "simulator" / "data" / "conversation_sample.jsonl.gz"
HELPS = (
    ("warmroute",),
    ("warmroute", "serve"),
    ("warmroute", "workers"),
    ("warmroute", "advise"),
    ("warmroute", "top"),
    ("warmroute-engine",),
    ("warmroute-sim",),
    ("warmroute-sim", "demo"),
)

pytestmark = pytest.mark.timeout(INSTALL_S + 4 * RUN_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with modules that end the program that imports them."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the folder')\n")
    return tmp_path


def test_programs_and_commands_print_their_help(bare: Bare, folder: Path) -> None:
    for command in HELPS:
        assert "usage: " + command[0] in bare.run(*command, "--help", folder=folder)


def test_a_replay_writes_an_html_page_without_matplotlib(bare: Bare, folder: Path) -> None:
    asked = ("--requests", "40", "--workers", "2", "--html", "page.html")
    bare.run("warmroute-sim", "replay", str(SAMPLE), *asked, folder=folder)
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_a_stack_starts_and_prints_a_working_request(bare: Bare, folder: Path) -> None:
    command = ("warmroute-sim", "stack", "--workers", "1", "--port", "0", "--admin-port", "0")
    with bare.running(
        *command, folder=folder, until=r"(curl -i http://127\S+)[\s\S]*Ctrl-C ends all"
    ):
        pass


def test_the_error_for_a_missing_library_has_the_line_that_installs_it(
    bare: Bare, folder: Path
) -> None:
    """The error for a missing library shows a line that installs it; the line has the extra's
    requirements, because pip finds no package of ours by its name.
    """
    asked = {
        "grpc": ("serve", "--grpc-port", "1"),
        "otel": ("serve", "--tracing-endpoint", "http://127.0.0.1:4318"),
    }
    for extra, arguments in asked.items():
        done = bare.ended("warmroute", *arguments, folder=folder)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        wanted = " ".join(f"'{one}'" for one in EXTRAS[extra])
        assert f"pip install {wanted} (or '.[{extra}]' in the checkout)" in line
    done = bare.ended("warmroute-engine", "serve", "none", folder=folder)
    wanted = " ".join(f"'{one}'" for one in EXTRAS["engine"])
    assert f"pip install {wanted} (or '.[engine]' in the checkout)" in done.stderr
    assert done.returncode != 0
