"""The modules, objects and package entries that one streamed chat uses in the router and policies.

    python -m tests.bench.touched_modules [--list] [--entries] [--root CHECKOUT]

A timed worker and a router with the default policy run as programs, the router under
`sys.setprofile`. Each of several chats is a window from its connection to its last byte. A module
counts if one of its functions was called in all windows, which leaves out periodic work; imports
and class bodies do not count. A kind of object counts if one was created in all windows. A package
is entered where one of its functions is called from another package, or from the event loop; a
resumed coroutine is not a new entry. `--root` selects a checkout of another version; use the
interpreter of its own environment.
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
from collections import Counter
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
# Settings that make periodic work rare.
RARELY = {
    "intervals-tick-s": "5",
    "intervals-health-s": "600",
    "intervals-load-report-s": "60",
    "intervals-kv-state-s": "600",
}


def traced(out: Path, argv: list[str]) -> int:
    """Run the router in this process, and write each window's calls at its end."""
    seen = Seen(Path.cwd())
    watching = False

    def call(frame: Any, event: str, argument: object) -> None:
        if watching and event == "call":
            seen.note(frame)

    def toggle(number: int, frame: object) -> None:
        nonlocal watching
        watching = not watching
        part = out.with_suffix(".part")
        part.write_text(json.dumps(seen.taken()))
        part.replace(out)

    main = import_module("router.cli.main").main
    if not callable(main):  # the package's module of that name
        main = main.main
    signal.signal(signal.SIGUSR1, toggle)
    threading.setprofile(call)
    sys.setprofile(call)
    return int(main(argv))


class Seen:
    """The recorded calls of one window, which lasts from a chat's connection to its last byte.
    Lifetime: process.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root) + os.sep
        self._frames: dict[int, Any] = {}  # kept, so that a frame that is resumed is known
        self._files: set[str] = set()
        self._kinds: set[str] = set()
        self._entries: Counter[str] = Counter()  # "package function from package"

    def note(self, frame: Any) -> None:
        """Record that a function is called or a coroutine resumed."""
        if id(frame) in self._frames:
            return
        code = frame.f_code
        self._frames[id(frame)] = frame
        if code.co_name in ("__init__", "__new__"):
            kind = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            made = kind if isinstance(kind, type) else type(kind)
            if made.__module__.partition(".")[0] in FOLDERS:
                self._kinds.add(f"{made.__module__}.{made.__qualname__}")
        package = self._package(code.co_filename)
        if not package or code.co_name == "<module>":
            return
        self._files.add(code.co_filename)
        before = frame.f_back
        while before is not None and not self._package(before.f_code.co_filename):
            before = before.f_back
        caller = "the event loop" if before is None else self._package(before.f_code.co_filename)
        if caller != package:
            self._entries[f"{package} {code.co_qualname} from {caller}"] += 1

    def _package(self, file: str) -> str:
        """Return the package of a file of the router or the policies, or "" for any other file."""
        inside = file.removeprefix(self._root)
        if inside == file or inside.partition(os.sep)[0] not in FOLDERS:
            return ""
        return str(Path(inside).parent)

    def taken(self) -> dict[str, Any]:
        """Return the calls recorded since the last call of this method."""
        found = {
            "files": sorted(self._files),
            "kinds": sorted(self._kinds),
            "entries": dict(self._entries),
        }
        self._frames.clear()
        self._files.clear()
        self._kinds.clear()
        self._entries.clear()
        return found


class Started:
    """A running program that has printed `ready URL`. Lifetime: measurement."""

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
    """Send one streamed chat on a new connection."""
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


def toggled(router: Started, out: Path) -> dict[str, Any]:
    """Begin a window of recording or end it; return what the ended window recorded."""
    os.kill(router.process.pid, signal.SIGUSR1)
    until_s = time.monotonic() + WAIT_S
    while not out.exists():
        assert time.monotonic() < until_s, "the router does not take signals"
        time.sleep(0.01)
    seen: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return seen


def windows(root: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the recorded calls of each chat."""
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
            time.sleep(0.2)  # for work after the last byte of a reply, such as the worker's events
            found.append(toggled(router, out))
    finally:
        for program in programs:
            program.process.terminate()
        for program in programs:
            program.process.wait()
    return found[1:]  # the first chat creates objects that later ones find


def in_all(seen: list[dict[str, Any]], what: str) -> list[str]:
    """Return the items that all windows have in common."""
    return sorted(set.intersection(*(set(one[what]) for one in seen)))


def show_entries(seen: list[dict[str, Any]]) -> None:
    """Print the functions by which each package is entered, with the least count of all windows."""
    by_package: dict[str, list[str]] = {}
    for way in in_all(seen, "entries"):
        package, _, how = way.partition(" ")
        times = min(one["entries"][way] for one in seen)
        by_package.setdefault(package, []).append(f"{times} x {how}")
    for package, hows in sorted(by_package.items()):
        print(package, *hows, sep="\n    ")


def main() -> None:
    """Count the modules, objects and package entries, and print them."""
    if sys.argv[1:2] == ["--in"]:
        sys.path[0] = str(Path.cwd())
        sys.exit(traced(Path(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the modules")
    parser.add_argument("--entries", action="store_true", help="print the ways into each package")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    options = parser.parse_args()
    root = options.root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        seen = windows(root, Path(folder))
    found = [str(Path(file).relative_to(root)) for file in in_all(seen, "files")]
    kinds = in_all(seen, "kinds")
    if options.list:
        print(*found, *kinds, sep="\n")
    if options.entries:
        show_entries(seen)
    events = sum("/events/" in path for path in found)
    print(f"{len(found)} modules, of which {events} read the worker's KV events")
    print(f"{len(kinds)} kinds of object")


if __name__ == "__main__":
    main()
