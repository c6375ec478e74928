"""Defines the request log's format: JSON lines, a `Header` and then one `RequestLine` for each
request.

Lines are in the order in which requests ended; sort them by `at` for the order of arrivals. A
file's first line is a header, and there is another one wherever a restarted router continues the
file and wherever the policy or the workers change. Sessions and tenants can be compared between
headers with the same salt; worker numbers only within one run of a router. A line has no text, no
token ids, no headers and no keys. Of a prompt it has only chain hashes; sessions and tenants are
digests, and the log does not contain the key of these digests.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from policies.contract import Hashes
from policies.facts import Identity

FORMAT = "warmroute-requests"
VERSION = 1

_PSEUDONYM_BYTES = 12  # 96 bits: no two of a thousand million sessions are likely to meet


class FleetPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group of equal workers, as the router knew them, with their number. None means unknown, or
    no threshold.
    """

    count: int
    block_size: int
    kv_tokens: int | None = None
    role: str = "both"
    max_requests: float | None = None
    max_queued_tokens: float | None = None
    max_kv_fraction: float | None = None


class Header(msgspec.Struct, frozen=True):
    """The policy, the workers and the salt that apply to the lines below it, up to the
    next header.
    """

    started: float  # unix seconds
    policy: str  # specification, every parameter written out
    workers: int  # of the fleet when the line was written
    format: str = FORMAT
    version: int = VERSION
    salt: str = ""  # `Salt.mark` of the salt that keyed the names and chains up to the next header
    fleet: tuple[FleetPart, ...] = ()  # `workers` by kind
    worker_requests: int | None = None  # `limits.worker_requests`; None: no limit
    worker_queued_tokens: int | None = None


class Best(msgspec.Struct, frozen=True, array_like=True):
    """A candidate worker, as `[worker, cost, hit_tokens]`. The cost is null if the request could
    not go to it.
    """

    worker: int
    cost: float | None
    hit_tokens: int


class RequestLine(msgspec.Struct, frozen=True):
    """One request that was dispatched, rejected or abandoned. None is written as null and means
    unknown.

    `chain` has the chain hashes of the full blocks, keyed with a salt (`router.record.salt`), as
    base64 of uint64 little-endian, eight bytes for each block (`hashes_of`). They are not written
    as numbers, because not every JSON reader keeps numbers beyond 2^53.
    """

    at: float  # arrival, unix seconds, 6 decimals
    model: str | None  # None: it named a model that is not served
    prompt_tokens: int  # as the router counted them; a guess where `approximate`
    output_tokens: int | None  # as the worker reported, else events of the stream
    cached_tokens: int | None  # of the prompt, as the worker reported
    block_size: int | None  # tokens a block of `chain` stands for; None: no worker was known
    chain: bytes
    session: str | None
    tenant: str | None
    priority: int
    approximate: bool  # chain of blocks of text, four bytes for a token
    stream: bool
    worker: int | None  # the last one it was sent to
    policy: str | None  # that chose it
    reason: str  # of the last decision; of a request turned away, the answer's code
    hit_tokens: int | None  # expected on the chosen worker
    attempts: int  # dispatches
    status: int  # of the answer; 499: the client left before there was one
    error: str | None  # None: answered whole; "client", or the worker's kind of error
    ttft_ms: float | None  # arrival to first byte, streamed answers; a refusal is none
    e2e_ms: float  # arrival to end
    candidates: tuple[Best, ...]  # the best three, the chosen one first
    sent_ms: float | None = None  # from arrival to the last dispatch: the wait at the router
    regret_ms: float | None = None  # by `contract.actions`; of policies that count in seconds
    regret_hit_tokens: int | None = None  # by the same
    worker_prompt_tokens: int | None = None  # as the worker reported them
    # All that the decision saw, if an explanation was requested.
    explained: dict[str, Any] | None = None
    # Where a rule of names counted: the name asked for, the rule, and the model's revision.
    asked: str | msgspec.UnsetType | None = msgspec.UNSET
    rule: str | msgspec.UnsetType = msgspec.UNSET
    revision: str | msgspec.UnsetType | None = msgspec.UNSET
    # The identity that the client gave (`policies.facts.Identity`), ids as keyed digests.
    group: str | msgspec.UnsetType = msgspec.UNSET
    parent: str | msgspec.UnsetType = msgspec.UNSET
    cache_group: str | msgspec.UnsetType = msgspec.UNSET
    user: str | msgspec.UnsetType = msgspec.UNSET
    final: bool | msgspec.UnsetType = msgspec.UNSET


def chain_bytes(chain: Hashes) -> bytes:
    """Return a chain as the bytes of `RequestLine.chain`."""
    return chain.astype("<u8", copy=False).tobytes()


def hashes_of(chain: bytes) -> Hashes:
    """Return the uint64[blocks] in `RequestLine.chain`. Raises ValueError if its length is not a
    multiple of 8.
    """
    if len(chain) % 8:
        raise ValueError(f"chain has {len(chain)} bytes; expected 8 for each block")
    return np.frombuffer(chain, dtype="<u8").astype(np.uint64, copy=False)


def pseudonym(name: str | None, key: bytes) -> str | None:
    """Return a digest of the name, which is the same for equal names with one key; None
    for None.
    """
    if name is None:
        return None
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, key=key, digest_size=_PSEUDONYM_BYTES).hexdigest()


def pseudonyms(identity: Identity, key: bytes) -> Identity:
    """Return an identity in which each id is replaced by its pseudonym."""
    return Identity(
        group=pseudonym(identity.group, key),
        parent=pseudonym(identity.parent, key),
        cache_group=pseudonym(identity.cache_group, key),
        user=pseudonym(identity.user, key),
        final=identity.final,
    )
