"""Makes the rows of the replicas for the admin port's page."""

from __future__ import annotations

from typing import Any

from router.replicas.replica import Replica


def replicas_shown(replica: Replica) -> list[dict[str, Any]]:
    """Return a row for this router, then one for each present peer by name.

    `silent_s` is the time since a peer's latest message, null for this router. `differs_in` has the
    keys of the configuration that must agree but differ.
    """
    link, sharing = replica.link, replica.sharing
    own = "link up" if link.up else f"link down for {link.stale_s:.0f} s"
    rows = [_row(f"{sharing.identity} (this router)", own, None, None, ())]
    heard = {row.name: row for row in sharing.rows(link.clock())}
    for name in sorted({*heard, *link.membership.peers}):
        differs = tuple(link.disagreements.now.get(name, ()))
        if (row := heard.get(name)) is None:
            rows.append(_row(name, "no message yet", None, None, differs))
            continue
        known = "all known" if row.in_sync else "not all known"
        state = known if link.up else f"stale, {known} then"
        rows.append(_row(name, state, row.requests, max(row.silent_s, 0.0), differs))
    return rows


def _row(
    name: str, state: str, requests: int | None, silent_s: float | None, differs: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "requests": requests,
        "silent_s": silent_s,
        "differs_in": differs,
    }
