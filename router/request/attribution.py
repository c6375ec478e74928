"""Counts how often a client changes the attribution line at the beginning of an agent's prompts."""

from __future__ import annotations

from collections import OrderedDict

_SESSIONS_MAX = 4_096  # sessions that are remembered, the latest ones


class AttributionLines:
    """Compares the attribution line of each request with that of the previous request of its
    session. Lifetime: process.

    Claude Code puts such a line before its system prompt. The router leaves it out of a prompt's
    tokens, but not every engine does. At an engine that does not, a line that differs in each
    request prevents all reuse of cached KV. Only digests of lines are kept, and only those of the
    latest sessions.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()
        self.same = 0
        self.changed = 0

    def count(self, tenant: str | None, session: str | None, digest: bytes) -> None:
        """Count a request whose attribution line has this digest. Requests without a session are
        not compared.
        """
        if session is None:
            return
        key = tenant, session
        before = self._digests.pop(key, None)
        self._digests[key] = digest
        if before == digest:
            self.same += 1
        elif before is not None:
            self.changed += 1
        elif len(self._digests) > _SESSIONS_MAX:
            self._digests.popitem(last=False)
