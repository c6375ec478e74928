"""A plain `pip install .` runs the commands, also in a folder whose modules have our names.

The packages are copied into an environment of their own, native build and all, and only their
dependencies are installed there; that a wheel holds the packages is for other tests.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from kvkernels import _native

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("router", "engine", "policies", "simulator", "kernels/kvkernels")
TAKEN = ("router", "simulator", "engine", "policies", "numpy")
SAMPLE = ROOT / "simulator" / "data" / "conversation_sample.jsonl.gz"
INSTALL_S, RUN_S = 600, 240
COMMANDS = {
    "router": ("", "serve", "workers", "advise", "top"),
    "engine": ("",),
    "simulator": ("", "demo"),
}

pytestmark = pytest.mark.timeout(INSTALL_S + 4 * RUN_S)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what a plain install has."""
    home = tmp_path_factory.mktemp("plain")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    constraints = ("-c", str(ROOT / "constraints.txt"))
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-compile",
            *constraints,
            *PROJECT["dependencies"],
        ],
        check=True,
        timeout=INSTALL_S,
    )
    (site,) = home.glob("lib/python3*/site-packages")
    for name in PACKAGES:
        keep = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, site / Path(name).name, ignore=keep)
    shutil.copy2(_native.__file__, site / "kvkernels")
    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Modules that end the program that imports one of them."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the folder')\n")
    return tmp_path


def ran(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-P", "-m", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )


def test_programs_and_commands_have_their_help(python: Path, folder: Path) -> None:
    for program, commands in COMMANDS.items():
        for command in commands:
            done = ran(python, folder, program, *filter(None, [command]), "--help")
            assert done.returncode == 0, f"{program} {command}: {done.stdout}{done.stderr}"


def test_a_replay_writes_a_page_without_pictures(python: Path, folder: Path) -> None:
    asked = ("--requests", "40", "--workers", "2", "--html", "page.html")
    done = ran(python, folder, "simulator", "replay", str(SAMPLE), *asked)
    assert done.returncode == 0, done.stderr
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_a_stack_starts(python: Path, folder: Path) -> None:
    ports = ("--port", "0", "--admin-port", "0")
    process = subprocess.Popen(
        [str(python), "-P", "-m", "simulator", "stack", "--workers", "1", *ports],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "Ctrl-C ends all" in line:
                break
        assert re.search(r"curl -i http://127", "".join(said)), "".join(said)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=RUN_S)


def test_what_is_not_installed_is_named_by_a_line_that_installs_it(
    python: Path, folder: Path
) -> None:
    """As the extra has it, for pip finds no distribution of ours by its name."""
    extras = PROJECT["optional-dependencies"]
    asked = {
        "grpc": ("serve", "--grpc-port", "1"),
        "otel": ("serve", "--tracing-endpoint", "http://127.0.0.1:4318"),
    }
    for extra, arguments in asked.items():
        done = ran(python, folder, "router", *arguments)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        wanted = " ".join(f"'{one}'" for one in extras[extra])
        assert f"pip install {wanted} (or '.[{extra}]' in the checkout)" in line
    done = ran(python, folder, "engine", "serve", "none")
    wanted = " ".join(f"'{one}'" for one in extras["engine"])
    assert f"pip install {wanted} (or '.[engine]' in the checkout)" in done.stderr
    assert done.returncode != 0
