"""Defines the headers by which clients of agents name sessions, one table row for each client.

The rows come from the code and documents of clients in 2026: Claude Code (LLM gateway protocol),
Codex (`codex-rs/core`), OpenCode and Kilo, and pi; and from routers that read ids of their own:
Dynamo, smg and LiteLLM. `docs/reference/identity.md` has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.identity.ids import id_in, within


@dataclass(frozen=True, slots=True)
class Family:
    """The headers, by lower-case name, with which one kind of client identifies its requests; where
    several are listed, the first present one counts. Lifetime: process.
    """

    name: str
    session: tuple[str, ...] = ()  # the agent's own conversation
    group: tuple[str, ...] = ()  # the person's session: main agent, sub-agents, side requests
    parent: tuple[str, ...] = ()  # the agent that started this one
    final: tuple[str, ...] = ()  # its value is "true" or "1" in the session's last request
    # The ids of agents are unique only within their group, and only sub-agents send one.
    within_group: bool = False

    def headers(self) -> frozenset[str]:
        """Return the names of all headers of this family."""
        return frozenset((*self.session, *self.group, *self.parent, *self.final))


@dataclass(slots=True)
class Ids:
    """The ids found so far of the session, group and parent agent of one request. Lifetime:
    request.
    """

    session: str | None = None
    group: str | None = None
    parent: str | None = None
    cache_group: str | None = None
    user: str | None = None
    final: bool = False

    def add(self, session: str | None, group: str | None, parent: str | None) -> None:
        """Set those of the session, group and parent ids that are still None."""
        self.session = session if self.session is None else self.session
        self.group = group if self.group is None else self.group
        self.parent = parent if self.parent is None else self.parent

    def complete(self) -> bool:
        """Return True if session, group and parent are all known, so that no further source need be
        read.
        """
        return None not in (self.session, self.group, self.parent)


# Ids that other routers define, and that a client sends because its operator wants it to.
ROUTER_IDS = (
    Family(
        "dynamo",
        session=("x-dynamo-session-id",),
        parent=("x-dynamo-parent-session-id",),
        final=("x-dynamo-session-final",),
    ),
    Family("smg", session=("x-smg-routing-key",)),
    Family("litellm", session=("x-litellm-session-id",)),
)

# Headers that clients send without being configured. Of one request the router reads only the first
# family that has a header there: headers of two clients come from a proxy and do not fit together.
CLIENTS = (
    Family(
        "claude-code",
        session=("x-claude-code-agent-id",),
        group=("x-claude-code-session-id",),
        parent=("x-claude-code-parent-agent-id",),
        within_group=True,
    ),
    Family(
        "codex",
        session=("thread-id", "thread_id"),
        group=("session-id", "session_id"),
        parent=("x-codex-parent-thread-id",),
    ),
    Family(
        "opencode",
        session=("x-session-affinity", "x-opencode-session", "x-session-id"),
        parent=("x-parent-session-id",),
    ),
    Family(
        "kilo",
        session=("x-kilo-session", "x-kilocode-taskid"),
        parent=("x-parent-session-id",),
    ),
    Family("roo", session=("x-roo-task-id",), group=("x-roo-root-task-id",)),
    Family("copilot", session=("x-client-session-id",)),
    Family("amp", session=("x-amp-thread-id",)),
    Family("mistral-vibe", session=("x-affinity",)),
    Family("grok", session=("x-grok-conv-id",)),
    Family("open-webui", session=("x-openwebui-chat-id",)),
    Family("coder", session=("x-coder-chat-id",)),
)


def read_headers(family: Family, headers: Mapping[str, str]) -> Ids | None:
    """Return the ids that the headers of a family name, or None if they name no session.

    headers: values by names in small letters.
    """
    session = _first(family.session, headers)
    group = _first(family.group, headers)
    if session is None and group is None:
        return None
    parent = _first(family.parent, headers)
    if family.within_group and group is not None:
        if session is not None:
            session = within(group, session)
            parent = group if parent is None else within(group, parent)
        else:
            parent = None
    session = group if session is None else session
    found = Ids(session, group or parent or session, parent)
    for name in family.final:
        found.final = found.final or headers.get(name, "").lower() in ("true", "1")
    return found


def _first(names: tuple[str, ...], headers: Mapping[str, str]) -> str | None:
    for name in names:
        if (found := id_in(headers.get(name))) is not None:
            return found
    return None


_FAMILY = re.compile(r"([a-z0-9-]{1,40}):(.+)")
_PART = re.compile(r"(session|group|parent|final)=([a-z0-9_-]{1,100})")


def families_of(lines: Iterable[str]) -> tuple[Family, ...]:
    """Return the families that an operator configures, each as NAME:session=HEADER,group=HEADER,...

    The parts are `session`, `group`, `parent` and `final`; `session` or `group` must be present.
    Raises ValueError for another form.
    """
    found: dict[str, Family] = {}
    for line in lines:
        match = _FAMILY.fullmatch(line)
        parts = match and [_PART.fullmatch(part) for part in match[2].split(",")]
        if not match or not parts or not all(parts):
            raise ValueError(
                f"{line[:200]!r} is not NAME:session=HEADER,group=HEADER,parent=HEADER,"
                "final=HEADER, names in small letters, as in my-agent:session=x-my-thread"
            )
        headers: dict[str, tuple[str, ...]] = {}
        for part in parts:
            assert part is not None
            headers[part[1]] = (*headers.get(part[1], ()), part[2])
        if not headers.keys() & {"session", "group"}:
            raise ValueError(f"{line[:200]!r} names no header of a session or a group")
        if match[1] in found:
            raise ValueError(f"the client {match[1]!r} is given twice")
        found[match[1]] = Family(match[1], **headers)  # type: ignore[arg-type]
    return tuple(found.values())
