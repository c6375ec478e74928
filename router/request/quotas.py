"""Finds each client's API key, and applies what the key allows at each step of a request."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from router.http.addresses import Network, trusts
from router.http.errors import ClientError
from router.http.messages import Request
from router.http.reply import Header, Outcome
from router.keys.key_file import KeyTerms
from router.keys.key_ring import Key, KeyRing
from router.keys.quota import Exhausted

ANTHROPIC_HEADER = "x-api-key"  # where Anthropic's clients put a key

_MAX_NAME_CHARS = 1_024  # longest name of a tenant, which is kept in memory
_PLAIN = re.compile(r"[!-~](?:[ -~]*[!-~])?")  # what a field's value says to every reader


class TenantRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rules that keep tenants apart."""

    isolate: Annotated[
        bool,
        Meta(description=("whether requests of one tenant never use KV blocks of another tenant")),
    ] = False


class Tenants:
    """Finds the API key and tenant of each request. Lifetime: process."""

    def __init__(
        self, keys: KeyRing | None, tenant_header: str, trusted_peers: tuple[Network, ...]
    ) -> None:
        self._keys = keys
        self._tenant_header = tenant_header
        self._trusted_peers = trusted_peers
        self._anybody = Key(KeyTerms(), None)

    @property
    def asks_keys(self) -> bool:
        """True if the router checks clients' API keys; it then does not pass them to workers."""
        return self._keys is not None

    def key_of(self, request: Request) -> Key:
        """Return the client's key, or that of the tenant which a trusted peer names, or the default
        key.

        Raises ClientError(401) if keys are configured and the client's is missing or unknown.
        """
        if trusts(self._trusted_peers, request.peer or ""):
            named = request.headers.get(self._tenant_header)
            if named:
                return self._named(named)
        return self._anybody if self._keys is None else self.presented(request)

    def presented(self, request: Request) -> Key:
        """Return the key that the client itself sends, even if a trusted peer names a tenant.
        Raises ClientError(401) if the key is missing or unknown.
        """
        if self._keys is None:
            return _checked(None)
        presented = request.headers.get(ANTHROPIC_HEADER)
        if presented is None or request.headers.get("Authorization") is not None:
            return bearer_key(request.headers.get("Authorization"), self._keys)
        return _checked(self._keys.of_key(presented.strip()))

    def _named(self, tenant: str) -> Key:
        if len(tenant) > _MAX_NAME_CHARS:
            raise ClientError(
                400, f"{self._tenant_header} is too long", self._tenant_header, "string_too_long"
            )
        known = None if self._keys is None else self._keys.of_tenant(tenant)
        return Key(KeyTerms(tenant=tenant), None) if known is None else known


def tenant_header(name: str, tenant: str) -> Header:
    """Return the header, with this name, that tells a worker the request's tenant, so that the
    worker can apply its own limits.

    A tenant that is too long or not a valid header value is replaced by its SHA-256.
    """
    if _PLAIN.fullmatch(tenant) and len(tenant) <= _MAX_NAME_CHARS:
        return name.encode(), tenant.encode()
    digest = hashlib.sha256(tenant.encode(errors="replace")).hexdigest()
    return name.encode(), b"sha256-" + digest.encode()


def bearer_key(authorization: str | None, keys: KeyRing) -> Key:
    """Return the key in `Authorization: Bearer KEY`. Raises ClientError(401), whose text never
    quotes the header.
    """
    scheme, _, presented = (authorization or "").partition(" ")
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


_ANY_PRIORITY = (-(2**31), 2**31 - 1)  # priorities allowed for a key without a range

EXHAUSTED = "rate_limit_exceeded"


def tokens_used(outcome: Outcome, prompt_tokens: int) -> tuple[int, int] | None:
    """Return the tokens of the prompt and of the answer as the worker counted them, or else as the
    router did: `prompt_tokens`, and the number of events.

    Return None if the worker gave no answer, because another worker may still give one.
    """
    usage = outcome.usage
    prompt = None if usage is None else usage.prompt_tokens
    answer = None if usage is None else usage.completion_tokens
    if answer is None:
        answer = outcome.events
    if outcome.error is not None and not answer:
        return None
    return prompt_tokens if prompt is None else prompt, answer


def too_many(exhausted: Exhausted, left: tuple[tuple[str, str], ...]) -> ClientError:
    """Return the refusal of a request whose key has reached a limit. `left` has the headers that
    say what the key has left.
    """
    wait_s = exhausted.retry_after_s
    again = (
        ("Retry-After", str(max(math.ceil(wait_s), 1))),
        ("retry-after-ms", str(math.ceil(wait_s * 1e3))),  # read first by OpenAI's clients
    )
    message = f"{exhausted.what}; try again in {wait_s:.3g} s"
    return ClientError(429, message, code=EXHAUSTED, headers=(*again, *left))


def check_model(terms: KeyTerms, model: str, served: str | None = None) -> None:
    """Raise ClientError(403) if the key does not allow the model. `served` is the model to which
    the name `model` is mapped; the key need allow only one of them.
    """
    if terms.models and not any(map(terms.allows_model, (model, served or model))):
        why = f"this API key may not use the model {model!r}"
        raise ClientError(403, why, "model", "model_not_allowed")


def priority_within(terms: KeyTerms, priority: int, hint: int | None = None) -> int:
    """Return the priority of a request that asked for `priority`; 0 means that it did not ask.

    `hint` is the priority that it asked for in another router's form, which no engine reads; it
    counts if `priority` is 0, and is limited to the key's range. Raises ClientError(403) if
    `priority` is outside the key's range, because engines would obey it.
    """
    if not priority and hint is not None:
        least, most = terms.priority or _ANY_PRIORITY
        return min(max(hint, least), most)
    if terms.priority is None:
        return priority
    least, most = terms.priority
    if priority and not least <= priority <= most:
        why = f"this API key may ask for priorities {least}..{most}, not {priority}"
        raise ClientError(403, why, "priority", "priority_not_allowed")
    return min(max(priority, least), most)


def objectives_of(lines: Iterable[str]) -> dict[str, int]:
    """Return the priority of each objective, from lines NAME=PRIORITY. Raises ValueError if one is
    malformed.
    """
    found: dict[str, int] = {}
    for line in lines:
        name, equals, number = line.rpartition("=")
        digits = number.removeprefix("-")
        if not (name and equals and digits.isascii() and digits.isdigit() and len(digits) <= 9):
            raise ValueError(f"{line[:200]!r} is not NAME=PRIORITY, as in batch=10")
        if name in found:
            raise ValueError(f"the objective {name[:200]!r} is given twice")
        found[name] = int(number)
    return found


def salt_of(terms: KeyTerms, asked: str | None, isolate: bool) -> str | None:
    """Return the salt of a request's cache: the client's own if tenants are not kept apart,
    otherwise 32 hex digits made of the tenant's salt and the client's.

    No client can send another tenant's salt, because a client's salt is never used unchanged.
    """
    if terms.salt is None and not isolate:
        return asked
    tenant = terms.tenant if isolate else None
    whose = msgspec.msgpack.encode(["warmroute-salt", terms.salt, tenant, asked])
    return sha256(whose).hexdigest()[:32]
