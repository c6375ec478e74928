"""Tests of the identity of a request's sender, by headers and body of agents' clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkernels import plain_head
from policies.facts import UNIDENTIFIED, Identity, user_id_of
from router.body.scan import AGENT_FIELDS
from router.http.errors import ClientError
from router.http.parser import Fields
from router.identity.families import CLIENTS, ROUTER_IDS, families_of
from router.identity.identity import ClientIdentity, IdentityReader
from router.identity.ids import MAX_ID_CHARS

READER = IdentityReader("x-session-id")
S, T = "0198b2c4-7c1e-7000-8000-0123456789ab", "0198b2c4-7c1e-7000-8000-ffffffffffff"


def head(headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
    return b"POST /v1/messages HTTP/1.1\r\nHost: a\r\n" + b"".join(lines) + b"\r\n"


def read_sender(
    headers: Mapping[str, str] | None = None, reader: IdentityReader = READER, **fields: Any
) -> ClientIdentity:
    """Return what the reader finds about a request's sender; both parsers of heads must agree."""
    text = head(headers or {})
    session_id = fields.pop("session_id", None)
    body = {
        name: value if name in ("user", "prompt_cache_key") else json.dumps(value).encode()
        for name, value in fields.items()
    }
    found = reader.read(Fields(text), session_id, body or None)
    if (plain := plain_head(text)) is not None:
        assert reader.read(plain[0], session_id, body or None) == found
    return found


def test_a_request_without_any_id_is_unidentified() -> None:
    assert read_sender({"content-type": "application/json", "x-other": "1"}) == ClientIdentity(None)
    assert read_sender().identity is UNIDENTIFIED


def test_the_operators_session_header_overrides_session_id() -> None:
    assert read_sender({"X-Session-Id": "ann"}) == ClientIdentity("ann")
    assert read_sender(session_id="ben") == ClientIdentity("ben")
    assert read_sender({"X-Session-Id": "ann"}, session_id="ben") == ClientIdentity("ann")


@pytest.mark.parametrize(
    ("headers", "session", "group", "parent"),
    [
        ({"x-claude-code-session-id": S}, S, S, None),
        ({"x-claude-code-session-id": S, "x-claude-code-agent-id": "a1"}, f"{S}/a1", S, S),
        (
            {
                "x-claude-code-session-id": S,
                "x-claude-code-agent-id": "a2",
                "x-claude-code-parent-agent-id": "a1",
            },
            *(f"{S}/a2", S, f"{S}/a1"),
        ),
        ({"session-id": S, "thread-id": S}, S, S, None),
        ({"session_id": S}, S, S, None),
        ({"session-id": S, "thread-id": T, "x-codex-parent-thread-id": S}, T, S, S),
        ({"x-session-affinity": "ses_1", "X-Session-Id": "ses_1"}, "ses_1", "ses_1", None),
        (
            {"X-Session-Id": "ses_2", "x-parent-session-id": "ses_1"},
            *("ses_2", "ses_1", "ses_1"),
        ),
        ({"x-dynamo-session-id": "d2", "x-dynamo-parent-session-id": "d1"}, "d2", "d1", "d1"),
        ({"x-smg-routing-key": "k"}, "k", "k", None),
        ({"x-litellm-session-id": "cline-5"}, "cline-5", "cline-5", None),
        ({"x-roo-task-id": "t2", "x-roo-root-task-id": "t1"}, "t2", "t1", None),
        # The operator's header names the session; a client's headers tell the rest.
        (
            {"x-session-id": "op", "x-claude-code-session-id": S, "x-claude-code-agent-id": "a"},
            *("op", S, S),
        ),
        # One client's headers are not mixed with another's.
        (
            {"x-claude-code-session-id": S, "thread-id": T, "x-codex-parent-thread-id": "p"},
            *(S, S, None),
        ),
    ],
)
def test_sessions_and_groups_are_read_from_client_headers(
    headers: dict[str, str], session: str | None, group: str | None, parent: str | None
) -> None:
    found = read_sender(headers)
    assert found.session == session
    assert found.identity == Identity(group=group, parent=parent)


@pytest.mark.parametrize(
    ("fields", "session", "identity"),
    [
        ({"prompt_cache_key": "k"}, None, Identity(cache_group="k")),
        ({"user": "u"}, None, Identity(user="u")),
        ({"safety_identifier": "h"}, None, Identity(user="h")),
        ({"metadata": {"user_id": "u"}}, None, Identity(user="u")),
        (
            {"metadata": {"user_id": f"user_ab12_account_{T}_session_{S}"}},
            *(S, Identity(group=S, user="user_ab12")),
        ),
        (
            {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": S})}},
            *(S, Identity(group=S, user="d")),
        ),
        (
            {
                "metadata": {
                    "user_id": json.dumps(
                        {"account_uuid": "a", "session_id": T, "parent_session_id": S}
                    )
                }
            },
            *(T, Identity(group=S, parent=S, user="a")),
        ),
        ({"litellm_session_id": "cline-5"}, "cline-5", UNIDENTIFIED),
        ({"metadata": {"session_id": "m"}}, "m", UNIDENTIFIED),
        ({"conversation": "c"}, "c", UNIDENTIFIED),
        ({"conversation": {"id": "c"}}, "c", UNIDENTIFIED),
        (
            {"vllm_xargs": {"agentic_context": {"session_id": S, "agent_id": "a"}}},
            *(f"{S}/a", Identity(group=S)),
        ),
        (
            {
                "agentic_context": {
                    "program_id": "p2",
                    "parent_program_id": "p1",
                    "root_program_id": "p0",
                }
            },
            *("p2", Identity(group="p0", parent="p1")),
        ),
        (
            {"session_id": "s", "prompt_cache_key": "k", "user": "u"},
            *("s", Identity(cache_group="k", user="u")),
        ),
    ],
)
def test_sessions_and_identities_are_read_from_bodies(
    fields: dict[str, Any], session: str | None, identity: Identity
) -> None:
    found = read_sender(**fields)
    assert (found.session, found.identity) == (session, identity)


def test_headers_take_precedence_over_the_body() -> None:
    found = read_sender(
        {"x-claude-code-session-id": S, "x-claude-code-agent-id": "a"},
        metadata={"user_id": json.dumps({"session_id": T, "device_id": "d"})},
        prompt_cache_key="k",
    )
    assert found.session == f"{S}/a"
    assert found.identity == Identity(group=S, parent=S, cache_group="k", user="d")


def test_a_header_marks_the_last_request_of_a_session() -> None:
    headers = {"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"}
    assert read_sender(headers).identity == Identity(group="d", final=True)
    assert not read_sender(headers | {"x-dynamo-session-final": "false"}).identity.final


def test_sub_agents_belong_to_the_same_conversation_as_their_parent() -> None:
    main = read_sender({"x-claude-code-session-id": S})
    child = read_sender({"x-claude-code-session-id": S, "x-claude-code-agent-id": "a"})
    assert main.user_id == child.user_id == S
    assert read_sender(prompt_cache_key="k", user="u").user_id == "k"
    assert read_sender(user="everybody").user_id is None
    assert user_id_of("s", UNIDENTIFIED) == "s"


@pytest.mark.parametrize("bad", ["", "x" * (MAX_ID_CHARS + 1), "a\tb", "\udcff", "\u0007"])
def test_invalid_ids_are_ignored(bad: str) -> None:
    found = READER.read(Names({"x-claude-code-session-id": bad}), None, {"user": bad})
    assert found == ClientIdentity(None)


class Names:
    """Headers as a dictionary, which can hold values that no real request head can."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def among(self, names: frozenset[str]) -> dict[str, str] | None:
        return {name: value for name, value in self._values.items() if name in names} or None


@pytest.mark.parametrize(
    "value",
    [5, [1], "text", True, None, {"user_id": 5}, {"user_id": {"session_id": [S]}}, {"id": {}},
     {"agent_hints": "x"}, {"agentic_context": [{}]}, {"priority": "high"}],
)  # fmt: skip
@pytest.mark.parametrize("name", AGENT_FIELDS)
def test_fields_of_wrong_types_are_ignored(name: str, value: Any) -> None:
    found = read_sender(**{name: value})
    assert found.session in (None, "text")
    assert found.hints == (None, None) or found.hints.priority in (-1, 1)


def test_a_too_long_field_is_ignored() -> None:
    assert read_sender(metadata={"session_id": "s", "more": "x" * 16_384}) == ClientIdentity(None)


def test_only_the_operators_ids_are_read_if_client_ids_are_off() -> None:
    reader = IdentityReader("x-session-id", (), clients=False)
    assert read_sender({"x-claude-code-session-id": S}, reader) == ClientIdentity(None)
    assert read_sender({"x-session-id": "a"}, reader) == ClientIdentity("a")
    found = read_sender(None, reader, metadata={"session_id": "m"}, user="u", nvext={"priority": 1})
    assert found == ClientIdentity(None, Identity(user="u"))


def test_an_operator_can_add_a_family_of_headers() -> None:
    added = families_of(("mine:session=x-thread,group=x-person,parent=x-from,final=x-last",))
    reader = IdentityReader("x-session-id", added)
    headers = {"X-Thread": "t", "x-person": "p", "x-from": "f", "x-last": "1", "thread-id": "no"}
    found = read_sender(headers, reader)
    assert (found.session, found.identity) == ("t", Identity("p", "f", final=True))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mine", "is not NAME:session=HEADER"),
        ("mine:", "is not NAME:session=HEADER"),
        ("mine:thread=x-a", "is not NAME:session=HEADER"),
        ("mine:session=X A", "is not NAME:session=HEADER"),
        ("mine:parent=x-a", "names no header of a session or a group"),
    ],
)
def test_invalid_header_families_are_refused(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        families_of((line,))
    with pytest.raises(ValueError, match="given twice"):
        families_of(("a:session=x-a", "a:session=x-b"))


KNOWN = sorted({name for family in (*ROUTER_IDS, *CLIENTS) for name in family.headers()})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["user_id", "session_id", "agent_hints", "priority", "osl", "id", "program_id",
             "agentic_context", "agent_id", "parent_session_id"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(KNOWN), st.text(max_size=300), max_size=5),
    st.dictionaries(
        st.sampled_from(AGENT_FIELDS), st.binary(max_size=30) | JSON.map(
            lambda value: json.dumps(value).encode()
        ), max_size=4
    ),
)  # fmt: skip
def test_ids_stay_within_bounds_for_any_headers_and_fields(
    headers: dict[str, str], fields: dict[str, bytes]
) -> None:
    found = READER.read(Names(headers), None, fields)
    identity = found.identity
    ids = (identity.group, identity.parent, identity.cache_group, identity.user, found.session)
    for one in ids:
        if one is not None and one != headers.get("x-session-id"):
            assert 0 < len(one) <= 2 * MAX_ID_CHARS + 1
            assert one.isprintable()
    assert all(n is None or abs(n) < 2**31 for n in found.hints)


def test_ids_shared_between_routers_are_keyed_digests() -> None:
    plain = {"x-claude-code-session-id": S, "x-claude-code-agent-id": "a", "x-session-id": "ann"}
    readers = [
        IdentityReader("x-session-id", shared_secret=secret) for secret in ("one", "one", "two")
    ]
    one, same, other = (read_sender(plain, reader, prompt_cache_key="k") for reader in readers)
    assert one == same
    assert one.session != other.session
    ids = [one.session, one.identity.group, one.identity.parent, one.identity.cache_group]
    assert all(text is not None and len(text) == 32 for text in ids)
    assert not {S, "ann", "k", f"{S}/a"} & {*ids}
    main = read_sender({"x-claude-code-session-id": S}, readers[0])
    child = read_sender({"x-claude-code-session-id": S, "x-claude-code-agent-id": "a"}, readers[0])
    assert child.identity.parent == child.identity.group == main.session
    assert read_sender(None, readers[0]) == ClientIdentity(None)


@pytest.mark.parametrize("secret", [None, "one"])
def test_a_too_long_session_header_is_refused(secret: str | None) -> None:
    reader = IdentityReader("x-session-id", shared_secret=secret)
    with pytest.raises(ClientError, match="x-session-id is too long"):
        read_sender({"x-session-id": "x" * 1_025}, reader)
    assert read_sender({"x-session-id": "x" * 1_024}, reader).session is not None
