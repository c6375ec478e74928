"""Counts requests and tokens by tenant: the busiest tenants by name, and all others together.

The counts only grow, as Prometheus requires of counters. When a tenant is no longer among the
busiest, its counts are added to those of the others; it starts at zero if it returns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

OTHERS = "(others)"  # how they are shown together
_PLACES = 50
_CANDIDATES = 4 * _PLACES
_CODES = 20  # of refusals
_LEAD = 2  # times as many requests as the idlest that has a place take that place


@dataclass(slots=True)
class TenantRow:
    """The counts of one tenant. Lifetime: as long as the tenant is among the busiest."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by code

    def add(self, other: TenantRow) -> None:
        """Add the counts of another row to this one."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.answer_tokens += other.answer_tokens
        self.refused.update(other.refused)


class TenantCounts:
    """The counts of all tenants. Lifetime: process."""

    def __init__(self, places: int = _PLACES, candidates: int = _CANDIDATES) -> None:
        self._places = places
        self._most_candidates = candidates
        self.rows: dict[str, TenantRow] = {}
        self.others = TenantRow()
        # Requests of tenants without a place, since each was last forgotten.
        self._candidates: Counter[str] = Counter()

    def arrived(self, tenant: str | None) -> None:
        """Count a request of `tenant`; None means that it has no tenant and is not counted."""
        if tenant is not None:
            self._place(tenant).requests += 1

    def refused(self, tenant: str | None, code: str) -> None:
        """Count a request of `tenant` that was refused with the error code `code`."""
        if tenant is not None:
            refused = self.rows.get(tenant, self.others).refused
            known = code in refused or len(refused) < _CODES
            refused[code if known else "other"] += 1

    def used(self, tenant: str | None, prompt_tokens: int, answer_tokens: int) -> None:
        """Count the tokens of an answered request."""
        if tenant is not None:
            row = self.rows.get(tenant, self.others)
            row.prompt_tokens += prompt_tokens
            row.answer_tokens += answer_tokens

    def _place(self, tenant: str) -> TenantRow:
        if tenant == OTHERS:
            return self.others
        row = self.rows.get(tenant)
        if row is not None:
            return row
        if len(self.rows) < self._places:
            row = self.rows[tenant] = TenantRow()
            return row
        self._candidates[tenant] += 1
        if len(self._candidates) > self._most_candidates:
            # Each other candidate loses one count, so that only tenants much busier than the rest
            # stay.
            kept = {name: n - 1 for name, n in self._candidates.items() if n > 1}
            self._candidates = Counter(kept)
        idlest = min(self.rows, key=lambda name: self.rows[name].requests)
        if self._candidates[tenant] <= _LEAD * self.rows[idlest].requests:
            return self.others
        self.others.add(self.rows.pop(idlest))
        del self._candidates[tenant]
        row = self.rows[tenant] = TenantRow()
        return row
