"""A host like that of a new user, with its own network and a folder, on which a page's commands
run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.release.bare import said_by

WAIT_S = 240  # for what takes seconds on a quiet machine
NEEDS = ("unshare", "nsenter", "ip", "mount", "curl")
# Addresses and names that pages use for hosts; all of them are this host.
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.5", "10.0.0.11", "10.0.0.12", "10.0.0.16")
NAMES = {"gpu1": "10.0.0.1", "gpu2": "10.0.0.2"}
# Whole commands within sentences, and programs of blocks that are told by their indentation.
SENTENCE = re.compile(
    r"`((?:curl|warmroute keys) [^`]+)`"
    r"|^    (?:\$ )?((?:warmroute|warmroute-sim|warmroute-engine|curl|pip|make) .*)$",
    re.MULTILINE,
)
CURLRC = "fail\nsilent\nshow-error\nmax-time = 60\n"  # a status of 400 or more is a failure


@dataclass
class Host:
    """A network, mounts and a folder for the programs of a test; `host()` creates and
    removes it.
    """

    folder: Path
    anchor: int  # the process that holds its network and its mounts
    environ: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def within(self, command: str) -> list[str]:
        """Return the command that runs a shell line on the host, in its folder."""
        enter = ["nsenter", f"--target={self.anchor}", "--net", "--mount", f"--wd={self.folder}"]
        return [*enter, "bash", "-c", command]

    def run(self, command: str) -> str:
        """Return the output of a command. Fails the test and shows the output if the
        command fails.
        """
        done = subprocess.run(
            self.within(command),
            cwd=self.folder,
            env=self.environ,
            text=True,
            timeout=WAIT_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
        return done.stdout

    def start(self, command: str) -> None:
        """Start a program in the background and wait until it says `ready`."""
        log = self.folder / f"program-{len(self.running)}.log"
        with log.open("w") as sink:
            process = subprocess.Popen(
                self.within(f"exec {command}"),
                cwd=self.folder,
                env=self.environ,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self.running.append(process)
        with log.open() as said:
            said_by(process, said, r"^ready http(\S+)")

    def until(self, command: str, wanted: str) -> None:
        """Run a command repeatedly until its output has the wanted text."""
        deadline_s = time.monotonic() + WAIT_S
        while wanted not in (said := self.run(command)):
            assert time.monotonic() < deadline_s, said
            time.sleep(0.2)

    def stop(self, count: int = 1) -> None:
        """Stop the last `count` programs, the last one first; each must exit without an error."""
        for _ in range(count):
            process = self.running.pop()
            process.terminate()
            assert process.wait(WAIT_S) == 0

    def stop_all(self) -> None:
        """Stop all programs that were started on the host."""
        self.stop(len(self.running))


@contextmanager
def host(folder: Path, environ: dict[str, str]) -> Iterator[Host]:
    """Yield a host for a test with a user's environment variables. Skips if this machine cannot
    create one.
    """
    lacking = [name for name in NEEDS if shutil.which(name) is None]
    if lacking or os.getuid() != 0:
        pytest.skip(f"a network of its own takes root and {', '.join(lacking or NEEDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".curlrc").write_text(CURLRC)
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {n}\n" for n, at in NAMES.items()))
    setup = ["ip link set lo up", *(f"ip address add {at}/32 dev lo" for at in ADDRESSES)]
    setup.append(f"mount --bind {shlex.quote(str(names))} /etc/hosts")
    script = " && ".join([*setup, "echo made", "exec sleep infinity"])
    anchor = subprocess.Popen(
        ["unshare", "--net", "--mount", "bash", "-c", script], stdout=subprocess.PIPE, text=True
    )
    try:
        assert anchor.stdout is not None
        assert anchor.stdout.readline() == "made\n"
        made = Host(folder, anchor.pid, {**environ, "HOME": str(folder)})
        yield made
        made.stop_all()
    finally:
        for process in made.running:
            process.kill()
        anchor.kill()
        anchor.wait()


def commands(page: str) -> list[str]:
    """Return the commands in a page's text, in order, without comments and with continued lines
    joined.

    They are the lines of shell blocks, or those after `$ ` if a block has such lines. Also included
    are commands in `...` within sentences and in indented blocks. A block that shows something else
    says so by the kind behind its fence (`text`, `yaml`), or by a comment before it that names the
    command whose output it is.
    """
    found = []
    parts = re.split(r"^```(\w*)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    for text, kind, block in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        for inline, indented in SENTENCE.findall(text.replace("\\\n", " ")):
            found.append(_without_comment(indented) or inline.replace("\n", " "))
        if kind in ("", "sh", "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            if not shown and not text.rstrip().endswith("-->"):
                shown = lines
            found += [line for line in map(_without_comment, shown) if line]
    return [re.sub(r" {2,}", " ", command) for command in found]


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#.*$", "", line).strip()


def replaced(command: str, table: Sequence[tuple[str, str]]) -> str:
    """Return a command with the values filled in that a reader would fill in."""
    for pattern, text in table:
        command = re.sub(pattern, text, command)
    return command
