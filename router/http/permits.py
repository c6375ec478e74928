"""What a client's key allows, asked at each step of a request and accounted for at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import sha256
from types import TracebackType

import msgspec

from router.http.errors import ClientError
from router.http.relay.reply import Outcome
from router.keys.allowance import Exhausted
from router.keys.grant import Grant
from router.keys.ring import Key
from router.keys.tenant_counts import TenantCounts
from router.keys.terms import KeyTerms

EXHAUSTED = "rate_limit_exceeded"


class Permit:
    """Entered before a request's body is read, left when it is over. Lifetime: request."""

    def __init__(self, key: Key, counts: TenantCounts, clock: Callable[[], float]) -> None:
        self.terms = key.terms
        self._grant = None if key.allowance is None else Grant(key.allowance)
        self._counts = counts
        self._clock = clock
        self._prompt_tokens = 0

    def __enter__(self) -> Permit:
        """Raises ClientError(429) while its key may send nothing."""
        now_s = self._clock()
        self._counts.arrived(self.terms.tenant)
        if self._grant is not None:
            exhausted = self._grant.begin(now_s)
            if exhausted is not None:  # nobody leaves what was never entered
                self._counts.refused(self.terms.tenant, EXHAUSTED)
                raise too_many(exhausted, self._grant.headers(now_s))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ClientError):
            self._counts.refused(self.terms.tenant, error.code or str(error.status))
        if self._grant is not None:
            self._grant.end(self._clock())

    def spend(self, prompt_tokens: int) -> None:
        """Its prompt has so many tokens. Raises ClientError(429) where these are too many now."""
        self._prompt_tokens = prompt_tokens
        if self._grant is not None:
            now_s = self._clock()
            exhausted = self._grant.spend(now_s, prompt_tokens)
            if exhausted is not None:
                raise too_many(exhausted, self._grant.headers(now_s))

    def used(self, outcome: Outcome) -> None:
        """A worker has dealt with it."""
        tokens = tokens_used(outcome, self._prompt_tokens)
        if tokens is None:
            return
        self._counts.used(self.terms.tenant, *tokens)
        if self._grant is not None:
            self._grant.used(self._clock(), *tokens)

    def turned_away(self, code: str) -> None:
        """The core refused it."""
        self._counts.refused(self.terms.tenant, code)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What is left, for the client to read."""
        return () if self._grant is None else self._grant.headers(self._clock())


def tokens_used(outcome: Outcome, prompt_tokens: int) -> tuple[int, int] | None:
    """Tokens of prompt and answer by the worker's account, else by ours: `prompt_tokens`, events.

    None where it gave nothing: another worker may.
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
    """The refusal of a request whose key is at a limit; `left`: its key's headers."""
    wait_s = exhausted.retry_after_s
    again = (
        ("Retry-After", str(max(math.ceil(wait_s), 1))),
        ("retry-after-ms", str(math.ceil(wait_s * 1e3))),  # read first by OpenAI's clients
    )
    message = f"{exhausted.what}; try again in {wait_s:.3g} s"
    return ClientError(429, message, code=EXHAUSTED, headers=(*again, *left))


def check_model(terms: KeyTerms, model: str) -> None:
    """Raises ClientError(403) for a model that the key is not for."""
    if not terms.allows_model(model):
        why = f"this API key may not use the model {model!r}"
        raise ClientError(403, why, "model", "model_not_allowed")


def priority_within(terms: KeyTerms, priority: int) -> int:
    """The priority of a request that asked for `priority`; 0: it did not ask.

    Raises ClientError(403) for one out of the key's range: engines would believe it.
    """
    if terms.priority is None:
        return priority
    least, most = terms.priority
    if priority and not least <= priority <= most:
        why = f"this API key may ask for priorities {least}..{most}, not {priority}"
        raise ClientError(403, why, "priority", "priority_not_allowed")
    return min(max(priority, least), most)


def salt_of(terms: KeyTerms, asked: str | None, isolate: bool) -> str | None:
    """The salt of a request's cache: the client's own, where nothing keeps tenants apart.

    Else 32 hex digits made of the tenant's and of what the client asked for. Nobody can write
    another tenant's salt, for what is written is never used as it is.
    """
    if terms.salt is None and not isolate:
        return asked
    tenant = terms.tenant if isolate else None
    whose = msgspec.msgpack.encode(["warmroute-salt", terms.salt, tenant, asked])
    return sha256(whose).hexdigest()[:32]


def with_salt(body: bytes, salt: str, name: str) -> bytes:
    """`body`, a JSON object of at least one field, with `name` as its last, which counts."""
    end = body.rindex(b"}")
    return body[:end] + b',"%s":' % name.encode() + msgspec.json.encode(salt) + body[end:]
