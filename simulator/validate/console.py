"""A validation for people: the figures side by side, and where the differences come from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from simulator.validate.compare import Metric, Placements
from simulator.validate.validate import Validation, same_ranking

OVERRUNS = 0.02  # above this share of late steps the machine was too slow, as in the demo
LATE_MS = 50.0  # and where the requests themselves left so late


def validation_table(found: Validation) -> Table:
    """The metrics of one policy in both worlds."""
    table = Table("figure", "live", "simulated", "difference", "allowed", "", title=found.policy)
    for one in found.metrics:
        allowed = "" if one.limit is None else f"±{one.limit:g} {one.unit}"
        mark = "" if one.limit is None else ("[green]ok[/]" if one.passed else "[red]beyond[/]")
        table.add_row(one.name, _told(one.live), _told(one.simulated), _apart(one), allowed, mark)
    return table


def explained(found: Validation) -> list[str]:
    """Sentences on what differs between the worlds, request by request."""
    by = found.placements
    if not by.requests:
        return ["no request was completed in both worlds"]
    lines = [
        f"{by.requests:,} requests completed in both: {by.same_worker:.0%} on the same worker, "
        f"{by.same_hit:.0%} with the same hit",
        _hits_explained(by),
    ]
    if by.transport_ms is not None:
        lines.append(
            f"live, a request on the same worker with the same hit had its first token "
            f"{abs(by.transport_ms):.1f} ms {'later' if by.transport_ms >= 0 else 'earlier'} "
            "(median): HTTP, hashing, a machine that also does other work"
        )
    if (found.overrun_steps_share or 0.0) > OVERRUNS or (found.late_p99_ms or 0.0) > LATE_MS:
        lines.append(
            f"live, this machine did not keep up: {found.overrun_steps_share or 0.0:.1%} of steps "
            f"ended late, requests left up to {found.late_p99_ms or 0.0:,.0f} ms late (p99); "
            "trust the simulated side, or run again with less beside it or a lower --live-speed"
        )
    return lines


def summary(found: Sequence[Validation]) -> str:
    """One line on all policies."""
    order = "the same" if same_ranking(found) else "ANOTHER"
    beyond = [one.policy for one in found if not one.passed]
    limits = f"beyond a limit: {', '.join(beyond)}" if beyond else "all within their limits"
    return f"ranking by mean TTFT: {order} in both worlds; {limits}"


def _hits_explained(by: Placements) -> str:
    if by.same_hit == 1.0:
        return "every hit is the same in both worlds"
    return (
        f"hits that differ: {by.other_worker_other_hit:.0%} of requests were placed elsewhere "
        f"({by.moved_hit_tokens:+,} tokens simulated against live), {by.same_worker_other_hit:.0%} "
        f"found another cache on the same worker ({by.kept_hit_tokens:+,} tokens: an earlier "
        "neighbour was placed elsewhere, or a block was computed or evicted at another moment)"
    )


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _apart(one: Metric) -> str:
    return "-" if one.difference is None else f"{one.difference:+.1f} {one.unit}"
