"""Makes views of a fleet and of a request for tests: a test gives the columns that matter, and all
others are those of an idle worker.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.contract import RequestView, TableFleet

_INTS = {
    "worker_id", "hit_tokens", "hit_tokens_host", "hit_tokens_disk", "running", "waiting",
    "waiting_prompt_tokens",
}  # fmt: skip
_BOOLS = {"hits_unknown", "holds_trunk"}
_SCALARS = {
    "arrival_rate_per_s": 0.0,
    "turnover_per_s": 0.0,
    "mean_load_s": 0.0,
    "live_sessions": 0,
    "pair_tokens": 0.0,
    "cycle_s": 0.0,
    "hot_trunk_tokens": 0,
    "copies_missing": 0,
}
_IDLE: dict[str, float] = {
    "queued_prefill_tokens": 0.0,
    "token_work": 1.0,
    "working_set_tokens": 0.0,
    "working_set_s": 0.0,
    "host_cached_tokens": 0.0,
    "disk_cached_tokens": 0.0,
    "context_tokens": 0.0,
    "prefill_tokens_per_s": 10_000.0,
    "step_s": 0.010,
    "load_age_s": 0.1,
    "event_age_s": 0.1,
}  # any other float column is NaN, unknown


def fleet_of(**columns: Any) -> TableFleet:
    """Return a fleet with as many rows as the longest given column; a scalar fills its column.

    For example `fleet_of(hit_tokens=[600, 0], step_s=0.02)`. Columns that are not given are those
    of an idle worker of 10,000 tokens/s and 10 ms steps without thresholds. Scalars of the pool are
    given under their own names.
    """
    known = {field.name for field in fields(TableFleet)}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise TypeError(f"no column {', '.join(unknown)}; columns: {', '.join(sorted(known))}")
    given = {name: value for name, value in columns.items() if name not in _SCALARS}
    rows = max((np.size(value) for value in given.values()), default=1)
    view = {name: _column(name, given.get(name), rows) for name in known - set(_SCALARS)}
    return TableFleet(**view, **{name: columns.get(name, _SCALARS[name]) for name in _SCALARS})


def request_of(**changes: Any) -> RequestView:
    """Return a request of 1,000 tokens in blocks of 16, with arrival 0 and draw 0; `changes`
    replace fields by name.
    """
    values: dict[str, Any] = {
        "block_size": 16,
        "prompt_tokens": 1_000,
        "now_s": 0.0,
        "draw": 0.0,
        "serial": 0,
    } | changes
    if "chain" not in values:
        blocks = values["prompt_tokens"] // values["block_size"]
        values["chain"] = np.arange(1, blocks + 1, dtype=np.uint64)
    return RequestView(**values)


def _column(name: str, value: Any, rows: int) -> npt.NDArray[Any]:
    if value is None and name == "worker_id":
        return np.arange(rows, dtype=np.int64)
    if name in _INTS:
        dtype: type = np.int64
    else:
        dtype = np.bool_ if name in _BOOLS else np.float64
    if value is None:
        value = 0 if dtype is not np.float64 else _IDLE.get(name, np.nan)
    column = np.asarray(value, dtype=dtype)
    if column.ndim == 1 and len(column) != rows:
        raise ValueError(f"column {name} has {len(column)} rows, another one has {rows}")
    return np.broadcast_to(column, (rows,)).copy()
