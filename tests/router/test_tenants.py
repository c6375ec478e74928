"""Who a client is: keys, trusted peers, key files; and that no key is ever shown."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import cast
from unittest.mock import PropertyMock, patch

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from router.http.errors import ClientError
from router.http.tenants import KeyFileError, Tenants, read_keys

KEY = "sk-secret-of-blue"
PEERS = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def tenant(tenants: Tenants, headers: dict[str, str], remote: str | None = "192.0.2.1") -> object:
    request = make_mocked_request("POST", "/v1/completions", headers=headers)
    with patch.object(web.Request, "remote", PropertyMock(return_value=remote)):
        return tenants.tenant_of(cast(web.Request, request))


def test_without_keys_everybody_is_one_tenant() -> None:
    tenants = Tenants(None, "x-tenant", ())
    assert tenant(tenants, {}) is None
    assert tenant(tenants, {"x-tenant": "blue", "Authorization": "Bearer x"}) is None


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_key_names_its_tenant(scheme: str) -> None:
    tenants = Tenants({KEY: "blue"}, "x-tenant", ())
    assert tenant(tenants, {"Authorization": f"{scheme} {KEY}"}) == "blue"


@pytest.mark.parametrize(
    "header", ["", KEY, "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY[:-1]}", "Bearer ü"]
)
def test_a_missing_or_wrong_key_is_refused_and_not_repeated(header: str) -> None:
    tenants = Tenants({KEY: "blue"}, "x-tenant", ())
    with pytest.raises(ClientError) as refused:
        tenant(tenants, {"Authorization": header} if header else {})
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
def test_the_tenant_header_is_believed_from_trusted_peers_only(remote, trusted) -> None:
    tenants = Tenants({KEY: "blue"}, "x-tenant", PEERS)
    headers = {"x-tenant": "green"}
    if trusted:
        assert tenant(tenants, headers, remote) == "green"
        assert tenant(tenants, {"Authorization": f"Bearer {KEY}"}, remote) == "blue"
    else:
        with pytest.raises(ClientError):
            tenant(tenants, headers, remote)


def test_keys_are_not_kept_readable() -> None:
    tenants = Tenants({KEY: "blue"}, "x-tenant", ())
    assert KEY not in repr(vars(tenants))


def test_a_key_file_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n# all of them\n{KEY} blue # the first\n  other\tgreen\n")
    assert read_keys(file) == {KEY: "blue", "other": "green"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (KEY.encode(), ":1: expected"),
        (f"\n{KEY} a b".encode(), ":2: expected"),
        (f"{KEY} a\n{KEY} b".encode(), ":2: the key occurs twice"),
        (f"{KEY} a\n".encode() + b"\xff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_key_file_that_cannot_be_used_says_where_and_shows_no_key(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KeyFileError, match=says) as failed:
        read_keys(file)
    error: BaseException | None = failed.value
    while error is not None:  # a logged traceback shows the causes too
        assert KEY not in f"{error!s} {error!r}"
        error = error.__cause__
