"""Who a client is: by API key where keys are configured, else everybody is one tenant."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_address

from router.http.client_request import ClientRequest
from router.http.errors import ClientError
from router.http.relay.reply import UpstreamRequest
from router.keys.ring import Key, KeyRing
from router.keys.terms import KeyTerms

Network = IPv4Network | IPv6Network

ANTHROPIC_HEADER = "x-api-key"  # where Anthropic's clients put a key

_MAX_NAME_CHARS = 1_024  # of a tenant, which is kept in memory
_PLAIN = re.compile(r"[!-~](?:[ -~]*[!-~])?")  # what a field's value says to every reader


class Tenants:
    """Lifetime: process."""

    def __init__(
        self, keys: KeyRing | None, tenant_header: str, trusted_peers: tuple[Network, ...]
    ) -> None:
        self._keys = keys
        self._tenant_header = tenant_header
        self._trusted_peers = trusted_peers
        self._anybody = Key(KeyTerms(), None)

    @property
    def asks_keys(self) -> bool:
        """Whether clients' keys are ours to check, and so none of the workers' business."""
        return self._keys is not None

    def key_of(self, request: ClientRequest) -> Key:
        """The client's key, or what stands for it. Raises ClientError(401)."""
        if self._trusted_peers and self._trusts(request.remote):
            named = request.headers.get(self._tenant_header)
            if named:
                return self._named(named)
        if self._keys is None:
            return self._anybody
        presented = request.headers.get(ANTHROPIC_HEADER)
        if presented is None or request.headers.get("Authorization") is not None:
            return bearer_key(request, self._keys)
        return _checked(self._keys.of_key(presented.strip()))

    def _named(self, tenant: str) -> Key:
        if len(tenant) > _MAX_NAME_CHARS:
            raise ClientError(
                400, f"{self._tenant_header} is too long", self._tenant_header, "string_too_long"
            )
        known = None if self._keys is None else self._keys.of_tenant(tenant)
        return Key(KeyTerms(tenant=tenant), None) if known is None else known

    def _trusts(self, remote: str | None) -> bool:
        if remote is None:
            return False
        address = ip_address(remote.partition("%")[0])
        # A socket that listens on "::" shows IPv4 peers in this form.
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._trusted_peers)


def told_on(request: UpstreamRequest, header: str, tenant: str | None) -> UpstreamRequest:
    """The request with `tenant`, as it is known here, in `header`: a worker counts shares by it.

    What the client says there goes: who is not a trusted peer could name anybody. A name that
    cannot stand in a field as it is stands there as its SHA-256, the same every time.
    """
    name = header.encode()
    if any(field.lower() == name for field, _ in request.headers):
        kept = tuple(field for field in request.headers if field[0].lower() != name)
        request = replace(request, headers=kept)
    if tenant is None:
        return request
    if _PLAIN.fullmatch(tenant) and len(tenant) <= _MAX_NAME_CHARS:
        said = tenant.encode()
    else:
        said = b"sha256-" + hashlib.sha256(tenant.encode(errors="replace")).hexdigest().encode()
    return replace(request, internal_headers=(*request.internal_headers, (name, said)))


def bearer_key(request: ClientRequest, keys: KeyRing) -> Key:
    """The key in `Authorization: Bearer KEY`. Raises ClientError(401), which shows none of it."""
    scheme, _, presented = (request.headers.get("Authorization") or "").partition(" ")
    return _checked(keys.of_key(presented.strip()) if scheme.lower() == "bearer" else None)


def _checked(key: Key | None) -> Key:
    if key is None:
        raise ClientError(
            401,
            "the API key is missing or wrong",
            code="invalid_api_key",
            headers=(("WWW-Authenticate", "Bearer"),),
        )
    return key
