"""The routers that share state with this one, as the admin port's page lists them."""

from __future__ import annotations

from typing import Any

from router.replicas.replica import Replica


def replicas_shown(replica: Replica) -> list[dict[str, Any]]:
    """This router first, then those that are there, by name.

    `silent_s`: since its latest message, null for this one; `differs_in`: keys of the
    configuration that must agree and do not.
    """
    link, sharing = replica.link, replica.sharing
    own = "link up" if link.up else f"link down for {link.stale_s:.0f} s"
    rows = [_row(f"{sharing.identity} (this router)", own, None, None, ())]
    heard = {row.name: row for row in sharing.rows(link.clock())}
    for name in sorted({*heard, *link.membership.peers}):
        differs = tuple(link.disagreements.now.get(name, ()))
        if (row := heard.get(name)) is None:
            rows.append(_row(name, "not heard yet", None, None, differs))
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
