"""A request in two legs: what the worker that prefills is sent, what it answers, and what the
worker that decodes is sent then. Bodies are edited in place: all other bytes stay as they came.

Each way in which KV passes between two workers is a `Transfer`; `TRANSFERS` has them by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kvkernels import body_fields
from router.request.errors import ClientError
from router.request.paths import Path
from router.upstream.reply import Header, HeldReply

PARAMS = "kv_transfer_params"
# Set by routers. A worker would fetch KV from whatever address it is given.
TRANSFER_FIELDS = (
    PARAMS,
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    "disaggregated_params",
)
_OVERRIDES = (b"x-override-", b"x-prefiller-")  # headers that SGLang and llm-d's sidecar obey
_ASK = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ONE_TOKEN: Mapping[str, bytes] = MappingProxyType(
    {
        "stream": b"false",
        "stream_options": b"null",
        "min_tokens": b"0",
        "max_tokens": b"1",
        "max_completion_tokens": b"1",
    }
)
_SPLITS = frozenset({"/v1/completions", "/v1/chat/completions"})
# What no engine splits, or what the first leg would answer: its own text, more than one answer, log
# probabilities of the prompt, media. Found in text, too: such a request goes to one worker.
_WHOLE = re.compile(
    rb'"(?:(?:n|best_of)"[ \t\r\n]*:(?![ \t\r\n]*1[ \t\r\n]*[,}])|'
    rb'(?:echo|prompt_logprobs|logprob_start_len|use_beam_search|image_url|input_audio|video_url)"'
    rb"[ \t\r\n]*:)"
)


def splits(body: bytes, path: Path, max_output_tokens: int | None) -> bool:
    """Whether one worker may prefill it and another decode it."""
    if path.path not in _SPLITS or max_output_tokens == 1:
        return False
    return _WHOLE.search(body) is None


def check_no_transfer(body: bytes) -> None:
    """Raises ClientError where a client names the KV that a worker shall fetch.

    A body that is no JSON object is for others to judge.
    """
    fault, _, found = body_fields(body, TRANSFER_FIELDS)
    if fault is None and any(found):
        raise _forbidden(next(n for n, f in zip(TRANSFER_FIELDS, found, strict=True) if f))


def check_no_override(headers: tuple[Header, ...]) -> None:
    """The same for headers that say so."""
    for name, _ in headers:
        if name.lower().startswith(_OVERRIDES):
            raise _forbidden(name.decode("latin-1"))


def _forbidden(name: str) -> ClientError:
    return ClientError(400, f"{name} is set by routers, not by clients", name, "transfer_field")


@dataclass(frozen=True, slots=True)
class Leg:
    """What one of the two workers is sent: a body, and headers beside the client's."""

    body: bytes
    headers: tuple[Header, ...] = ()


TRY_BITS = 52  # the number survives tools that keep JSON's as doubles


@dataclass(frozen=True, slots=True)
class Try:
    """One try at a request by two workers."""

    number: int  # of `TRY_BITS`, drawn: no other try of any router has it while it lives
    path: str  # as its client asked
    stream: bool  # its client reads a stream


@dataclass(frozen=True, slots=True)
class Handover:
    """What the answer to a first leg says."""

    told: bytes | None = None  # what `Transfer.decode` gets of it; None: the KV was not kept
    # The client's, where the request is over with its first token: no second leg follows.
    reply: HeldReply | None = None


class Transfer(Protocol):
    """How KV passes from a worker that prefills to one that decodes: the edits of both legs.

    The same object serves all requests, and edits long bodies on other threads: it keeps nothing
    of a request between two calls. What it must carry from one leg to the other is in `Try` and
    `Handover.told`. Bodies were read before: they are JSON objects.
    """

    @property
    def serves_alone(self) -> bool:
        """A worker with a role does all of a request, too, if it is sent one as it came."""

    def prefill(self, body: bytes, of: Try) -> Leg:
        """The first leg of a request with this body."""

    def read(self, answer: bytes, of: Try) -> Handover:
        """The whole body of the first leg's answer, a 2xx. Raises WorkerError for nonsense."""

    def decode(self, body: bytes, told: bytes | None, of: Try) -> Leg:
        """The second leg of it."""


def one_token_body(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """A completion or chat that asks for one token, whole, with more `fields`."""
    fields = dict(fields)
    names = tuple(_ONE_TOKEN)
    fault, _, found = body_fields(body, names)
    assert fault is None, "a body that was read before"
    there = {name: field for name, field in zip(names, found, strict=True) if field is not None}
    pieces, at = list[bytes](), 0
    for name, field in sorted(there.items(), key=lambda item: item[1][0]):
        pieces += body[at : field[0]], _ONE_TOKEN[name]
        at = field[1]
    if not there.keys() & {"max_tokens", "max_completion_tokens"}:
        fields["max_tokens"] = b"1"
    return with_fields(b"".join((*pieces, body[at:])), fields)


def with_fields(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """The object with more fields, each as JSON, before its own ones."""
    brace = body.index(b"{") + 1
    new = b"".join(b'"%b":%b,' % (name.encode(), value) for name, value in fields.items())
    if body[brace:].lstrip(b" \t\r\n").startswith(b"}"):
        new = new[:-1]
    return b"".join((body[:brace], new, body[brace:]))


class Nixl:
    """vLLM's NixlConnector (0.14 to 0.33; our engine speaks the same), one leg after the other.

    The first leg asks for one token and says `do_remote_decode`; its answer names the KV in
    `kv_transfer_params`, which go unchanged into the second leg, whose body is the client's
    otherwise. Without them its worker computes the prompt itself. Lifetime: process.
    """

    serves_alone = True

    def prefill(self, body: bytes, of: Try) -> Leg:
        """As of `Transfer`, and so are the others."""
        return Leg(one_token_body(body, {PARAMS: _ASK}))

    def read(self, answer: bytes, of: Try) -> Handover:
        fault, _, (field,) = body_fields(answer, (PARAMS,))
        if fault is not None or field is None:
            return Handover()
        params = answer[field[0] : field[1]]
        return Handover(params if params.startswith(b"{") else None)

    def decode(self, body: bytes, told: bytes | None, of: Try) -> Leg:
        return Leg(body if told is None else with_fields(body, {PARAMS: told}))


_NIXL = Nixl()
# By the kind of engine.
TRANSFERS: Mapping[str, Transfer] = MappingProxyType({"vllm": _NIXL, "warmroute": _NIXL})
