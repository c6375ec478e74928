"""An environment like that of a user who installs the wheel: no checkout, no compiler."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

from release import wheels

INSTALL_S = 600  # for what takes half a minute on a quiet machine
RUN_S = 240
STOPPED = (0, 130)  # servers, and commands that were stopped before their end


@dataclass(frozen=True)
class Bare:
    """An environment with only the wheel, and an empty folder to work in. Lifetime: as long as its
    folder.
    """

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "environment" / "bin"

    @property
    def folder(self) -> Path:
        """The folder in which commands run; it is empty at first."""
        return self.root / "folder"

    @property
    def environ(self) -> dict[str, str]:
        """A user's environment variables: the environment's programs, then the system's, and
        nothing of this checkout.
        """
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.root), "LANG": "C.UTF-8"}

    def ended(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return it with its output."""
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=folder or self.folder,
            env=self.environ,
            timeout=RUN_S,
            text=True,
            capture_output=True,
        )

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Return the output of a command. Fails the test and shows the output if the
        command fails.
        """
        done = self.ended(*command, folder=folder)
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{' '.join(command)}: {said[-4000:]}"
        return said

    @contextmanager
    def running(
        self, *command: str, folder: Path | None = None, until: str = r"^ready (http\S+)"
    ) -> Iterator[str]:
        """Start a program, wait for its first line that matches `until`, and yield the match's
        group.

        The program gets SIGTERM at the end of the block.
        """
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [self.bin / command[0], *command[1:]],
                cwd=folder or self.folder,
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                yield said_by(process, log, until)[1]
            finally:
                process.terminate()
                assert process.wait(RUN_S) in STOPPED


def said_by(process: subprocess.Popen[bytes], log: IO[str], wanted: str) -> re.Match[str]:
    """Return the first match of a line in a program's log. Fails if the program ends or takes too
    long.
    """
    deadline_s = time.monotonic() + RUN_S
    while True:
        log.seek(0)
        text = log.read()
        if found := re.search(wanted, text, re.MULTILINE):
            return found
        assert process.poll() is None, text
        assert time.monotonic() < deadline_s, text
        time.sleep(0.1)


def until_router_is_ready(url: str) -> None:
    """Wait until a router's `/ready` says that it would place requests.

    Its line `ready URL` only says that it listens; it still probes its workers then.
    """
    deadline_s = time.monotonic() + RUN_S
    said = ""
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=RUN_S):
                return
        except urllib.error.HTTPError as error:
            said = error.read().decode()
        time.sleep(0.1)
    pytest.fail(f"{url} would place no request: {said}")


def built_wheel(to: Path) -> Path:
    """Build the wheel of this checkout with pip, using the objects that `make setup` compiled;
    return it.

    Parallel tests wait for each other.
    """
    if find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed: `make setup` installs it")
    (wheels.ROOT / "build").mkdir(exist_ok=True)
    with (wheels.ROOT / "build" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
        command += ["--config-settings", f"wheel.py-api=cp3{wheels.STABLE_MINOR}"]  # if so new
        done = subprocess.run(
            [*command, "--no-deps", "--wheel-dir", str(to), str(wheels.ROOT)],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            timeout=INSTALL_S,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    assert done.returncode == 0, done.stdout[-4000:]
    (made,) = to.glob("*.whl")
    return made


def installed(
    wheel: Path, root: Path, extras: str = "", python: Path = Path(sys.executable)
) -> Bare:
    """Install the wheel into a new environment below `root`, with `extras` such as `[sim]`.

    Nothing can be compiled during that, because only the environment's own programs are on the
    path.
    """
    bare = Bare(root)
    bare.folder.mkdir(parents=True)
    subprocess.run([python, "-m", "venv", bare.bin.parent], check=True, timeout=INSTALL_S)
    limits = ["-c", str(wheels.ROOT / "constraints.txt")]
    pip = [str(bare.bin / "python"), "-m", "pip", "install", "--quiet", "--no-compile", *limits]
    done = subprocess.run(
        [*pip, f"{wheel}{extras}"],
        cwd=bare.folder,
        env={**os.environ, "PATH": str(bare.bin)},
        timeout=INSTALL_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return bare
