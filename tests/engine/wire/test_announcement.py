"""Tests of the workers' entries in a registry, written and read, and of `--announce` itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import main
from engine.server.announcer import Announce, parse_announce
from engine.wire.announcement import (
    MAX_BYTES,
    Announcement,
    check_fleet,
    decode_announcement,
    encode_announcement,
    entry_key,
    names_key,
)
from engine.wire.events import WireError

_VALUES = st.text(max_size=20) | st.integers(-(2**53), 2**53) | st.booleans()


@given(
    st.builds(
        Announcement,
        url=st.text(min_size=1, max_size=40),
        state=st.sampled_from(["ready", "stopping"]),
        models=st.lists(st.text(max_size=10), max_size=3).map(tuple),
        kv_tokens=st.none() | st.integers(1, 2**50),
        block_size=st.none() | st.integers(1, 4096),
        options=st.dictionaries(st.text(max_size=10), _VALUES, max_size=4),
    )
)
def test_written_announcements_are_read_back(one: Announcement) -> None:
    assert decode_announcement(encode_announcement(one)) == one


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_announcement(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the entry is none"),
        (b"{}", "the entry is none"),
        (b'{"v":2,"url":"http://a"}', "version is 2; known: 1"),
        (b'{"v":1,"url":""}', "url has 0 bytes; allowed: 1..2048"),
        (b'{"v":1,"url":"%s"}' % (b"x" * 2049), "url has 2049 bytes"),
        (b'{"v":1,"url":"a","state":"asleep"}', "the entry is none"),
        (b'{"v":1,"url":"a","kv_tokens":0}', "kv_tokens is 0; allowed: 1 or more"),
        (b'{"v":1,"url":"a","options":{"weight":[1]}}', "the entry is none"),
        (b'{"v":1,"url":"a","options":{%s}}' % b",".join(b'"%d":1' % n for n in range(33)), "32"),
        (b" " * (MAX_BYTES + 1), "larger than 8192 bytes"),
        (b'{"v":1,"url":' + b"[" * 8_000, "the entry is none"),
    ],
)
def test_the_error_explains_a_bad_entry(data: bytes, says: str) -> None:
    with pytest.raises(WireError) as refused:
        decode_announcement(data)
    assert says in str(refused.value)


def test_fields_of_later_versions_are_ignored() -> None:
    assert decode_announcement(b'{"v":1,"url":"a","gpu":"x"}') == Announcement("a")


def test_invalid_announcements_are_not_written() -> None:
    for bad in Announcement(""), Announcement("a", kv_tokens=0), Announcement("a" * 3_000):
        with pytest.raises(WireError):
            encode_announcement(bad)


def test_keys_of_a_fleet_are_in_one_redis_slot() -> None:
    assert names_key("a") == "warmroute:{a}:workers"
    assert entry_key("a", "http://h:1") == "warmroute:{a}:worker:http://h:1"
    for bad in "", "a b", "-a", "a" * 65, "a}":
        with pytest.raises(WireError):
            check_fleet(bad)


def test_the_announce_flag_is_parsed() -> None:
    assert parse_announce("redis://h:1/2", "127.0.0.1") == Announce("redis://h:1/2")
    text = "rediss://u:p%2C@h,url=http://10.0.0.1:8000,fleet=b,lease=9"
    one = parse_announce(text, "0.0.0.0")
    assert one == Announce("rediss://u:p%2C@h", "http://10.0.0.1:8000", "b", 9.0)
    assert "p%2C" not in repr(one)


@pytest.mark.parametrize(
    ("text", "host", "says"),
    [
        ("http://h", "127.0.0.1", "must begin with redis://HOST"),
        ("redis://", "127.0.0.1", "must begin with redis://HOST"),
        ("redis://:secret@h,word", "127.0.0.1", "option 1 must be one of url, fleet, lease"),
        ("redis://:se,cret@h", "127.0.0.1", "a comma in a password is written %2C"),
        ("redis://h,lease=1,lease=2", "127.0.0.1", "option 2 must be one of"),
        ("redis://h,lease=0.1", "127.0.0.1", "lease must be 1..600 seconds"),
        ("redis://h,lease=soon", "127.0.0.1", "lease must be 1..600 seconds"),
        ("redis://h,fleet=a b", "127.0.0.1", "fleet is 'a b'"),
        ("redis://h,url=h:1", "127.0.0.1", "url must be http(s)://host"),
        ("redis://h,url=http://u:secret@h", "127.0.0.1", "without a user"),
        ("redis://h", "0.0.0.0", "other hosts cannot reach 0.0.0.0; add ,url=http://ADDRESS:PORT"),
        ("redis://h", "::", "other hosts cannot reach ::"),
    ],
)
def test_the_error_explains_a_bad_announce_flag(text, host, says) -> None:
    with pytest.raises(ValueError) as refused:
        parse_announce(text, host)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_bad_announce_flag_gives_a_one_line_error(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--timed", "llama-3.1-8b-h100", "--announce", "nowhere"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--announce must begin with redis://HOST" in line
