"""Compares the router's token ids of fixed prompts with the ids that workers return."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec
import numpy as np

from engine.wire.events import WireError
from engine.wire.tokens import Chat, PromptError
from router.body.scan import Tokens
from router.engines.adapter import decoded, fetch
from router.fleet.manager import FleetManager
from router.fleet.member import Member
from router.tokens.check import TokenCheck
from router.tokens.encoders import Encoders, PromptEncoder

log = logging.getLogger(__name__)

T = TypeVar("T")
_MODELS_A_WORKER = 8  # asked for; adapters count
_RENDER = "/v1/chat/completions/render"
_REFUSALS = 2  # from the first probe on: it knows no /tokenize
TEXT = "Naïve facts, 12345 of them:\n\tdef f(x):  return {'x': x}\n\n東京 привет 🦊 <end> "
_ASK = {"role": "user", "content": f" {TEXT} "}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_ANSWER = {"role": "assistant", "content": "Fox. "}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look <it> up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
CHATS: Mapping[str, dict[str, list[dict[str, Any]]]] = MappingProxyType(
    {
        "a chat": {"messages": [_ASK]},
        "a chat with a system message": {"messages": [_SYSTEM, _ASK]},
        "a chat of two turns": {"messages": [_ASK, _ANSWER, _ASK]},
        "a chat with tools": {"messages": [_ASK], "tools": [_TOOL]},  # asked last
    }
)


class _Reply(msgspec.Struct):
    tokens: list[int]


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class Difference(NamedTuple):
    """A difference between a worker's token ids of a prompt and the router's. Lifetime: call."""

    description: str  # for people
    tools: bool  # only where a chat has tools


@dataclass(frozen=True, slots=True)
class ProbeTerms:
    """The intervals of probing, in seconds. Lifetime: process, replaced on reload."""

    every_s: float  # between two looks for workers that joined
    timeout_s: float  # of one request
    recheck_s: float  # until a worker that differed is asked again


class TokenProbe:
    """Compares each worker's token ids of fixed prompts with the router's. Lifetime: process.

    `clock` returns seconds; `now_s` is the wall clock, for templates that print the date.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        fleet: FleetManager,
        encoders: Encoders,
        check: TokenCheck,
        clock: Callable[[], float],
        now_s: Callable[[], float],
        terms: Callable[[], ProbeTerms],
    ) -> None:
        self._http = http
        self._fleet = fleet
        self._encoders = encoders
        self._check = check
        self._clock = clock
        self._now_s = now_s
        self._terms = terms
        self._probed: dict[int, object] = {}  # by worker: the recognition result at its probe
        self._again_s: dict[int, float] = {}  # by worker that differed: when to ask it again

    async def run(self) -> None:
        """Probe every worker that joins, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._terms().every_s)

    async def look(self) -> None:
        """Probe the workers that were not probed since they were recognized, and those whose next
        probe is due.
        """
        members = self._fleet.members
        for gone in self._probed.keys() - members.keys():
            del self._probed[gone]
            self._again_s.pop(gone, None)
            self._check.forget(gone)
        now_s = self._clock()
        due = [
            member
            for member in members.values()
            if member.ready
            and (
                self._probed.get(member.worker_id) is not member.recognized
                or now_s >= self._again_s.get(member.worker_id, np.inf)
            )
        ]
        answers = await asyncio.gather(*map(self._probe, due), return_exceptions=True)
        for member, error in zip(due, answers, strict=True):
            if isinstance(error, Exception):  # a defect here must not end the router
                log.error("worker %d: token check broke", member.worker_id, exc_info=error)

    async def _probe(self, member: Member) -> None:
        recognized, worker_id = member.recognized, member.worker_id
        if recognized is None:
            return
        self._probed[worker_id] = recognized
        encoder = self._encoders.of(recognized.kind)
        if encoder is None:
            return
        renders = self._encoders.is_rendering(recognized.kind)
        self._again_s.pop(worker_id, None)
        for model in recognized.facts.models[:_MODELS_A_WORKER]:
            try:
                difference = await self._difference(member.spec.url, model, encoder, renders)
            except (aiohttp.ClientError, TimeoutError, _NoAnswerError) as error:
                log.debug("worker %d tells no token ids: %r", worker_id, error)
                return
            of_tools = difference is not None and difference.tools
            told = None if difference is None else difference.description
            self._check.probed(model, worker_id, None if of_tools else told)
            self._check.probed_tools(model, worker_id, told if of_tools else None)
            if difference is not None:
                self._again_s[worker_id] = self._clock() + self._terms().recheck_s

    async def _difference(
        self, url: str, model: str, encoder: PromptEncoder, renders: bool
    ) -> Difference | None:
        """Return how the worker's token ids differ from the router's, in numbers; None if they are
        equal.

        `renders` True means that the worker is asked to render chats, because its /tokenize does
        not return the ids that it serves. Raises _NoAnswerError if the worker answers none of the
        probes.
        """
        answers = refusals = 0
        for name, body, own in self._probes(encoder):
            body = {"model": model} | body
            if renders and "messages" in body:
                theirs = await self._rendered(url, body)
            else:
                theirs = await self._tokenized(url, body)
            if theirs is None:
                refusals += 1
                if refusals == _REFUSALS and not answers:
                    break
                continue
            answers += 1
            if own.tolist() != theirs:
                told = f"{name} has {len(own)} tokens by our count, {len(theirs)} by its own"
                told += " that differ" if len(own) == len(theirs) else ""
                return Difference(told, "tools" in body)
        if not answers:
            raise _NoAnswerError
        return None

    def _probes(self, encoder: PromptEncoder) -> Iterator[tuple[str, dict[str, Any], Tokens]]:
        """Yield the name, the request's body and the router's token ids of each probe that the
        router can encode.
        """
        for special in (True, False):
            body = {"prompt": TEXT, "add_special_tokens": special}
            yield "a text", body, encoder.encode(TEXT, special)
        for name, fields in CHATS.items():
            try:
                chat = Chat(messages=fields["messages"], tools=fields.get("tools"))
                own = encoder.encode_chat(chat, self._now_s())
            except PromptError:  # such chats are placed by text anyway
                continue
            yield name, {**fields, "add_generation_prompt": True}, own

    async def _tokenized(self, url: str, body: dict[str, Any]) -> list[int] | None:
        """Return the worker's token ids from /tokenize; None if it refuses, or if its answer is
        unusable.

        An empty list counts as no answer: llama.cpp expects the text in a field `content`, and
        finds none in this request.
        """
        reply = await self._post(f"{url}/tokenize", body, _Reply)
        return None if reply is None else reply.tokens or None

    async def _rendered(self, url: str, body: dict[str, Any]) -> list[int] | None:
        """Return the token ids that the worker would compute for the chat; None if it does not
        render chats.
        """
        reply = await self._post(f"{url}{_RENDER}", body, _Rendered)
        return None if reply is None else reply.token_ids or None

    async def _post(self, url: str, body: dict[str, Any], shape: type[T]) -> T | None:
        timeout = aiohttp.ClientTimeout(total=self._terms().timeout_s)
        data = msgspec.json.encode(body)
        try:
            reply = await fetch(self._http, url, timeout, method="POST", data=data)
            return decoded(reply.body, shape, url) if reply.status == 200 else None
        except WireError:
            return None


class _NoAnswerError(Exception):
    """Raised when a worker has no /tokenize, or refuses all probes."""
