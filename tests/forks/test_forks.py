"""Tests that forked programs behave as programs that are started, and that none of them is left
behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator import CHECKOUT
from simulator.live import processes
from simulator.live.processes import launch, log_tail
from tests.forks.process import ForkedProcess
from tests.forks.server import Order
from tests.forks.starting import Forks, ForkServer
from tests.frozen import runs
from tests.live.stack import running, until

WORLD = """
import asyncio, gc, json, os, random, resource, signal, sys, threading

print(json.dumps({
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "argv": sys.argv,
    "original": sys.orig_argv[1:],
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "files": sorted(os.listdir("/proc/self/fd"))[:4],  # the fourth is that of this look
    "inherited": [fd for fd in range(4, 256) if os.path.exists(f"/proc/self/fd/{fd}")],
    "input": os.readlink("/proc/self/fd/0"),
    "outputs": os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2"),
    "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
    "flags": str(sys.flags),
    "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.stderr.errors],
    "signals": {int(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": [one.name for one in threading.enumerate()],
    "collecting": gc.isenabled(),
    "stack": resource.getrlimit(resource.RLIMIT_STACK),
    "hooks": [str(sys.excepthook), str(sys.gettrace())],
}))
print("drawn", random.random())
"""
ENDS = """
import atexit, os, signal, sys
atexit.register(print, "bye")
how = sys.argv[1]
if how == "error":
    raise RuntimeError("broke")
if how == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(int(how) if how.isdigit() else how)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid)
time.sleep(600)
"""
STAYS = "import time\ntime.sleep(600)\n"
TESTS = """
import asyncio, sys, time
from pathlib import Path
from simulator.live import processes
from tests.forks.server import Order
from tests.forks.starting import ForkServer

async def main(folder):
    server = ForkServer(processes.environment())
    with (folder / "left.log").open("wb") as sink:
        order = Order("fork_parent", [], processes.environment(), str(folder))
        one = await server.start(order, sink)
    print(one.pid, server.pid, flush=True)
    time.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, text in (("world", WORLD), ("ends", ENDS), ("parent", PARENT), ("stays", STAYS)):
        (folder / f"fork_{name}.py").write_text(text)
    return folder


def finding(folder: Path) -> dict[str, str]:
    """Return an environment in which programs find the modules of a folder; -P hides those of the
    current folder.
    """
    return {**processes.environment(), "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{folder}"}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ForkServer]:
    server = ForkServer(finding(folder))
    yield server
    server.close()


async def start(server: ForkServer, folder: Path, module: str, *arguments: str) -> ForkedProcess:
    """Start a module's program in the folder, which also has its log."""
    with (folder / f"{module}.log").open("wb") as sink:
        order = Order(module, list(arguments), finding(folder), str(folder))
        return await server.start(order, sink)


async def until_gone(*pids: int) -> None:
    async def gone() -> bool:
        return not any(map(runs, pids))

    await until(gone, f"{pids} to end")


async def child_of(log: Path) -> int:
    """Return the id of the process that `fork_parent` says it has started."""

    async def logged() -> bool:
        return bool(lines(log))

    await until(logged, "its child")
    return int(lines(log)[0].split()[1])


def lines(log: Path) -> list[str]:
    text = log.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_fork_has_the_same_environment_as_a_started_program(
    server: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(folder)
    forked = await start(server, folder, "fork_world", "one", "-m", "ü")
    with (folder / "real.log").open("wb") as sink:
        real = await launch("fork_world", ["one", "-m", "ü"], sink)
    seen = []
    for process, name in (forked, "fork_world"), (real, "real"):
        log = folder / f"{name}.log"
        assert await process.wait() == 0, log_tail(log)
        seen.append(json.loads(lines(log)[0]))
    assert seen[0] == seen[1]
    assert seen[0]["environment"]["WARMROUTE_PORT"] == "1"


async def test_forks_draw_different_random_numbers(server: ForkServer, folder: Path) -> None:
    drawn = []
    for _ in range(2):
        await (await start(server, folder, "fork_world")).wait()
        drawn.append(lines(folder / "fork_world.log")[1])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("0", 0, ["bye"]),
        ("3", 3, ["bye"]),
        ("no port", 1, ["no port", "bye"]),
        ("error", 1, ["RuntimeError: broke", "bye"]),
        ("signal", -signal.SIGTERM, []),
    ],
)
async def test_a_fork_ends_as_a_started_program(
    server: ForkServer, folder: Path, how: str, code: int, said: list[str]
) -> None:
    process = await start(server, folder, "fork_ends", how)
    assert await process.wait() == code
    assert lines(folder / "fork_ends.log")[-2:] == said
    with pytest.raises(ProcessLookupError):
        process.terminate()


async def test_the_end_of_a_fork_is_known_with_and_without_waiting(
    server: ForkServer, folder: Path
) -> None:
    process = await start(server, folder, "fork_stays")
    waiting = [asyncio.create_task(process.wait()) for _ in range(3)]
    await asyncio.sleep(0)  # one turn of the loop, so that they wait
    waiting[0].cancel()
    assert process.returncode is None
    process.kill()
    assert await asyncio.gather(*waiting[1:]) == [-signal.SIGKILL] * 2
    assert waiting[0].cancelled()
    unseen = await start(server, folder, "fork_ends", "4")

    async def known() -> bool:
        return unseen.returncode == 4

    await until(known, "the status of who nobody waits for")
    assert await asyncio.to_thread(asyncio.run, unseen.wait()) == 4


async def test_an_unreferenced_fork_is_killed_with_its_children(
    server: ForkServer, folder: Path
) -> None:
    process = await start(server, folder, "fork_parent")
    child, pid = await child_of(folder / "fork_parent.log"), process.pid
    assert runs(child)
    del process
    await until_gone(pid, child)


async def test_killing_a_fork_server_kills_its_programs(folder: Path) -> None:
    server = ForkServer(finding(folder))
    process = await start(server, folder, "fork_stays")
    os.kill(server.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await until_gone(process.pid)
    with pytest.raises((ChildProcessError, BrokenPipeError)):
        await start(server, folder, "fork_ends", "0")


async def test_killed_tests_leave_no_process_behind(folder: Path) -> None:
    tests = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TESTS, str(folder)),
        cwd=CHECKOUT,
        env=finding(folder),
        stdout=asyncio.subprocess.PIPE,
    )
    assert tests.stdout is not None
    pids = [int(word) for word in (await tests.stdout.readline()).split()]
    pids.append(await child_of(folder / "left.log"))
    assert all(map(runs, pids))
    tests.kill()
    await tests.wait()
    await until_gone(*pids)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


async def test_only_programs_that_can_be_forked_are_forked(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_fork(module: str, *arguments: str) -> bool:
        with (tmp_path / "log").open("wb") as sink:
            process = await forks.launch(module, arguments, sink)
        process.kill()
        await process.wait()
        return isinstance(process, ForkedProcess)

    assert await is_fork("engine", "--timed", "none")
    assert await is_fork("router", "serve")
    assert not await is_fork("engine", "serve", str(tmp_path))
    assert not await is_fork("simulator")
    monkeypatch.setenv("WARMROUTE_PORT", "1")
    assert await is_fork("router", "serve")
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert not await is_fork("router", "serve")


async def test_forked_routers_have_different_hash_seeds(forks: Forks, tmp_path: Path) -> None:
    """Routers have different hash seeds. With equal ones they could agree by their hashes, which
    routers on two machines never do.
    """
    parents = set()
    for _ in range(2):
        with (tmp_path / "log").open("wb") as sink:
            router = await forks.launch("router", ["serve", "--port", "0"], sink)
        parents.add(parent_of(router.pid))
        router.kill()
    assert len(parents - {os.getpid()}) == 2


async def test_a_fork_server_that_ended_is_replaced(forks: Forks, tmp_path: Path) -> None:
    for _ in range(3):  # one more than there are servers
        with (tmp_path / "log").open("wb") as sink:
            router = await forks.launch("router", ["serve", "--port", "0"], sink)
        os.kill(parent_of(router.pid), signal.SIGKILL)
        assert await router.wait() == -signal.SIGKILL


async def test_programs_started_by_tests_are_forks(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        for program in (stack.router, *stack.workers):
            assert isinstance(program.process, ForkedProcess)
