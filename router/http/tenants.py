"""Who a client is: by API key where keys are configured, else everybody is one tenant."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path

from aiohttp import web

from router.http.errors import ClientError

Network = IPv4Network | IPv6Network

MAX_KEYS = 100_000


class KeyFileError(ValueError):
    """A line of the key file cannot be used; the text says which, never what it holds."""


def read_keys(path: Path) -> dict[str, str]:
    """API key -> tenant, from lines `key tenant`; `#` begins a comment. Raises KeyFileError."""
    keys: dict[str, str] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        # Without its cause, which carries the whole file.
        raise KeyFileError(f"{path}: byte {error.start} is not UTF-8") from None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise KeyFileError(f"{path}:{number}: expected a key and a tenant")
        if words[0] in keys:
            raise KeyFileError(f"{path}:{number}: the key occurs twice")
        keys[words[0]] = words[1]
    if len(keys) > MAX_KEYS:
        raise KeyFileError(f"{path}: more than {MAX_KEYS} keys")
    return keys


class Tenants:
    """Lifetime: process.

    Keys are kept and looked up as keyed digests, so neither memory nor the time of a look-up
    tells anything of them.
    """

    def __init__(
        self, keys: dict[str, str] | None, tenant_header: str, trusted_peers: tuple[Network, ...]
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenant_of_digest: dict[bytes, str] | None = None
        if keys is not None:
            self._tenant_of_digest = {self._digest(key): tenant for key, tenant in keys.items()}
        self._tenant_header = tenant_header
        self._trusted_peers = trusted_peers

    @property
    def asks_keys(self) -> bool:
        """Whether clients' keys are ours to check, and so none of the workers' business."""
        return self._tenant_of_digest is not None

    def tenant_of(self, request: web.Request) -> str | None:
        """The client's tenant; None without keys. Raises ClientError(401)."""
        if self._trusted_peers and self._trusts(request.remote):
            named = request.headers.get(self._tenant_header)
            if named:
                return named
        if self._tenant_of_digest is None:
            return None
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        tenant = self._tenant_of_digest.get(self._digest(key.strip()))
        if scheme.lower() != "bearer" or tenant is None:
            raise ClientError(401, "the API key is missing or wrong", code="invalid_api_key")
        return tenant

    def _trusts(self, remote: str | None) -> bool:
        if remote is None:
            return False
        address = ip_address(remote.partition("%")[0])
        # A socket that listens on "::" shows IPv4 peers in this form.
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._trusted_peers)

    def _digest(self, key: str) -> bytes:
        return hmac.new(self._secret, key.encode("utf-8", "surrogateescape"), sha256).digest()
