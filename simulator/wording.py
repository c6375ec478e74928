"""Figures as people read them; a figure that was not measured is a dash."""

from __future__ import annotations

NOTHING = "–"
SHORT_MS = 100.0


def whole(value: float | None) -> str:
    """A count or milliseconds without decimals."""
    return NOTHING if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share in percent."""
    return NOTHING if value is None else f"{value:.1%}"


def ratio(value: float | None) -> str:
    """A ratio with two decimals."""
    return NOTHING if value is None else f"{value:.2f}"


def seconds(value_ms: float | None) -> str:
    """Milliseconds as seconds, but for those too short to tell apart that way."""
    if value_ms is None:
        return NOTHING
    return f"{value_ms:.0f} ms" if value_ms < SHORT_MS else f"{value_ms / 1000:.2f} s"


def counted(count: int, what: str) -> str:
    """As in `1 request` and `2,000 requests`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
