"""The trunks as the admin port shows them."""

from __future__ import annotations

from typing import Any

from router.core.core import RouterCore
from router.estimators.trunks import Trunk


def trunks_shown(core: RouterCore, most: int) -> dict[str, Any]:
    """The heads of prompts with the greatest demand, at most so many of those kept.

    `followed` is false, and nothing is shown, where the policy does not ask about sessions.
    """
    sessions = core.following.sessions
    if sessions is None:
        return {"followed": False, "kept": 0, "trunks": []}
    trunks = sessions.trunks
    rows = [_row(core, trunk) for trunk in trunks.table()[:most]]
    return {"followed": True, "kept": len(trunks), "trunks": rows}


def _row(core: RouterCore, trunk: Trunk) -> dict[str, Any]:
    copies = core.roster.copies(trunk.last_hash)
    return {
        "hash": f"{trunk.last_hash:016x}",
        "tokens": trunk.tokens,
        "share": round(trunk.share, 4),
        "requests_per_s": round(trunk.rate_per_s, 3),
        "demand": round(trunk.demand, 3),
        "copies": copies,
        "wanted_copies": trunk.wanted_copies,
        "saved_tokens_per_s": round(trunk.rate_per_s * trunk.tokens) if copies else 0,
    }
