"""A decision or a hold taken apart: what the policy saw of the best workers, and its terms.

Made only where somebody will read it, before the dispatch is charged. No text, no chain, no name
of a session or tenant is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, Ints, RequestView
from policies.pick import ranked
from policies.record import record

SHOWN_WORKERS = 8  # of a thousand
MAX_TERMS = 16  # of one policy
_NAME_CHARS = 64  # of a term
_OF_REQUEST = (
    *("prompt_tokens", "trunk_tokens", "private_tokens", "standing", "home_id", "held_s"),
    *("priority", "draw", "serial", "approximate"),
)
_DERIVED = ("requests", "queued_prefill_s", "kv_fraction")  # columns made of others
_COLUMNS = (*(f.name for f in fields(FleetView) if f.name != "worker_id"), *_DERIVED)


@record
class Seen:
    """One worker as the policy saw it. A signal that nobody gave is NaN."""

    worker_id: int
    cost: float  # +inf: not this one
    columns: Mapping[str, float]
    terms: Mapping[str, float]


@record
class Details:
    """What one decision saw: the request, the pool, and its best eight workers.

    The chosen one is first, then by cost; those that cost +inf come last, by their hit tokens.
    """

    request: Mapping[str, Any]
    pool: Mapping[str, float]  # figures that are no worker's own
    workers: int  # that were considered
    seen: tuple[Seen, ...]


class TermsError(ValueError):
    """What a policy gave as its terms cannot be shown; the text says why."""


def details_of(
    request: RequestView, fleet: FleetView, costs: Floats, chosen: int, terms: Mapping[str, Floats]
) -> Details:
    """`costs` and `terms` are of the rows of `fleet`; `chosen` is -1 where nobody was."""
    rows = _best(costs, fleet.hit_tokens, chosen)
    columns: dict[str, list[float]] = {}
    pool: dict[str, float] = {}
    for name in _COLUMNS:
        value = getattr(fleet, name)
        if isinstance(value, np.ndarray):
            columns[name] = value[rows].tolist()
        else:
            pool[name] = float(value)
    parts = {name: term[rows].tolist() for name, term in terms.items()}
    ids, paid = fleet.worker_id[rows].tolist(), costs[rows].tolist()
    return Details(
        request={name: getattr(request, name) for name in _OF_REQUEST},
        pool=pool,
        workers=len(fleet),
        seen=tuple(
            Seen(
                ids[at],
                paid[at],
                {name: column[at] for name, column in columns.items()},
                {name: part[at] for name, part in parts.items()},
            )
            for at in range(len(rows))
        ),
    )


def checked_terms(terms: Any, rows: int) -> dict[str, Floats]:
    """`terms` as a policy gave them. Raises TermsError for anything but numbers of each row."""
    if not isinstance(terms, Mapping) or len(terms) > MAX_TERMS:
        raise TermsError(f"terms must be a mapping of at most {MAX_TERMS} names to arrays")
    checked = {}
    for name, term in terms.items():
        if not isinstance(name, str) or len(name) > _NAME_CHARS or not name.isprintable():
            raise TermsError(f"a term's name must be text of at most {_NAME_CHARS} characters")
        values = np.asarray(term)
        if values.shape != (rows,) or values.dtype.kind not in "fiub":
            raise TermsError(
                f"term {name} is {values.dtype} of shape {values.shape}; give a number for each "
                f"of the {rows} workers"
            )
        checked[name] = values.astype(np.float64)
    return checked


def _best(costs: Floats, hit_tokens: Ints, chosen: int) -> Ints:
    rows = ranked(costs, SHOWN_WORKERS + 1).tolist()
    if chosen >= 0:
        rows = [chosen, *(row for row in rows if row != chosen)]
    if len(rows) < SHOWN_WORKERS:
        known = set(rows)
        by_hits = np.argsort(-hit_tokens, kind="stable")[: 2 * SHOWN_WORKERS].tolist()
        rows += [row for row in by_hits if row not in known]
    return np.array(rows[:SHOWN_WORKERS], dtype=np.int64)
