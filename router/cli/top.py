"""The command `warmroute top`: a live view of the fleet and its decisions."""

from __future__ import annotations

import argparse
import math
import os
import select
import shutil
import statistics
import sys
import termios
import textwrap
import time
import tty
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.wire.events import WireError
from engine.wire.metrics import samples
from router.cli.admin import AdminClient, AdminError, add_admin_flags, admin_of

_LATEST = 1_000  # decisions, all that the router keeps
_HELD = "warmroute_held_by_tenant"
_METRICS = (
    *(f"warmroute_{name}" for name in ("decisions", "prompt_tokens", "holds", "rejections")),
    *(f"warmroute_{name}" for name in ("retries", "migrations", "ejections", "inflight_requests")),
    *("warmroute_reported_hit_tokens", "warmroute_reported_prompt_tokens"),
    *(_HELD, "warmroute_held_oldest_seconds", "warmroute_waiting_requests"),
)


@dataclass(frozen=True, slots=True)
class Look:
    """The router's state at one moment. Lifetime: as long as the display shows it or computes rates
    from it.
    """

    at_s: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    totals: Mapping[str, float] = field(default_factory=dict)  # of metrics, over all labels
    held: Mapping[str, float] = field(default_factory=dict)  # requests that wait, by tenant
    decisions: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def total(self, name: str) -> float:
        """Return the sum of a metric's samples; 0 if there are none."""
        return self.totals.get(f"warmroute_{name}", 0.0)


@dataclass(frozen=True, slots=True)
class OfWorker:
    """The figures of one worker in the latest decisions. A figure is None if no decision has it."""

    hit_rate: float | None
    ttft_p50_s: float | None


def look(admin: AdminClient) -> Look:
    """Return the router's present state, read from the admin port. Raises AdminError if it cannot
    be read.
    """
    answer = admin.request("GET", "/workers")
    rows, sources = answer["workers"], answer.get("sources", [])
    decisions = admin.request("GET", f"/explain?last={_LATEST}")["decisions"]
    try:
        totals, held = counted(admin.text("/metrics"))
    except WireError as error:
        raise AdminError(f"{admin.url}/metrics: {error}") from error
    return Look(time.monotonic(), rows, totals, held, decisions, sources)


def counted(text: str) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the router's metrics summed by name, and the number of waiting requests by tenant.
    Raises WireError if `text` is not Prometheus text.
    """
    totals: dict[str, float] = defaultdict(float)
    held: dict[str, float] = {}
    ours = (line for line in text.splitlines() if line.startswith(_METRICS))
    for sample in samples("\n".join(ours), _METRICS):
        totals[sample.name] += sample.value
        if sample.name == _HELD:
            held[sample.labels.get("tenant", "")] = sample.value
    return totals, held


def rate(before: Look | None, now: Look, name: str) -> float | None:
    """Return how fast a counter grows per second between two readings. Return None if that is
    unknown, for example after a restart of the router.
    """
    if before is None or now.at_s <= before.at_s:
        return None
    more = now.total(name) - before.total(name)
    return None if more < 0 else more / (now.at_s - before.at_s)


def of_workers(decisions: list[dict[str, Any]]) -> dict[int, OfWorker]:
    """Return the figures of each worker in the latest decisions, by worker id."""
    prompt: dict[int, int] = defaultdict(int)
    hit: dict[int, int] = defaultdict(int)
    ttft: dict[int, list[float]] = defaultdict(list)
    for one in decisions:
        worker = one["worker"]
        prompt[worker] += one["prompt_tokens"]
        cached = one.get("cached_tokens")
        hit[worker] += one["expected_hit_tokens"] if cached is None else cached
        if one.get("first_token_s") is not None:
            ttft[worker].append(one["first_token_s"])
    return {
        worker: OfWorker(
            hit[worker] / prompt[worker] if prompt[worker] else None,
            statistics.median(ttft[worker]) if ttft[worker] else None,
        )
        for worker in prompt
    }


_STATE_FIRST = ("down", "silent", "ejected", "trial", "joining", "draining", "busy", "ready")
_DECISIONS, _TENANTS, _SOURCES, _REASONS = 8, 3, 3, 3
_HEAD = "worker state     run wait  queued  kv% hit% hits   ttft  address"
_MODES = {"exact": "exact", "degraded": "degr.", "approximate": "appr."}  # how exact hits are

SORTS: tuple[str, ...] = ("trouble", "requests", "queued", "worker")


@dataclass(frozen=True, slots=True)
class View:
    """The size and options of the display. Lifetime: one refresh of the display."""

    columns: int
    lines: int
    sort: str = SORTS[0]
    paused: bool = False
    trouble: str = ""  # the reason why there are no newer figures


def frame(admin: str, before: Look | None, now: Look | None, view: View) -> list[str]:
    """Return the lines of the display: at most `view.lines` lines of at most `view.columns`
    characters.
    """
    notes = [f"warmroute top  {admin}" + ("  PAUSED" if view.paused else "")]
    if view.trouble:
        notes.append(f"! {view.trouble}")
    if now is None:
        return _fit([*notes, "waiting for the router"], view)
    top = [*notes, *_traffic(before, now), *_sources(now), ""]
    below = [*_inexact(now, max(view.columns, 20)), *_held(now), *_latest(now)]
    room = view.lines - len(top) - 2
    below = below[: max(room // 2, 0)]
    return _fit([*top, *_fleet(now, view, room - len(below)), *below], view)


def _traffic(before: Look | None, now: Look) -> list[str]:
    def per_s(name: str) -> str:
        return _short(rate(before, now, name))

    states: dict[str, int] = {}
    for row in now.rows:
        states[row["state"]] = states.get(row["state"], 0) + 1
    shown = ", ".join(f"{states[s]} {s}" for s in sorted(states, key=_rank))
    hit, prompt = (now.total(f"reported_{what}_tokens") for what in ("hit", "prompt"))
    return [
        f"workers {len(now.rows)}: {shown or 'none'}",
        f"requests/s {per_s('decisions')}  prompt tokens/s {per_s('prompt_tokens')}  "
        f"hit rate {_percent(hit / prompt if prompt else None)}  "
        f"in flight {now.total('inflight_requests'):.0f}  "
        f"waiting {now.total('waiting_requests'):.0f}",
        f"per s: held {per_s('holds')}  rejected {per_s('rejections')}  "
        f"retried {per_s('retries')}  moved {per_s('migrations')}  ejected {per_s('ejections')}",
    ]


def _sources(now: Look) -> list[str]:
    """Return a line for each source of workers that reports a problem."""
    ill = [one for one in now.sources if one.get("trouble")]
    return [f"! {one['source']}: {one['trouble']}" for one in ill[:_SOURCES]]


def _fleet(now: Look, view: View, room: int) -> list[str]:
    said = of_workers(now.decisions)
    rows = sorted(now.rows, key=_order(view.sort))
    kept = rows if len(rows) <= room - 1 else rows[: max(room - 2, 0)]
    lines = [_HEAD, *(_worker(row, said.get(row["id"])) for row in kept)]
    if len(kept) < len(rows):
        lines.append(f"... {len(rows) - len(kept)} more")
    return lines


def _worker(row: Mapping[str, Any], said: OfWorker | None) -> str:
    capacity, used = row.get("kv_capacity_tokens"), row.get("kv_used_tokens")
    used = row.get("context_tokens") if used is None else used
    share = used / capacity if capacity and used is not None else None
    state = "leaving" if row.get("leaving") else row["state"]
    address = row["url"].partition("://")[2]
    address += "" if row.get("rank") is None else f"#{row['rank']}"
    why = f" {row['trouble'].removeprefix(f'{address}: ')}" if row.get("trouble") else ""
    started = row.get("slow_start_share")
    why += "" if started is None or started >= 1 else f" slow start {_percent(started)}"
    busy_s = row.get("busy_for_s")
    why += "" if busy_s is None else f" busy for {_seconds(busy_s)}"
    hit, ttft = (None, None) if said is None else (said.hit_rate, said.ttft_p50_s)
    return (
        f"{row['id']:>6} {state:<8} {_short(row.get('inflight_requests')):>4} "
        f"{_short(row.get('waiting_requests')):>4} {_short(row.get('queued_prefill_tokens')):>7} "
        f"{_percent(share):>4} {_percent(hit):>4} {_mode(row):<5} {_seconds(ttft):>5}  "
        f"{address}{why}"
    )


def _mode(row: Mapping[str, Any]) -> str:
    mode = (row.get("hits") or {}).get("mode")
    return "-" if mode is None else _MODES.get(mode, str(mode)[:5])


def _inexact(now: Look, columns: int) -> list[str]:
    """Return lines that say why the hits of workers are not exact, and how to make them exact,
    wrapped at `columns` characters. Workers with approximate hits come first.
    """
    workers: dict[tuple[str, str, str], list[str]] = {}
    for row in now.rows:
        hits = row.get("hits") or {}
        if hits.get("reason"):
            key = hits["mode"], hits["reason"], hits.get("lift") or ""
            workers.setdefault(key, []).append(str(row["id"]))
    lines = []
    for (mode, reason, lift), ids in sorted(workers.items())[:_REASONS]:
        whose = ", ".join(ids) if len(ids) <= _REASONS else f"{len(ids)} workers"
        lines += textwrap.wrap(f"{mode} hits ({whose}): {reason}", columns, subsequent_indent="  ")
        lines += textwrap.wrap(f"  for exact hits: {lift}", columns) if lift else []
    return ["", *lines] if lines else []


def _held(now: Look) -> list[str]:
    waiting = {tenant or "(none)": count for tenant, count in now.held.items() if count}
    if not waiting:
        return []
    most = sorted(waiting.items(), key=lambda one: -one[1])
    oldest = now.total("held_oldest_seconds")
    shown = "  ".join(f"{tenant} {count:.0f}" for tenant, count in most[:_TENANTS])
    return ["", f"held {sum(waiting.values()):.0f}, the oldest {_seconds(oldest)}: {shown}"]


def _latest(now: Look) -> list[str]:
    if not now.decisions:
        return []
    width = max(7, *(len(str(one["request"])) for one in now.decisions[:_DECISIONS]))
    lines = ["", f"{'request':>{width}} worker  prompt    hit  why"]
    for one in now.decisions[:_DECISIONS]:
        best: Sequence[Mapping[str, Any]] = one.get("best") or ()
        other = f", next {best[1]['worker']}" if len(best) > 1 else ""
        lines.append(
            f"{one['request']:>{width}} {one['worker']:>6} {_short(one['prompt_tokens']):>7} "
            f"{_short(one['expected_hit_tokens']):>6}  {one['reason']} ({one['policy']}){other}"
        )
    return lines


def _order(sort: str) -> Callable[[Mapping[str, Any]], Any]:
    def number(row: Mapping[str, Any], name: str) -> float:
        return -(row.get(name) or 0)

    def key(row: Mapping[str, Any]) -> Any:
        by = {
            "trouble": (_rank(row["state"]), number(row, "inflight_requests")),
            "requests": number(row, "inflight_requests"),
            "queued": number(row, "queued_prefill_tokens"),
            "worker": 0,
        }
        return by[sort], row["id"]

    return key


def _rank(state: str) -> int:
    return _STATE_FIRST.index(state) if state in _STATE_FIRST else 0


def _fit(lines: list[str], view: View) -> list[str]:
    """Return the lines cut to the terminal's width. Control characters, which text from a worker
    may have, are removed.
    """
    plain = ("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return [line[: view.columns] for line in plain][: view.lines]


def _short(value: float | None) -> str:
    """Return a number in at most six characters."""
    if value is None or not math.isfinite(value):
        return "-"
    for unit, size in ("G", 1e9), ("M", 1e6), ("k", 1e4):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.{0 if unit == 'k' else 1}f}{unit}"
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.0f}ms" if value < 1 else f"{value:.1f}s"


ABOUT = """\
Watch a running router by the admin port: workers, traffic, held requests, latest decisions.

  warmroute top
  warmroute top --admin http://127.0.0.1:8081 --once

Keys: q quits, p pauses, s changes the order: by trouble, requests, queued tokens or number.
Hit rates and TTFT (median) are of the latest 1,000 decisions. Exit status: 0, 1 without answer.
"""
_EVERY_S = 1.0
_ONCE_COLUMNS, _ONCE_LINES = 160, 10_000  # of a frame for scripts
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # xterm: other screen, no cursor
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_top_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute top`."""
    parser.add_argument("--once", action="store_true", help="print one frame of figures, and end")
    add_admin_flags(parser)


def top_command(args: argparse.Namespace) -> int:
    """Run `warmroute top`, and return its exit status."""
    try:
        admin = admin_of(args)
        first = look(admin)
    except AdminError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _once(admin, first)
    with _screen(), _keys():
        Watch(admin, first).run()
    return 0


def _once(admin: AdminClient, first: Look) -> int:
    """Print the display once. The router's state is read twice, because rates need two readings."""
    time.sleep(_EVERY_S)
    try:
        now = look(admin)
    except AdminError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(frame(admin.url, first, now, View(_ONCE_COLUMNS, _ONCE_LINES))))
    return 0


@dataclass
class Watch:
    """The live display of `warmroute top`. Lifetime: command."""

    admin: AdminClient
    now: Look
    before: Look | None = None
    sort: int = 0
    paused: bool = False
    trouble: str = ""

    def run(self) -> None:
        """Show the display until the user presses q or Ctrl-C."""
        next_s = time.monotonic() + _EVERY_S
        while True:
            self._draw()
            key = _key(max(next_s - time.monotonic(), 0.0))
            if key in ("q", "\x03"):
                return
            if key == "p":
                self.paused = not self.paused
            elif key == "s":
                self.sort = (self.sort + 1) % len(SORTS)
            elif not key:
                next_s = time.monotonic() + _EVERY_S
                self._look()

    def _look(self) -> None:
        """Read the router's state again. If the router does not answer, for example during a
        restart, try again later.
        """
        if self.paused:
            return
        try:
            self.before, self.now = self.now, look(self.admin)
            self.trouble = ""
        except AdminError as error:
            self.trouble = str(error)

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        view = View(size.columns, size.lines, SORTS[self.sort], self.paused, self.trouble)
        lines = frame(self.admin.url, self.before, self.now, view)
        shown = "\r\n".join(line + _CLEAR_LINE for line in lines)
        sys.stdout.write(_HOME + shown + _CLEAR_REST)
        sys.stdout.flush()


def _key(within_s: float) -> str:
    """Return the next key that the user presses, or "" if none is pressed within `within_s`
    seconds. If the terminal is gone, return "q".
    """
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if ready else ""


@contextmanager
def _screen() -> Iterator[None]:
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


@contextmanager
def _keys() -> Iterator[None]:
    """Let the terminal pass on each key at once, without waiting for Enter, while the
    block runs.
    """
    number = sys.stdin.fileno()
    kept = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, kept)
