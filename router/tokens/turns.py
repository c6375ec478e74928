"""Remembers rendered prompts, because a conversation's next turn begins with the same token ids.

A prompt is found by keyed digests of its request's bytes up to each message; no text is kept. The
ids of an earlier turn are the beginning of the next one only if the chat template leaves earlier
messages unchanged, so a beginning is used only after another turn of its conversation has shown
that.

Prompts may contain the date. Midnight in every time zone is at a whole quarter of an hour of UTC
(IANA time zone database), so a prompt that was rendered in another quarter of an hour is not used.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from sys import getsizeof
from typing import NamedTuple

import msgspec
import numpy as np

from router.body.scan import Tokens
from router.engines.render_way import Rendered
from router.tokens.media import media_in

_QUARTER_S = 900.0
_DIGEST_BYTES = 16
_ENTRY_BYTES = 512  # of an entry beside its ids: digests, objects, table
_MEDIUM_BYTES = 256
# Ids at the end of a prompt that the next turn may write otherwise: where the answer begins, with
# an empty thought for example.
_TAIL_TOKENS = 64
BYTES_A_TOKEN = 4  # of UTF-8 text, roughly, for English and code with today's vocabularies

# Fields that never change a prompt, of OpenAI's API, vLLM, SGLang and llama.cpp. `cache_salt` is
# not among them, though it does not either: it keeps tenants apart.
_SAMPLING = frozenset(
    {
        *("stream", "stream_options", "n", "best_of", "seed", "stop", "stop_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens"),
        *("min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "ignore_eos", "echo"),
        *("user", "safety_identifier", "metadata", "store", "service_tier", "session_id"),
        *("prompt_cache_key", "priority", "request_id", "kv_transfer_params", "return_token_ids"),
    }
)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class MessageFacts(NamedTuple):
    """The facts that are known about one message of a request. Lifetime: request."""

    bytes: int
    has_media: bool


# The keys of a request, its messages, and whether its prompt may be remembered.
RequestKeys = tuple[Sequence[bytes], Sequence[MessageFacts], bool]


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The remembered token ids of an earlier request. Lifetime: until it is the least recently used
    one and room is needed.
    """

    rendered: tuple[Rendered, ...]  # one for each prompt of the request
    renderer: str  # that made them
    quarter: int
    # Ids at its own beginning's end that this turn wrote otherwise; None: no earlier turn was
    # known. This is expected of the next turn, too.
    tail: int | None = None

    @property
    def size_bytes(self) -> int:
        """The memory that this entry uses, in bytes."""
        ids = sum(one.ids.nbytes for one in self.rendered)
        names = [medium.identifier for one in self.rendered for medium in one.media]
        return ids + sum(_MEDIUM_BYTES + getsizeof(name) for name in names) + _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """The token ids and messages that the memo knows of a request's prompt. Lifetime: request."""

    keys: Sequence[bytes]  # of the request up to each of its messages; the last: all of it
    keeps: bool = False  # its prompt may be remembered
    has_media: bool = False
    whole: KnownPrompt | None = None  # its prompt
    parent: KnownPrompt | None = None  # the longest known beginning, of this quarter or another
    rest: Sequence[MessageFacts] = ()  # the messages behind that beginning

    @property
    def rest_bytes(self) -> int:
        """The number of bytes in the messages after the known beginning."""
        return sum(message.bytes for message in self.rest)

    def beginning(self, quarter: int) -> Rendered | None:
        """Return the token ids with which the prompt begins; None if they are not certain enough.

        The number of tokens of a new image cannot be computed from its bytes, so the result is None
        for a prompt with a new image.
        """
        parent = self.parent
        if any(message.has_media for message in self.rest):
            return None
        if parent is None or parent.tail is None or parent.quarter != quarter:
            return None
        if parent.tail > _TAIL_TOKENS or len(parent.rendered) != 1:
            return None
        ids, media = parent.rendered[0]
        kept = len(ids) - parent.tail
        return Rendered(ids[:kept], tuple(one for one in media if one.offset + one.length <= kept))


class TurnMemo:
    """Remembers rendered prompts in at most `max_bytes` bytes; the least recently used are dropped
    first. Lifetime: process.

    `now_s` is the wall clock in seconds.
    """

    def __init__(self, max_bytes: int, now_s: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, KnownPrompt] = OrderedDict()
        self.bytes = 0  # held now

    @property
    def quarter(self) -> int:
        """The number of the present quarter of an hour since 1970."""
        return int(self._now_s() // _QUARTER_S)

    def keys_of(self, body: bytes, path: str, name: str) -> RequestKeys:
        """Return the keys of a request, its messages, and whether its prompt may be kept. Pure; any
        thread may call it.

        `name` separates requests that share no prompts, such as those for different models or with
        different salts. There are no keys if the body is not a JSON object, or if the memo may hold
        no bytes.
        """
        try:
            fields = _FIELDS.decode(body)
            messages = _ITEMS.decode(fields.pop("messages", b"[]"))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return (), [], False
        media = [media_in(message) for message in messages]
        facts = [
            MessageFacts(len(one), m.has_media) for one, m in zip(messages, media, strict=True)
        ]
        if self._max_bytes <= 0:
            return (), facts, False
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._key)
        for part in (path.encode(), name.encode("utf-8", "surrogatepass")):
            digest.update(b"%d:%b" % (len(part), part))
        for field in sorted(fields.keys() - _SAMPLING):
            part = field.encode("utf-8", "surrogatepass")
            digest.update(b"%d:%b%d:" % (len(part), part, len(fields[field])))
            digest.update(fields[field])
        keys = [digest.digest()] if not messages else []
        for message in messages:
            digest.update(b"%d:" % len(message))
            digest.update(message)
            keys.append(digest.digest())
        return keys, facts, not any(one.has_addresses for one in media)

    def look(
        self, keys: Sequence[bytes], messages: Sequence[MessageFacts], keeps: bool
    ) -> KnownTurn:
        """Return what the memo knows of the request with these keys."""
        quarter = self.quarter
        media = any(message.has_media for message in messages)
        for at in range(len(keys) - 1, -1, -1):
            known = self._known.get(keys[at])
            if known is None:
                continue
            self._known.move_to_end(keys[at])
            whole = at == len(keys) - 1
            if whole and keeps and known.quarter == quarter:
                return KnownTurn(keys, keeps, media, whole=known)
            if not whole:
                return KnownTurn(keys, keeps, media, parent=known, rest=messages[at + 1 :])
        return KnownTurn(keys, keeps, media)

    def keep(self, turn: KnownTurn, rendered: Sequence[Rendered], renderer: str) -> None:
        """Store the token ids of a request's prompt."""
        if not turn.keeps or not turn.keys:
            return
        tail = None
        if turn.parent is not None and len(turn.parent.rendered) == len(rendered) == 1:
            before, now = turn.parent.rendered[0].ids, rendered[0].ids
            tail = len(before) - same_ids(before, now)
        known = KnownPrompt(tuple(rendered), renderer, self.quarter, tail)
        if known.size_bytes > self._max_bytes:
            return
        former = self._known.pop(turn.keys[-1], None)
        if former is not None:
            self.bytes -= former.size_bytes
            if tail is None:  # the same request again shows nothing of its beginning
                known = replace(known, tail=former.tail)
        self._known[turn.keys[-1]] = known
        self.bytes += known.size_bytes
        while self.bytes > self._max_bytes:
            _, dropped = self._known.popitem(last=False)
            self.bytes -= dropped.size_bytes


def same_ids(one: Tokens, other: Tokens) -> int:
    """Return the number of equal token ids at the beginnings of two prompts."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
