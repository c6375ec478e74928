"""Tests of requests that real clients of agents sent: each agent's conversation is a session of its
own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import pytest

from policies.facts import Arrival, user_id_of
from router.body.paths import PATHS
from router.body.scan import ScanLimits
from router.core.sessions.sessions import Sessions, TrackedRequest
from router.http.parser import Fields
from router.identity.identity import ClientIdentity, IdentityReader
from tests.router.core.sessions.session_history import SLOTS, columns
from tests.router.request.prompt_support import reader_of

FOLDER = Path(__file__).parents[1] / "request" / "agent_clients"
BLOCK = 4  # tokens: the texts are short
READER = IdentityReader("x-session-id")
# The recording has short texts in the place of real ones, which are longer than the end of a prompt
# that the router leaves out of comparisons.
_TEXT = re.compile(r'"((?:[a-z]+ text|result|argument) [0-9]+)"')


@dataclass(frozen=True)
class Recorded:
    """One recorded request, who really sent it, and what the router reads."""

    entry: dict[str, Any]
    said: ClientIdentity
    arrival: Arrival

    @property
    def agent(self) -> tuple[int, str]:
        """Return the agent that sent the request, as (session, agent)."""
        return self.entry["session"], self.entry["agent"]

    @property
    def parent(self) -> tuple[int, str] | None:
        """Return the agent that started the sender, or None."""
        parent = self.entry["parent"]
        return None if parent is None else (self.entry["session"], parent)


async def read(entry: dict[str, Any], number: int) -> Recorded:
    lines = "".join(f"{name}: {value}\r\n" for name, value in entry["headers"])
    headers = Fields(f"POST / HTTP/1.1\r\n{lines}\r\n".encode())
    path = PATHS[entry["path"].partition("?")[0]]
    body = json.dumps(entry["body"])
    body = _TEXT.sub(lambda text: json.dumps(f"{text[1]} " * 20), body)
    with ThreadPoolExecutor(1) as executor:
        reader = reader_of(None, executor)
        scanned = await reader.scan(body.encode(), path, ScanLimits())
        said = READER.read(headers, scanned.session, scanned.agent_fields)
        prompt = await reader.read(scanned, "m", (BLOCK,))
    arrival = Arrival(
        now_s=float(number),
        request_id=number,
        model="m",
        prompt_tokens=prompt.tokens,
        chains=prompt.chains,
        session=said.session,
        identity=said.identity,
    )
    return Recorded(entry, said, arrival)


def recordings() -> Iterator[Any]:
    for file in sorted(FOLDER.glob("*.json")):
        entries = [e for e in json.loads(file.read_text()) if e["role"] != "probe"]
        for (version, setup), of in groupby(entries, lambda e: (e["version"], e["setup"])):
            yield pytest.param(list(of), id=f"{file.stem} {version} {setup}")


def attribution(entry: dict[str, Any]) -> str:
    """Return the attribution line of Claude Code at the beginning of a prompt, which older versions
    change with each request.
    """
    system = entry["body"].get("system")
    return str(system[0]["text"]) if isinstance(system, list) else ""


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("entries", [*recordings()])
async def test_each_agent_gets_one_session(entries: list[dict[str, Any]], at_once: bool) -> None:
    """Each agent's requests form one session; with `at_once`, each request is under way until the
    next one of its agent comes.
    """
    sessions = Sessions(columns(), SLOTS, 256, 65_536)
    under_way: dict[tuple[int, str], TrackedRequest] = {}
    rows: dict[tuple[int, str], set[int]] = {}
    for number, entry in enumerate(entries):
        one = await read(entry, number)
        if one.agent in under_way:
            sessions.ended(under_way.pop(one.agent), 5, float(number))
        tracked = sessions.arrived(one.arrival, one.arrival.chains[BLOCK], BLOCK)
        sessions.dispatched(tracked, 0)
        if entry["role"] != "side":  # a title's request is one of its own, or what came before
            # A prompt that begins with another line does not continue an earlier one.
            line = attribution(entry) if entry["version"] < "2.1.3" else ""
            rows.setdefault((*one.agent, line), set()).add(tracked.row)
        under_way[one.agent] = tracked
        if not at_once:
            sessions.ended(under_way.pop(one.agent), 5, float(number))
    assert all(len(found) == 1 for found in rows.values()), rows
    agents = {agent[:2]: set[int]() for agent in rows}
    for agent, found in rows.items():
        agents[agent[:2]] |= found
    for one, other in combinations(agents, 2):
        assert not agents[one] & agents[other], (one, other)


@pytest.mark.parametrize("entries", [*recordings()])
async def test_agents_of_one_user_form_a_group_with_parents(entries: list[dict[str, Any]]) -> None:
    """The agents of one user form a group with known parents. The client pi starts each sub-agent
    as a program of its own, which says nothing of the others.
    """
    read_ = [await read(entry, number) for number, entry in enumerate(entries)]
    if entries[0]["client"] == "pi":
        assert all(one.said.identity.parent is None for one in read_)
        return
    names = {one.agent: one.said.session for one in read_ if one.entry["role"] != "side"}
    groups: dict[int, set[str | None]] = {}
    for one in read_:
        groups.setdefault(one.entry["session"], set()).add(
            user_id_of(one.said.session, one.said.identity)
        )
        if one.parent in names:
            assert one.said.identity.parent == names[one.parent]
        elif one.parent is None:
            assert one.said.identity.parent is None
    assert all(len(found) == 1 and None not in found for found in groups.values()), groups
    assert len({next(iter(found)) for found in groups.values()}) == len(groups)
