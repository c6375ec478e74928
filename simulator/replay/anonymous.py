"""Clients that do not say which session a request is of: a share of all sessions, by a draw."""

from __future__ import annotations

from random import Random


class Anonymous:
    """Which sessions the router is told of. Lifetime: replay.

    A client says it always or never, so the draw is the session's and not the request's.
    """

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share

    def seen(self, session: str | None) -> str | None:
        """The session's id as the router sees it."""
        if not self._share or session is None:
            return session
        drawn = Random(f"{self._seed}/no session/{session}").random()
        return None if drawn < self._share else session
