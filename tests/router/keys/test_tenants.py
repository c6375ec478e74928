"""Tests of how a client is identified, by API keys, trusted peers and key files; and that a key is
never shown.
"""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from multidict import CIMultiDict

from router.http.errors import ClientError
from router.http.messages import Request
from router.http.parser import Fields, Head
from router.keys.key_file import KeyFileError, KeyTerms, hash_of, read_keys
from router.keys.key_ring import KeyRing
from router.request.quotas import Tenants, tenant_header
from router.upstream.client_reply import upstream_request

KEY = "sk-secret-of-blue"
HASHED = f"sha256:{hash_of(KEY).hex()}"
PEERS = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def ring_of(folder: Path, text: str) -> KeyRing:
    file = folder / "keys"
    file.write_text(text)
    return KeyRing(file, lambda: 0.0)


def terms(tenants: Tenants, headers: dict[str, str], remote: str | None = "192.0.2.1") -> KeyTerms:
    request = SimpleNamespace(headers=CIMultiDict(headers), peer=remote)
    return tenants.key_of(cast(Request, request)).terms


def test_without_keys_all_clients_are_one_tenant() -> None:
    tenants = Tenants(None, "x-tenant", ())
    assert terms(tenants, {}) == KeyTerms()
    assert terms(tenants, {"x-tenant": "blue", "Authorization": "Bearer x"}) == KeyTerms()


@pytest.mark.parametrize("first", [KEY, HASHED])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_key_identifies_its_tenant(scheme: str, first: str, tmp_path: Path) -> None:
    tenants = Tenants(ring_of(tmp_path, f"{first} blue weight=3"), "x-tenant", ())
    found = terms(tenants, {"Authorization": f"{scheme} {KEY}"})
    assert (found.tenant, found.name, found.weight) == ("blue", "blue", 3.0)


@pytest.mark.parametrize(
    "header",
    ["", KEY, "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY[:-1]}", "Bearer ü", HASHED,
     f"Bearer {HASHED}", "Bearer -"],
)  # fmt: skip
@pytest.mark.parametrize("first", [KEY, HASHED])
def test_a_missing_or_wrong_key_gets_401_and_is_not_in_the_error(
    header: str, first: str, tmp_path: Path
) -> None:
    tenants = Tenants(ring_of(tmp_path, f"{first} blue\n- green\n"), "x-tenant", ())
    with pytest.raises(ClientError) as refused:
        terms(tenants, {"Authorization": header} if header else {})
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert KEY[:8] not in refused.value.body().decode()


@pytest.mark.parametrize(
    ("remote", "trusted"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),  # the same peer at a socket that listens on "::"
        ("fd00::1%eth0", True),
        ("11.1.2.3", False),
        ("::ffff:11.1.2.3", False),
        ("fe80::1", False),
        (None, False),
    ],
)
def test_the_tenant_header_is_accepted_from_trusted_peers_only(remote, trusted, tmp_path) -> None:
    ring = ring_of(tmp_path, f"{KEY} blue\n- green weight=2\n")
    tenants = Tenants(ring, "x-tenant", PEERS)
    headers = {"x-tenant": "green"}
    if trusted:
        assert terms(tenants, headers, remote).weight == 2.0
        assert terms(tenants, {"x-tenant": "grey"}, remote) == KeyTerms(tenant="grey")
        assert terms(tenants, {"Authorization": f"Bearer {KEY}"}, remote).tenant == "blue"
        with pytest.raises(ClientError, match="too long"):
            terms(tenants, {"x-tenant": "g" * 2_000}, remote)
    else:
        with pytest.raises(ClientError):
            terms(tenants, headers, remote)


def test_the_key_ring_keeps_keys_only_hashed(tmp_path: Path) -> None:
    ring = ring_of(tmp_path, f"{KEY} blue")
    shown = repr([vars(ring), *vars(ring)["_keys"]])
    assert KEY not in shown
    assert repr(hash_of(KEY)) not in shown


def test_a_key_file_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"\n# all of them\n{KEY} blue # the first\n  other\tgreen\n"
        "- red models=a*,b priority=-1..4 weight=0.5 requests_per_s=2 requests_burst=7\n"
        f"sha256:{'0' * 64} red tokens_per_s=100 inflight=3 salt=s name=n\n"
    )
    first, other, red, last = read_keys(file)
    assert (first.hashed, first.terms, first.plain) == (hash_of(KEY), terms_of("blue"), True)
    assert other.terms == terms_of("green")
    assert red.hashed is None
    assert red.terms == terms_of(
        "red", models=("a*", "b"), priority=(-1, 4), weight=0.5, requests_per_s=2.0,
        requests_burst=7.0,
    )  # fmt: skip
    assert (last.hashed, last.plain) == (bytes(32), False)
    assert last.terms == KeyTerms(
        "red", "n", tokens_per_s=100.0, tokens_burst=100.0, inflight=3, salt="s"
    )


def terms_of(tenant: str, **fields: object) -> KeyTerms:
    return KeyTerms(tenant=tenant, name=tenant, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (KEY.encode(), ":1: expected"),
        (f"\n{KEY} a b".encode(), ":2: word 3: expected a key"),
        (f"\n{KEY} a {KEY}=1".encode(), ":2: word 3: expected a key"),
        (f"a {KEY} weigth=1".encode(), "weight="),
        (f"{KEY} a weight=0".encode(), ":1: weight= wants a number of 0.001..1000"),
        (f"{KEY} a weight=nan".encode(), ":1: weight= wants a number"),
        (f"{KEY} a weight=1 weight=1".encode(), ":1: weight= is given twice"),
        (f"{KEY} a salt={KEY}{'x' * 1024}".encode(), ":1: salt= has more than"),
        (f"{KEY} a models=a,,b".encode(), ":1: models= wants names"),
        (f"{KEY} a priority=3".encode(), ":1: priority= wants LEAST..GREATEST"),
        (f"{KEY} a priority=4..3".encode(), ":1: priority= wants"),
        (f"{KEY} a priority=0..2147483648".encode(), ":1: priority= wants"),
        (f"{KEY} a inflight=0".encode(), ":1: inflight= wants"),
        (f"{KEY} a inflight=1.5".encode(), ":1: inflight= wants"),
        (f"{KEY} a tokens_burst=5".encode(), ":1: tokens_burst= needs tokens_per_s="),
        (f"sha256:{KEY} a".encode(), ":1: sha256: wants 64 digits"),
        (f"{KEY} a\n{HASHED} b".encode(), ":2: the key occurs twice, first in line 1"),
        (f"{KEY} a\n{KEY} b".encode(), ":2: the key occurs twice"),
        (b"- a\n- a", ":2: the tenant has such a line, first in line 1"),
        (f"{KEY} a\n".encode() + b"\xff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_an_invalid_key_file_gives_an_error_with_its_line_and_no_key(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KeyFileError) as failed:
        read_keys(file)
    assert says in str(failed.value)
    error: BaseException | None = failed.value
    while error is not None:  # a logged traceback shows the causes too
        assert KEY not in f"{error!s} {error!r}"
        error = error.__cause__


@pytest.mark.parametrize(
    ("tenant", "said"),
    [
        (None, []),
        ("blue", [b"blue"]),
        ("blue sky", [b"blue sky"]),
        ("a\r\nx-evil: 1", ["hash"]),
        (" blue", ["hash"]),
        ("bl\x7fue", ["hash"]),
        ("gr\u00fcn", ["hash"]),
        ("\ud800", ["hash"]),
        ("", ["hash"]),
        ("b" * 1_024, [b"b" * 1_024]),
        ("b" * 1_025, ["hash"]),
    ],
)
def test_workers_get_the_verified_tenant_and_no_tenant_header_of_the_client(tenant, said) -> None:
    text = b"POST / HTTP/1.1\r\nX-Tenant: mallory\r\naccept: */*\r\nx-tenant: eve\r\n\r\n"
    http = Request(None, Head(b"", 0, "POST", "/", Fields(text), False), b"")
    after = () if tenant is None else (tenant_header("x-tenant", tenant),)
    told = upstream_request(http, b"", ((b"a", b"b"),), after, hidden=frozenset({b"x-tenant"}))
    assert tuple(told.headers) == ((b"accept", b"*/*"),)
    assert told.internal_headers[0] == (b"a", b"b")
    values = [value for name, value in told.internal_headers if name == b"x-tenant"]
    if said == ["hash"]:
        assert len(values) == 1
        assert values[0].startswith(b"sha256-")
        assert len(values[0]) == 71
        assert after == (tenant_header("x-tenant", tenant),)
    else:
        assert values == said
