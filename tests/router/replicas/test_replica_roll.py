"""Tests of replica membership: which peers are present, whatever happens to heartbeats, registry
reads and clocks; and which settings must agree.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions as redis

from router.redis.connection import reason_of
from router.replicas.membership import (
    MOST_PEERS,
    VERSION,
    Disagreements,
    Entry,
    Keys,
    Membership,
    differences,
    entry_text,
    name_of,
    new_identity,
    read_entries,
    read_entry,
    read_identity,
    refusal,
    terms_of,
)
from router.request.quotas import TenantRules
from router.settings.schema import Config
from router.settings.terms import replica_terms

LEASE_S = 3.0
ME = "me@0000000000000000"
TERMS = {VERSION: "1"}


def peer_name(number: int) -> str:
    return f"r@{number:016x}"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0.0, 1.0)), max_size=60))
def test_a_peer_is_present_while_it_sends_heartbeats(steps):
    """A peer counts as present while it renews its entry, and as gone after its lease. The test
    adds up the time of the readings of the registry since the entry last changed.
    """
    membership = Membership(ME, LEASE_S)
    registry = {ME: Entry(1, TERMS)}
    quiet_s: dict[str, float] = {}
    beats = [0] * 4
    for who, beating, elapsed_s in steps:
        name = peer_name(who)
        if beating:
            beats[who] += 1
            registry[name] = Entry(beats[who], TERMS)
        membership.look(registry, elapsed_s)
        for known in registry.keys() - {ME}:
            if known == name and beating:
                quiet_s[known] = 0.0
            else:
                quiet_s[known] += elapsed_s
        here = {known for known, quiet in quiet_s.items() if quiet < LEASE_S}
        assert membership.present("1") == here


def test_entries_of_dead_replicas_are_no_peers_and_are_removed():
    membership = Membership(ME, LEASE_S)
    registry = {peer_name(1): Entry(7, TERMS)}
    for _ in range(7):  # the first one finds it
        membership.look(registry, 0.5)
    assert membership.lapsed == [peer_name(1)]
    for _ in range(20):
        membership.look(registry, 0.5)
        assert not membership.present("1")
    membership.look({peer_name(1): Entry(8, TERMS)}, 0.5)
    assert (membership.present("1"), membership.returned) == ({peer_name(1)}, 1)


def test_a_peer_that_left_does_not_return_by_an_older_registry_read():
    membership = Membership(ME, LEASE_S)
    registry = {peer_name(1): Entry(7, TERMS)}
    membership.look(registry, 0.5)
    membership.left(peer_name(1))
    membership.look(registry, 0.5)
    assert not membership.present("1")
    assert membership.lapsed == []


def test_messages_count_as_heartbeats():
    membership = Membership(ME, LEASE_S)
    for _ in range(20):
        membership.look({peer_name(1): Entry(7, TERMS)}, 1.0)
        membership.on_message(peer_name(1))
    assert membership.present("1") == {peer_name(1)}


def test_a_peer_of_another_version_is_known_but_not_present():
    membership = Membership(ME, LEASE_S)
    membership.look({peer_name(1): Entry(7, {VERSION: "2"}), peer_name(2): Entry(7, {})}, 0.5)
    assert len(membership.peers) == 2
    assert not membership.present("1")


def test_the_number_of_peers_is_bounded(caplog):
    membership = Membership(ME, LEASE_S)
    membership.look({peer_name(n): Entry(1, TERMS) for n in range(MOST_PEERS + 3)}, 0.5)
    assert (len(membership.peers), membership.crowded_out) == (MOST_PEERS, 3)
    assert caplog.text.count("is ignored") == 2


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_any_registry_contents_are_read_without_an_exception(texts):
    entries, malformed = read_entries(texts)
    assert len(entries) + malformed <= len(texts) // 2


@given(
    st.integers(0, (1 << 62) - 1),
    st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=5),
)
def test_entries_survive_a_round_trip_through_text(beat, terms):
    entry = Entry(beat, terms)
    assert read_entry(entry_text(entry)) == entry


@pytest.mark.parametrize(
    "text", [b"", b"[1,2]", b'{"beat":-1,"terms":{}}', b"{" * 20_000, b"\xff", b'{"beat":1e9}']
)
def test_malformed_entries_are_ignored(text):
    assert read_entry(text) is None


def test_identities_are_unique_and_malformed_ones_are_ignored():
    identity = new_identity("a.b-c")
    assert name_of(identity) == "a.b-c"
    assert read_identity(identity.encode()) == identity
    assert new_identity("a") != new_identity("a")
    assert read_identity(new_identity("").encode()) is not None
    for text in (b"", b"a", b"@0123456789abcdef", b"a@0123", b"a@0123456789ABCDEF", b"\xff" * 20):
        assert read_identity(text) is None
    assert Keys("f").stream("a@0") == "warmroute:{f}:stream:a@0"


def shared_settings(config: Config, speaks: int) -> dict[str, str]:
    return terms_of(replica_terms(config), speaks)


def test_differences_in_shared_settings_are_found(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("- alice salt=s1\n- bob\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    plain = Config()
    replace = msgspec.structs.replace
    ours = shared_settings(plain, 1)
    assert not list(differences(ours, shared_settings(replace(plain, port=1, seed=5), 1)))
    for field, value in (
        ("policy", "least_requests"),
        ("session_header", "x-s"),
        ("tenants", TenantRules(isolate=True)),
        ("chat_template_kwargs", '{"a":1}'),
        ("tokenizer", str(model)),
        ("api_keys_file", str(keys)),
    ):
        ((key, how),) = differences(ours, shared_settings(replace(plain, **{field: value}), 1))
        assert key.startswith(field)
        assert " here and " in how
    assert [key for key, _ in differences(ours, shared_settings(plain, 2))] == [VERSION]
    with_keys = replace(plain, api_keys_file=str(keys))
    first = shared_settings(with_keys, 1)
    assert "s1" not in str(first)
    keys.write_text("- bob\n- carol\n- alice salt=s1\n")
    assert shared_settings(with_keys, 1) == first, "keys may differ, salts may not"
    keys.write_text("- alice salt=s2\n")
    assert shared_settings(with_keys, 1) != first
    assert len(str(shared_settings(replace(plain, policy="x" * 10_000), 1))) < 1_000
    assert "replicas.fleet" in str(refusal("b@1", "x"))


def test_a_disagreement_is_logged_once(caplog):
    caplog.set_level("INFO")
    disagreements = Disagreements()
    for _ in range(3):
        disagreements.look({"a": "1"}, {"r": {"a": "2"}, "s": {"a": "1"}})
    assert list(disagreements.now) == ["r"]
    disagreements.look({"a": "1"}, {"r": {"a": "1"}})
    assert not disagreements.now
    assert [r.getMessage() for r in caplog.records] == [
        "replica r differs: a is '1' here and '2' there; give both the same",
        "replica r agrees again",
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "does not answer"),
        (redis.TimeoutError("Timeout connecting to server"), "does not answer"),
        (redis.AuthenticationError("invalid username-password pair"), "correct `state`"),
        (redis.AuthenticationError("Authentication required."), "asks for a password"),
        (redis.ReadOnlyError("You can't write"), "read-only"),
        (redis.MovedError("1 h:1"), "redis+cluster"),
        (redis.ConnectionError("Error 111 connecting to h:1. Connection refused."), "is refused"),
        (redis.ResponseError("unknown command 'XADD'"), "Redis 6.2"),
        (ValueError("redis://u:hush@h " + "x" * 999), "fails: ValueError: redis://***@h xxx"),
    ],
)
def test_failure_reasons_contain_no_secrets(error, words):
    reason = reason_of(error)
    assert words in reason
    assert "hush" not in reason
    assert len(reason) < 300
