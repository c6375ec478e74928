"""Finds the date that chat templates write into prompts, which is the date of the engines, not of
the router.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

LOCAL = "local"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def date_of(setting: str) -> Callable[[float], str]:
    """Return the function from a Unix time to the date in prompts.

    `setting` is a time zone, `local` for this machine's, or a fixed date. Raises ValueError if it
    is none of these.
    """
    if setting == LOCAL:
        return lambda now_s: time.strftime("%Y-%m-%d", time.localtime(now_s))
    if _DATE.fullmatch(setting):
        return lambda _: setting
    try:
        zone = UTC if setting == "UTC" else ZoneInfo(setting)
    except (OSError, ValueError, KeyError) as error:  # ZoneInfoNotFoundError is a KeyError
        why = f"{setting!r} is neither a date (2026-01-31) nor a time zone (Europe/Berlin, UTC)"
        raise ValueError(why) from error
    return lambda now_s: datetime.fromtimestamp(now_s, zone).strftime("%Y-%m-%d")
