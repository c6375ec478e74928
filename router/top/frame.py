"""One frame of the view, as lines of text no wider than the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.top.figures import Look, OfWorker, of_workers, rate

_STATE_FIRST = ("down", "ejected", "trial", "joining", "draining", "ready")
_DECISIONS, _TENANTS, _SOURCES = 8, 3, 3
_HEAD = "worker state     run wait  queued  kv% hit%  ttft  address"

SORTS: tuple[str, ...] = ("trouble", "requests", "queued", "worker")


@dataclass(frozen=True, slots=True)
class View:
    """How it is to be shown. Lifetime: frame."""

    columns: int
    lines: int
    sort: str = SORTS[0]
    paused: bool = False
    trouble: str = ""  # why there is nothing newer


def frame(admin: str, before: Look | None, now: Look | None, view: View) -> list[str]:
    """At most `view.lines` lines of at most `view.columns` characters."""
    notes = [f"warmroute top  {admin}" + ("  PAUSED" if view.paused else "")]
    if view.trouble:
        notes.append(f"! {view.trouble}")
    if now is None:
        return _fit([*notes, "waiting for the router"], view)
    top = [*notes, *_traffic(before, now), *_sources(now), ""]
    below = [*_held(now), *_latest(now)]
    room = view.lines - len(top) - 2
    below = below[: max(room // 2, 0)]
    return _fit([*top, *_fleet(now, view, room - len(below)), *below], view)


def _traffic(before: Look | None, now: Look) -> list[str]:
    def per_s(name: str) -> str:
        return _short(rate(before, now, f"warmroute_{name}_total"))

    states: dict[str, int] = {}
    for row in now.rows:
        states[row["state"]] = states.get(row["state"], 0) + 1
    shown = ", ".join(f"{states[s]} {s}" for s in sorted(states, key=_rank))
    hit, prompt = (
        now.total(f"warmroute_reported_{what}_tokens_total") for what in ("hit", "prompt")
    )
    return [
        f"workers {len(now.rows)}: {shown or 'none'}",
        f"requests/s {per_s('decisions')}  prompt tokens/s {per_s('prompt_tokens')}  "
        f"hit rate {_percent(hit / prompt if prompt else None)}  "
        f"in flight {now.total('warmroute_inflight_requests'):.0f}",
        f"per s: held {per_s('holds')}  rejected {per_s('rejections')}  "
        f"retried {per_s('retries')}  moved {per_s('migrations')}  ejected {per_s('ejections')}",
    ]


def _sources(now: Look) -> list[str]:
    """Those that name workers and are in trouble."""
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
    why = f" {row['trouble']}" if row.get("trouble") else ""
    ramp = row.get("ramp_share")
    why += "" if ramp is None or ramp >= 1 else f" ramp {_percent(ramp)}"
    hit, ttft = (None, None) if said is None else (said.hit_rate, said.ttft_p50_s)
    return (
        f"{row['id']:>6} {state:<8} {_short(row.get('inflight_requests')):>4} "
        f"{_short(row.get('waiting_requests')):>4} {_short(row.get('queued_prefill_tokens')):>7} "
        f"{_percent(share):>4} {_percent(hit):>4} {_seconds(ttft):>5}  "
        f"{address}{why}"
    )


def _held(now: Look) -> list[str]:
    held = now.by("warmroute_held_by_tenant", "tenant")
    waiting = {tenant or "(none)": count for tenant, count in held.items() if count}
    if not waiting:
        return []
    most = sorted(waiting.items(), key=lambda one: -one[1])
    oldest = now.total("warmroute_held_oldest_seconds")
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
    """Cut to the terminal; what a worker says of itself may hold anything."""
    plain = ("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return [line[: view.columns] for line in plain][: view.lines]


def _short(value: float | None) -> str:
    """At most six characters."""
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
