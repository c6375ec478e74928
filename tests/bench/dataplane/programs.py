"""Runs programs on cores of their own, and the load generator against a port."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.dataplane import cpu
from tests.bench.dataplane.build import BUILT, built

READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The CPU cores of the bench: one for the router, one for engines and load generator. On a
    machine with one core, all share it.
    """

    router: int
    others: int

    @classmethod
    def of_this_machine(cls) -> Cores:
        """Return the machine's last usable core for the router and its first one for all other
        programs.
        """
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[-1], allowed[0])


@dataclass(frozen=True, slots=True)
class Engines:
    """The dummy engines, which all run in one process. Lifetime: a measurement."""

    pid: int
    ports: tuple[int, ...]
    pair: bool = False  # the first one prefills, the second one decodes

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def workers(self) -> list[str]:
        """The engines as values for the router's flag `--worker`."""
        if not self.pair:
            return self.urls
        roles = zip(self.urls, ("prefill", "decode"), strict=True)
        return [f"{url},kind=vllm,role={role},group=g" for url, role in roles]

    def counts(self) -> list[dict[str, int]]:
        """Return for each engine its number of `requests`, how many are `running`, the `most` that
        ran at once, and how many the router had `given_up`.
        """
        counts: list[dict[str, int]] = json.loads(get(f"{self.urls[0]}/bench"))
        return counts


@dataclass(frozen=True, slots=True)
class Load:
    """The result of a load run (`load.cpp`), and the router's CPU time and memory meanwhile."""

    found: Mapping[str, Any]
    cpu_s: float  # of the routers; 0 without a router
    rss_kb: int  # of the routers, at the end
    foreign: float  # CPU seconds of all other programs per second; 1 is a whole core
    loop_s: float  # as `cpu_s`, of the routers' first threads alone

    @property
    def requests(self) -> int:
        return int(self.found["requests"])

    @property
    def failed(self) -> int:
        return int(self.found["failed"])

    @property
    def events(self) -> int:
        return int(self.found["events"])


@contextmanager
def program(
    command: Sequence[str], core: int | None, log: str, environment: Mapping[str, str] = os.environ
) -> Iterator[subprocess.Popen[str]]:
    """Run a program on a core during the block; its standard error goes to
    build/bench/`log`.log.
    """
    BUILT.mkdir(parents=True, exist_ok=True)
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    with (BUILT / f"{log}.log").open("w") as errors:
        process = subprocess.Popen(
            [*pinned, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for pid in reversed(cpu.tree(process.pid)):
                _kill(pid)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def ready_line(process: subprocess.Popen[str], log: str) -> str:
    """Return the output line that begins with `ready`. Raises RuntimeError with the log if none
    comes.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            return line.strip()
    tail = (BUILT / f"{log}.log").read_text()[-2000:]
    raise RuntimeError(f"{log} ended before it was ready:\n{tail}")


@contextmanager
def engines(core: int, **flags: object) -> Iterator[Engines]:
    """Run dummy engines during the block; `flags` are those of `dummy.cpp` with underscores."""
    with program([str(built("dummy")), *_as_flags(flags)], core, "engines") as process:
        ports = tuple(map(int, ready_line(process, "engines").split()[1:]))
        yield Engines(process.pid, ports)


def run_load(
    port: int | Sequence[int],
    core: int,
    router_pid: int | Sequence[int] | None,
    others: int,
    **flags: object,
) -> Load:
    """Run the load generator against one port or several. `flags` are those of `load.cpp`; `others`
    is the process id of the engines.
    """
    routers = _each(router_pid)
    command = [str(built("load")), "--port", ",".join(map(str, _each(port))), *_as_flags(flags)]
    with program(command, core, "load") as process:
        assert process.stdout is not None
        marks = []
        for wanted in ("start", "stop"):
            if process.stdout.readline().strip() != wanted:
                tail = (BUILT / "load.log").read_text()[-2000:]
                raise RuntimeError(f"the load failed: {tail}")
            took_s = sum(map(cpu.cpu_s, routers))
            all_s = took_s + sum(map(cpu.cpu_s, (others, process.pid)))
            loops_s = sum(map(cpu.loop_s, routers))
            marks.append((time.monotonic(), cpu.busy_s(), all_s, took_s, loops_s))
        rss_kb = sum(map(cpu.rss_kb, routers))
        found = json.loads(process.stdout.readline())
    passed, busy, ours, router, loops = (b - a for a, b in zip(*marks, strict=True))
    return Load(found, router, rss_kb, max(busy - ours, 0.0) / passed, loops)


def _each(one_or_more: int | Sequence[int] | None) -> Sequence[int]:
    if one_or_more is None:
        return ()
    return (one_or_more,) if isinstance(one_or_more, int) else one_or_more


def _as_flags(flags: Mapping[str, object]) -> list[str]:
    flat: list[str] = []
    for name, value in flags.items():
        text = str(int(value)) if isinstance(value, bool) else str(value)
        flat += [f"--{name.replace('_', '-')}", text]
    return flat


def get(url: str) -> str:
    """Return the text of the page at `url`."""
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        return str(answer.read().decode())


def until_answers(port: int, process: subprocess.Popen[str], log: str) -> None:
    """Wait until the router answers a completion with 200. Raises RuntimeError with the log if the
    program ends or takes too long.
    """
    body = json.dumps({"model": "bench", "prompt": "ready?", "max_tokens": 1}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    headers = {"Content-Type": "application/json"}
    deadline_s, last = time.monotonic() + READY_S, ""
    while time.monotonic() < deadline_s and process.poll() is None:
        asked = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=5.0):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            last = str(error)
        time.sleep(0.1)  # between two looks at a program that is not ours
    tail = Path(BUILT / f"{log}.log").read_text()[-2000:]
    raise RuntimeError(f"{log} does not answer: {last}\n{tail}")
