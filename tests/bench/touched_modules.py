"""How many modules of `router/` and `policies/` execute code for one streamed chat.

    python -m tests.bench.touched_modules [--list] [--root CHECKOUT]

A timed worker and a router with the default policy run as programs, the router under
`sys.setprofile`. Each of several chats is a window from its connection to its last byte; a module
counts where one of its functions was called in all windows, so that what the router does from time
to time is left out. Imports and class bodies do not count. `--root`: another checkout, of another
version; use the interpreter of its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHATS = 5
FOLDERS = ("router", "policies")
WAIT_S = 60.0
MODEL = "tiny"
PROFILE = "llama-3.1-8b-h100"
# What is done from time to time is done rarely.
RARELY = {
    "intervals-tick-s": "5",
    "intervals-health-s": "600",
    "intervals-load-report-s": "60",
    "intervals-kv-state-s": "600",
}


def traced(out: Path, argv: list[str]) -> int:
    """In the router: run it, and write down what a window saw at its end."""
    seen: set[str] = set()
    watching = False

    def call(frame: Any, event: str, argument: object) -> None:
        if watching and event == "call":
            code = frame.f_code
            if code.co_name != "<module>":
                seen.add(code.co_filename)

    def toggle(number: int, frame: object) -> None:
        nonlocal watching
        watching = not watching
        part = out.with_suffix(".part")
        part.write_text(json.dumps(sorted(seen)))
        seen.clear()
        part.replace(out)

    main = import_module("router.cli.main").main
    if not callable(main):  # the package's module of that name
        main = main.main
    signal.signal(signal.SIGUSR1, toggle)
    threading.setprofile(call)
    sys.setprofile(call)
    return int(main(argv))


class Started:
    """A program that says `ready URL`. Lifetime: measurement."""

    def __init__(self, root: Path, log: Path, *argv: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(root)}
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=root,
            env=environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.ready = self._ready()

    def _ready(self) -> dict[str, str]:
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s and self.process.poll() is None:
            for line in self._log.read_text().splitlines():
                if line.startswith("ready "):
                    url, *facts = line.split()[1:]
                    return {"url": url} | dict(fact.split("=", 1) for fact in facts)
            time.sleep(0.05)
        raise RuntimeError(f"it is not ready: {self._log.read_text()}")


def chat(url: str, number: int) -> None:
    """One streamed chat on a connection of its own."""
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are terse. " * 40},
            {"role": "user", "content": f"Question {number}: " + "what then? " * 40},
        ],
        "max_tokens": 20,
        "stream": True,
    }
    http = HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    headers = {"Content-Type": "application/json"}
    http.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    reply = http.getresponse()
    said = reply.read()
    assert reply.status == 200, said
    assert b"[DONE]" in said, said
    http.close()


def toggled(router: Started, out: Path) -> set[str]:
    """Begin or end a window; what it saw."""
    os.kill(router.process.pid, signal.SIGUSR1)
    until_s = time.monotonic() + WAIT_S
    while not out.exists():
        assert time.monotonic() < until_s, "the router does not take signals"
        time.sleep(0.01)
    seen = set(json.loads(out.read_text()))
    out.unlink()
    return seen


def windows(root: Path, folder: Path) -> list[set[str]]:
    """The files that executed code, of each chat."""
    out, programs = folder / "seen", []
    found = []
    try:
        engine = ["-m", "engine", "--timed", PROFILE, "--model-name", MODEL, "--speed", "20"]
        engine += [
            part for name in ("port", "events-port", "replay-port") for part in (f"--{name}", "0")
        ]
        worker = Started(root, folder / "worker.log", *engine)
        programs.append(worker)
        flags = [f"--{name}={value}" for name, value in RARELY.items()]
        flags += ["--port", "0", "--admin-port", "0", "--worker", worker.ready["url"]]
        router = Started(root, folder / "router.log", __file__, "--in", str(out), "serve", *flags)
        programs.append(router)
        admin = router.ready["admin"]
        until_s = time.monotonic() + WAIT_S
        while b'"state":"ready"' not in urlopen(f"{admin}/workers").read().replace(b" ", b""):
            assert time.monotonic() < until_s, "no worker is ready"
            time.sleep(0.05)
        for number in range(CHATS + 1):
            toggled(router, out)
            chat(router.ready["url"], number)
            time.sleep(0.2)  # what follows a reply's last byte, such as the worker's events
            found.append(toggled(router, out))
    finally:
        for program in programs:
            program.process.terminate()
        for program in programs:
            program.process.wait()
    return found[1:]  # the first one makes what the others find


def modules(root: Path) -> list[str]:
    """Paths of what executed code in every window, without the ways of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        seen = set.intersection(*windows(root, Path(folder)))
    inside = [Path(file).relative_to(root) for file in seen if Path(file).is_relative_to(root)]
    return sorted(str(path) for path in inside if path.parts[0] in FOLDERS)


def main() -> None:
    """Count and print."""
    if sys.argv[1:2] == ["--in"]:
        sys.path[0] = str(Path.cwd())
        sys.exit(traced(Path(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the modules")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    options = parser.parse_args()
    found = modules(options.root.resolve())
    if options.list:
        print(*found, sep="\n")
    events = sum("/events/" in path for path in found)
    print(f"{len(found)} modules, of which {events} read the worker's KV events")


if __name__ == "__main__":
    main()
