"""Tests of the screens of `warmroute top`: right figures that fit into the terminal, whatever
workers report.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.events import WireError
from router.cli.top import SORTS, Look, View, counted, frame, of_workers, rate

ADMIN = "http://127.0.0.1:8081"


def row(number: int, state: str = "ready", **more: Any) -> dict[str, Any]:
    return {"id": number, "url": f"http://10.0.0.{number % 250}:8000", "state": state} | more


def decision(worker: int, **more: Any) -> dict[str, Any]:
    known = {"request": 7, "worker": worker, "prompt_tokens": 100, "expected_hit_tokens": 50}
    return known | {"reason": "policy", "policy": "hybrid", "best": [], **more}


def decided(at_s: float, count: float) -> Look:
    return Look(at_s, [row(0)], {"warmroute_decisions": count})


def test_failing_sources_and_workers_in_slow_start_are_shown() -> None:
    sources = [{"source": "file:x", "trouble": "torn"}, {"source": "redis", "trouble": None}]
    rows = [row(0) | {"slow_start_share": 0.25}, row(1) | {"slow_start_share": 1.0}]
    lines = frame(ADMIN, None, Look(0.0, rows, sources=sources), View(120, 24))
    assert "! file:x: torn" in lines
    assert not any("redis" in line for line in lines)
    of_fleet = [line for line in lines if ":8000" in line]
    assert [line.endswith("slow start 25%") for line in of_fleet] == [True, False]


def test_metrics_are_read_from_the_prometheus_text_format() -> None:
    text = (
        "# HELP warmroute_holds_total a b\nwarmroute_holds_total 1.0\nwarmroute_holds_created 9\n"
        'warmroute_decisions_total{policy="x",reason="{} \\"q\\""} 2.0\n'
        'warmroute_decisions_total{policy="y",reason="r"} 3.0\nnonsense\n'
        'warmroute_held_by_tenant{tenant="acme"} 2.0\nwarmroute_held_by_tenant{tenant=""} 1.0\n'
    )
    totals, held = counted(text)
    known = {"warmroute_holds": 1.0, "warmroute_decisions": 5.0, "warmroute_held_by_tenant": 3.0}
    assert (totals, held) == (known, {"acme": 2.0, "": 1.0})
    with pytest.raises(WireError, match="line 1: no number"):
        counted("warmroute_holds_total many\n")


def test_rates_are_per_second_and_unknown_across_a_restart() -> None:
    name = "decisions"
    assert rate(decided(10, 100), decided(12, 150), name) == 25
    assert rate(None, decided(12, 150), name) is None
    assert rate(decided(10, 100), decided(12, 3), name) is None
    assert "requests/s 25 " in "\n".join(
        frame(ADMIN, decided(10, 100), decided(12, 150), View(80, 24))
    )


def test_a_decision_is_shown_with_its_full_request_number() -> None:
    numbers = [7, 1 << 36 | 3]  # a large one, too
    decisions = [decision(0, request=number) for number in numbers]
    lines = frame(ADMIN, None, Look(0.0, [row(0)], decisions=decisions), View(100, 24))
    shown = lines[next(i for i, line in enumerate(lines) if "request worker" in line) + 1 :]
    assert [line.split()[0] for line in shown[:2]] == [str(number) for number in numbers]


def test_a_worker_is_shown_with_the_hit_rate_and_ttft_of_its_decisions() -> None:
    said = of_workers(
        [
            decision(1, cached_tokens=100, first_token_s=0.1),
            decision(1, cached_tokens=None, first_token_s=0.3),
        ]
    )
    assert said[1].hit_rate == 0.75
    assert said[1].ttft_p50_s == pytest.approx(0.2)
    rows = [
        row(1, kv_used_tokens=500, kv_capacity_tokens=1_000, inflight_requests=3),
        row(2, "down", trouble="GET /health: refused"),
    ]
    decisions = [decision(1, cached_tokens=80, first_token_s=0.25)]
    lines = frame(ADMIN, None, Look(0.0, rows, decisions=decisions), View(100, 24))
    text = "\n".join(lines)
    assert "50%" in text
    assert "80%" in text
    assert "250ms" in text
    down, up = (
        next(n for n, line in enumerate(lines) if f" {s} " in line) for s in ("down", "ready")
    )
    assert down < up, "trouble comes first"
    assert "GET /health: refused" in text


def test_tenants_with_held_requests_and_connection_errors_are_shown() -> None:
    held = Look(0.0, [row(0)], held={"acme": 3.0, "x": 0.0})
    text = "\n".join(frame(ADMIN, None, held, View(80, 24)))
    assert "held 3" in text
    assert "acme 3" in text
    away = frame(ADMIN, None, None, View(80, 24, trouble="connection refused"))
    assert "! connection refused" in away


@given(
    workers=st.integers(0, 1_000),
    columns=st.integers(20, 200),
    lines=st.integers(3, 60),
    sort=st.sampled_from(SORTS),
    said=st.text(max_size=40),
)
def test_a_frame_fits_the_terminal_and_has_no_control_characters(
    workers: int, columns: int, lines: int, sort: str, said: str
) -> None:
    rows = [row(n, "down" if n % 7 == 0 else "ready", trouble=said) for n in range(workers)]
    now = Look(1.0, rows, decisions=[decision(n % 9) for n in range(50)])
    shown = frame(ADMIN, None, now, View(columns, lines, sort))
    assert len(shown) <= lines
    assert all(len(line) <= columns and line.isprintable() for line in shown)


def test_of_a_thousand_workers_the_worst_are_shown_and_the_rest_counted() -> None:
    rows = [row(n, inflight_requests=n) for n in range(1_000)]
    rows[500]["state"] = "ejected"
    text = "\n".join(frame(ADMIN, None, Look(0.0, rows), View(80, 24)))
    assert " 500 ejected" in text
    assert " 999 ready" in text
    assert "more" in text


def test_workers_with_inexact_hits_are_shown_with_the_reason_and_the_remedy() -> None:
    none = {"mode": "approximate", "reason": "No tokenizer.", "lift": "--tokenizer DIR"}
    gap = {"mode": "degraded", "reason": "Events are missing.", "lift": None}
    exact = {"mode": "exact", "cause": None, "reason": None, "lift": None}
    rows = [row(0, hits=exact), row(1, hits=gap), row(2, hits=none), row(3, hits=none)]
    rows += [row(4, "down", hits=None), row(5, hits={"mode": "of the future"})]
    lines = frame(ADMIN, None, Look(0.0, rows), View(120, 40))
    at = next(line for line in lines if line.startswith("worker ")).index("hits ")
    modes = {line.split()[0]: line[at : at + 5].strip() for line in lines if ":8000" in line}
    assert [modes[str(n)] for n in range(6)] == ["exact", "degr.", "appr.", "appr.", "-", "of th"]
    at = lines.index("approximate hits (2, 3): No tokenizer.")
    assert lines[at + 1] == "  for exact hits: --tokenizer DIR"
    assert lines[at + 2] == "degraded hits (1): Events are missing."
    crowd = [row(n, hits=gap) for n in range(9)]
    assert "degraded hits (9 workers): Events are missing." in frame(
        ADMIN, None, Look(0.0, crowd), View(120, 40)
    )
