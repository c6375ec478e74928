"""Makes the bodies of a request in two legs: one for the prefill worker and one for the decode
worker. Bodies are edited in place: all other bytes stay unchanged. Each way to pass KV between two
workers is a `Transfer`; `router.engines.table` has them by name.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from kvkernels import body_fields, json_items
from router.body.json_edit import values_in, with_fields, with_values
from router.body.paths import Path
from router.http.errors import ClientError, WorkerError
from router.http.reply import EVENT_STREAM, RANK_HEADER, Framing, Header, HeldReply, ReplyHead

PARAMS = "kv_transfer_params"
# Headers that SGLang, llm-d's sidecar and TensorRT-LLM obey.
_OVERRIDES = (b"x-override-", b"x-prefiller-", b"x-trtllm-")
_KEEP_KV_PARAMS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_KV_PARAM_NAMES = (
    *("remote_engine_id", "remote_block_ids", "remote_request_id"),
    *("remote_host", "remote_port"),
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
_SPLIT_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
# What no engine splits, or what the first leg would answer: its own text, more than one answer, log
# probabilities of the prompt, media. Found in text, too: such a request goes to one worker.
_WHOLE = re.compile(
    rb'"(?:(?:n|best_of)"[ \t\r\n]*:(?![ \t\r\n]*1[ \t\r\n]*[,}])|'
    rb'(?:echo|prompt_logprobs|logprob_start_len|use_beam_search|image_url|input_audio|video_url)"'
    rb"[ \t\r\n]*:)"
)


def splits(body: bytes, path: Path) -> bool:
    """Return whether one worker may prefill the request and another decode it."""
    return path.path in _SPLIT_PATHS and _WHOLE.search(body) is None


def check_no_transfer(body: bytes, fields: tuple[str, ...]) -> None:
    """Raise ClientError if a client sets one of the `fields` that name KV to fetch.

    A worker would fetch the KV from any address in them. A body that is no JSON object is checked
    elsewhere.
    """
    fault, _, found = body_fields(body, fields)
    if fault is None and any(found):
        raise _forbidden(next(n for n, f in zip(fields, found, strict=True) if f))


def check_no_override(headers: tuple[Header, ...]) -> None:
    """Raise ClientError if a client sets a header that names KV to fetch."""
    for name, _ in headers:
        if name.lower().startswith(_OVERRIDES):
            raise _forbidden(name.decode("latin-1"))


def _forbidden(name: str) -> ClientError:
    return ClientError(400, f"{name} is set by routers, not by clients", name, "transfer_field")


@dataclass(frozen=True, slots=True)
class Leg:
    """The request to one of the two workers: its body, and the headers that it has in addition to
    the client's headers.
    """

    body: bytes
    headers: tuple[Header, ...] = ()
    # For a first leg: the call to its worker if its answer was not read; None: no call.
    unread: Leg | None = None
    once: bool = False  # it is not sent again where a kept connection turns out to be closed


ROOM_BITS = 52  # bits of a room's number; JSON tools that use doubles preserve them


@dataclass(frozen=True, slots=True)
class BootstrapAddress:
    """The address at which decode workers contact a prefill worker, and the worker's ranks."""

    host: str
    port: int
    ranks: int = 1  # data-parallel ones of its engine
    rank: int | None = None  # its own; None: all of them are one worker
    by_room: bool = True  # SGLang: the room's number determines the rank
    engine_ids: tuple[str, ...] = ()  # Mooncake: of each rank


@dataclass(frozen=True, slots=True)
class TransferAttempt:
    """The data that both legs of a request need in one attempt to serve the request."""

    number: int  # of `ROOM_BITS`, drawn: no other attempt of any router has it meanwhile
    path: str  # of the client's request
    stream: bool  # its client reads a stream
    # If both legs begin at once: where the workers meet, and the rank of the decode worker.
    bootstrap: BootstrapAddress | None = None
    decode_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Handover:
    """The data that the router takes from the answer to a prefill leg."""

    # The data that `Transfer.decode` gets; None: the worker did not keep the KV.
    decode_data: bytes | None = None
    # The client's answer if the request ended with its first token, so that no decode leg follows.
    reply: HeldReply | None = None
    # The call that frees the KV if no leg will read it; None: the worker itself frees the KV later.
    release: Leg | None = None


class Transfer(Protocol):
    """Defines how KV is passed from a prefill worker to a decode worker, for one kind of engine.

    The methods make the request bodies of both legs from the client's body, which is a JSON object.
    One object serves all requests and edits long bodies on other threads, so it stores nothing
    about a request. `TransferAttempt` and `Handover.decode_data` carry data from the prefill leg to
    the decode leg.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the request fields that only routers may set, not clients."""

    @property
    def serves_alone(self) -> bool:
        """True if a prefill or decode worker also serves whole requests that are sent unchanged."""

    @property
    def concurrent(self) -> bool:
        """True if the prefill leg and the decode leg start at the same time.

        Then the method `read` is not called, `Handover.decode_data` is None, and each prefill
        worker has a `BootstrapAddress`.
        """

    @property
    def answers_late(self) -> bool:
        """True if a prefill worker answers only after its KV was fetched, not as soon as the KV was
        computed.
        """

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        """Return the prefill leg of a request with this body."""

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        """Return the data in the whole body of a 2xx answer to a prefill leg. Raises WorkerError
        for an invalid body.
        """

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        """Return the decode leg of a request. `data` is the data from the prefill worker's answer
        (`Handover.decode_data`), or None if there is none.
        """


def one_token_body(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return the body of a completion or chat with more `fields`, changed so that it asks for one
    token and no stream.
    """
    names = tuple(_ONE_TOKEN)
    there = {name for name, value in zip(names, values_in(body, names), strict=True) if value}
    if not there & {"max_tokens", "max_completion_tokens"}:
        there.add("max_tokens")
    return with_values(body, {name: _ONE_TOKEN[name] for name in sorted(there)} | dict(fields))


def _names_kv(params: bytes) -> bool:
    """Return whether a worker can find KV by these parameters. vLLM 0.32 crashes with all its
    requests if a request asks it to fetch KV but does not name the KV.
    """
    return not {None, b"null"} & set(values_in(params, _KV_PARAM_NAMES))


class Nixl:
    """Passes KV by vLLM's NixlConnector (0.14 to 0.33), which our engine supports, too; the decode
    leg follows the prefill leg. The prefill leg asks for one token and has the parameter
    `do_remote_decode`. Its answer names the KV in `kv_transfer_params`, which the router copies
    unchanged into the decode leg; the rest of the decode leg's body is the client's. Without
    `kv_transfer_params`, the decode worker computes the prompt itself. Lifetime: process.
    """

    fields = (PARAMS,)
    serves_alone, concurrent, answers_late = True, False, False

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        """Return the prefill leg, as `Transfer.prefill` describes."""
        return Leg(one_token_body(body, {PARAMS: _KEEP_KV_PARAMS}))

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        fault, _, (field,) = body_fields(answer, (PARAMS,))
        if fault is not None or field is None:
            return Handover()
        params = answer[field[0] : field[1]]
        return Handover(params if _names_kv(params) else None)

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        return Leg(body if data is None else with_fields(body, {PARAMS: data}))


RELEASE = "/kv/release"  # where a worker takes a `Handover.release`


class Warmroute(Nixl):
    """Passes KV between workers with our own engine, which frees blocks as soon as the router tells
    it that nobody will read them. If the answer to the prefill leg was not read, the router names
    the blocks by the transfer's name in the prefill leg.
    """

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        name = b'"transfer_id":"warmroute-%x"' % of.number
        leg = one_token_body(body, {PARAMS: b"%b,%b}" % (_KEEP_KV_PARAMS[:-1], name)})
        return Leg(leg, unread=Leg(b"{%b}" % name))

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        handover = super().read(answer, of)
        names = ("remote_request_id", "remote_registration_generation")
        request_id, generation = values_in(handover.decode_data or b"", names)
        if request_id is None or generation is None:
            return handover
        body = b'{"request_id":%b,"generation":%b}' % (request_id, generation)
        return replace(handover, release=Leg(body))


_TRTLLM_PARAMS = "disaggregated_params"
_UNFINISHED = (b'"length"', b'"not_finished"')  # ends of a first leg after which more tokens follow
_SIGNED_FIELDS = ("ctx_info_endpoint", "encoded_opaque_state")
SIGNATURE = b"x-trtllm-disagg-auth"


class Trtllm:
    """Passes KV between TensorRT-LLM servers; the context server, which prefills, answers first
    (`serve/openai_disagg_service.py`, 2026-08). The prefill leg stops by itself after its first
    token, and the generation server, which decodes, repeats this token. The answer to the prefill
    leg has the token ids of the prompt, so the decode leg need not tokenize it. Lifetime: process.
    """

    fields = ("disaggregated_params",)
    serves_alone, concurrent, answers_late = True, False, False

    def __init__(self, node_id: int = 0, auth_key: str | None = None) -> None:
        """Take a number that differs for each router, `node_id` (0..255), and the key of all
        servers, `auth_key` (None if the servers need no key).
        """
        self._node_id = node_id
        self._auth_key = auth_key

    def request_id(self, of: TransferAttempt) -> int:
        """Return a request id of 63 bits in TensorRT-LLM's form: 39 bits of a time, 8 bits of the
        node id and 16 more bits. The time is drawn from a range that a clock counting from a start
        never reaches. So the id is never below 2**40, where the servers' own ids are.
        """
        time_bits = 1 << 38 | of.number >> 16
        return time_bits << 24 | self._node_id << 16 | of.number & 0xFFFF

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        """Return the prefill leg, as `Transfer.prefill` describes."""
        ask = b'{"request_type":"context_only","disagg_request_id":%d,"schedule_style":0}'
        fields = {"stream": b"false", "stream_options": b"null"}
        return Leg(with_values(body, fields | {_TRTLLM_PARAMS: ask % self.request_id(of)}))

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        choices, ids, usage = values_in(answer, ("choices", "prompt_token_ids", "usage"))
        items = None if choices is None else json_items(choices, 1)
        if choices is None or items is None or len(items) != 1:
            raise WorkerError("garbage", "a context server's answer has not one choice")
        choice = choices[items[0][0] : items[0][1]]
        params, reason = values_in(choice, (_TRTLLM_PARAMS, "finish_reason"))
        if reason is not None and reason not in (*_UNFINISHED, b"null"):
            return Handover(reply=_finished(answer, of))
        names = ("ctx_request_id", "disagg_request_id", "request_type")
        theirs, ours, kind = values_in(params or b"", names)
        if params is None or kind is None or theirs in (None, b"null"):
            raise WorkerError("garbage", "a context server's answer names no KV")
        if ours != b"%d" % self.request_id(of):
            raise WorkerError("garbage", "a context server's answer is another request's")
        fields = {"request_type": b'"generation_only"', "ctx_usage": usage or b"null"}
        told = {_TRTLLM_PARAMS: with_values(params, fields)}
        if ids is not None and ids.startswith(b"["):
            told["ids"] = ids
        return Handover(with_fields(b"{}", told))

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        if data is None:  # the answer of the first leg was not read
            return Leg(body)
        params, ids = values_in(data, (_TRTLLM_PARAMS, "ids"))
        assert params is not None, "as `read` wrote it"
        fields = {_TRTLLM_PARAMS: params}
        if ids is not None:
            chat = of.path.endswith("/chat/completions")
            fields["prompt_token_ids" if chat else "prompt"] = ids
        signature = self.signature(params)
        signed = () if signature is None else ((SIGNATURE, signature),)
        return Leg(with_values(body, fields), signed)

    def signature(self, params: bytes) -> bytes | None:
        """Return the signature of parameters that name KV (`serve/disagg_auth.py`). Return None if
        the router has no key, or if the parameters name no KV.
        """
        given = values_in(params, _SIGNED_FIELDS)
        decoded = [None if one is None else msgspec.json.decode(one) for one in given]
        endpoint, state = decoded
        if isinstance(endpoint, list):
            endpoint = endpoint[0] if endpoint else None
        if self._auth_key is None or (endpoint is None and state is None):
            return None
        signed = dict(zip(_SIGNED_FIELDS, (endpoint, state), strict=True))
        text = json.dumps(signed, separators=(",", ":"))
        return (
            b"sha256="
            + hmac.digest(self._auth_key.encode(), text.encode(), "sha256").hex().encode()
        )


def _finished(answer: bytes, of: TransferAttempt) -> HeldReply:
    """Return the answer for the client if the request ended with the first token."""
    try:
        whole = msgspec.json.decode(answer, type=dict[str, Any])
        choice = whole["choices"][0]
        choice.pop(_TRTLLM_PARAMS, None)
        if of.stream and "message" in choice:
            choice["delta"] = choice.pop("message")
            whole["object"] = "chat.completion.chunk"
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise WorkerError("garbage", "a context server's answer cannot be read") from error
    whole.pop("prompt_token_ids", None)
    body, kind = msgspec.json.encode(whole), b"application/json"
    if of.stream:
        body, kind = b"data: %b\n\ndata: [DONE]\n\n" % body, EVENT_STREAM
    head = ReplyHead(200, b"OK", ((b"Content-Type", kind),), Framing.LENGTH, len(body))
    return HeldReply(head, body)


class Rooms:
    """Passes KV between SGLang workers (0.5.23) with any transfer backend. Both legs are the whole
    request, and the two workers meet in a numbered room. The prefill worker stops by itself after
    one token, and answers when its KV was fetched; the decode worker streams that token first.
    Neither worker serves requests alone: it answers 400 to a request without a room. Lifetime:
    process.
    """

    fields = (
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("disagg_prefill_dp_rank", "routed_dp_rank"),
    )
    serves_alone, concurrent, answers_late = False, True, True

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        """Return the prefill leg, as `Transfer.prefill` describes."""
        bootstrap, fields = _met(of)
        if bootstrap.rank is not None and not bootstrap.by_room:
            fields["routed_dp_rank"] = b"%d" % bootstrap.rank
        return Leg(with_fields(body, fields))

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        return Handover()

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        bootstrap, fields = _met(of)
        if of.decode_rank is not None:
            fields["routed_dp_rank"] = b"%d" % of.decode_rank
        if bootstrap.rank is not None and not bootstrap.by_room:
            fields["disagg_prefill_dp_rank"] = b"%d" % bootstrap.rank
        return Leg(with_fields(body, fields))


def _met(of: TransferAttempt) -> tuple[BootstrapAddress, dict[str, bytes]]:
    """Return the bootstrap address and the room at which two SGLang workers meet."""
    bootstrap = of.bootstrap
    assert bootstrap is not None, "workers that prefill have one"
    room = of.number
    if bootstrap.rank is not None and bootstrap.by_room:  # its rank takes it by `room % ranks`
        room += bootstrap.rank - room % bootstrap.ranks
    host = msgspec.json.encode(bootstrap.host)
    values = (host, b"%d" % bootstrap.port, b"%d" % room)
    return bootstrap, dict(
        zip(("bootstrap_host", "bootstrap_port", "bootstrap_room"), values, strict=True)
    )


class Mooncake:
    """Passes KV by vLLM's MooncakeConnector (0.33): the prefill worker makes one token, and the
    decode worker the whole answer. The name of the transfer connects both legs. The prefill worker
    keeps KV only if its leg ends by its length, so the prefill leg ignores the end of text. Its
    answer has no parameters. If the prefill leg fails, a decode leg that is not cancelled waits for
    480 s. Lifetime: process.
    """

    fields = (PARAMS,)
    serves_alone, concurrent, answers_late = True, True, False

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        """Return the prefill leg, as `Transfer.prefill` describes."""
        params = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%b}'
        params %= self._name(of)
        rank = self._rank(of)
        headers = ((RANK_HEADER, b"%d" % rank),) if self._bootstrap(of).rank is None else ()
        leg = one_token_body(body, {PARAMS: params, "ignore_eos": b"true"})
        return Leg(leg, headers if self._bootstrap(of).ranks > 1 else ())

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        return Handover()

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        bootstrap = self._bootstrap(of)
        params = (
            b'{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":%b,'
            b'"remote_bootstrap_addr":%b,"remote_engine_id":%b}'
        )
        address = msgspec.json.encode(f"http://{bootstrap.host}:{bootstrap.port}")
        engine_id = msgspec.json.encode(bootstrap.engine_ids[self._rank(of)])
        return Leg(with_fields(body, {PARAMS: params % (self._name(of), address, engine_id)}))

    def _name(self, of: TransferAttempt) -> bytes:
        return b'"warmroute-%x"' % of.number

    def _bootstrap(self, of: TransferAttempt) -> BootstrapAddress:
        assert of.bootstrap is not None, "workers that prefill have one"
        return of.bootstrap

    def _rank(self, of: TransferAttempt) -> int:
        """Return the data-parallel rank of the prefill engine. Both legs name the rank, so that the
        workers find each other.
        """
        bootstrap = self._bootstrap(of)
        return of.number % bootstrap.ranks if bootstrap.rank is None else bootstrap.rank


class Sidecar:
    """Passes KV through llm-d's routing sidecar in front of a decode worker. A header tells the
    sidecar which worker prefills. The sidecar sends the prefill leg itself and waits for it; any
    connector may pass the KV. Lifetime: process.
    """

    fields = tuple[str, ...]()
    serves_alone, concurrent, answers_late = True, True, True

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        """Return the prefill leg, as `Transfer.prefill` describes; the router itself does not send
        it.
        """
        raise AssertionError("the sidecar sends it")

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        raise AssertionError("the sidecar reads it")

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        return Leg(body)


SIDECAR = "sidecar"
PREFILLER = b"x-prefiller-host-port"  # HOST:PORT; llm-d-router, `pkg/sidecar/proxy` (2026)
NIXL = Nixl()
# Transfers that a worker's options may name; the others follow from the kind of engine
# (`router.engines`).
NAMED_TRANSFERS: Mapping[str, Transfer] = MappingProxyType(
    {"nixl": NIXL, "mooncake": Mooncake(), SIDECAR: Sidecar()}
)
