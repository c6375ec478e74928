"""Answers the KServe v2 requests that are not inference, as if all servers were one.

The behaviour follows triton-inference-server/server, `docs/protocol` (statistics, model
repository). What is the same at all servers of a model is answered by any of them; statistics are
summed. Requests that would change or read a single host are refused. Loading and unloading of
models is allowed if the operator enables it, and is then done at all servers.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from engine.wire.events import WireError
from router.engines.adapter import MAX_METRICS_BYTES, EngineReply, fetch
from router.engines.table import adapter_of
from router.engines.triton_inputs import USUAL, Roles, overridden
from router.fleet.member import Member
from router.http.errors import ClientError
from router.http.messages import Request, Response, json_response
from router.keys.key_file import KeyTerms
from router.kserve.http import (
    PREFIX,
    HttpTarget,
    is_kserve,
    target_of,
    tritons_error,
    unknown_model,
)
from router.request.quotas import Tenants, check_model
from router.request.service import Service

_ASKED_S = 5.0  # a server's answer may take
_LOAD_S = 1_800.0  # for loading a model
_AT_ONCE = 16  # servers that are asked
_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]{1,1024})(?P<version>/versions/[0-9]{1,20})?(?P<what>/[a-z]+)?"
)
_INDEX = re.compile(r"/v2/repository(/[^/]+)?/index")
_LOAD = re.compile(r"/v2/repository/models/(?P<model>[^/]{1,1024})/(?P<verb>load|unload)")
_LOADS = re.compile(r"/v2/repository/.*load")
_NEWEST = frozenset({"last_inference"})  # of statistics: not a sum
_OF_ONE_HOST = "shared memory is of one host, and this address stands for several servers"
_WHY_CHARS, _NAMED = 300, 16  # of a server's refusal; servers whose refusals are shown
_OFF = "this router passes on no settings; send this to each server itself"


log = logging.getLogger(__name__)


class KservePort:
    """Answers requests to KServe's paths; a `router.request.dialect.Dialect`. Lifetime: process."""

    def __init__(self, service: Service, tenants: Tenants, http: aiohttp.ClientSession) -> None:
        self._service = service
        self._tenants = tenants
        self._http = http
        self._inputs: Mapping[str, Mapping[str, str]] = {}  # by model, as configured
        self._loads = False  # some keys may load and unload models
        self._checked_version = -1  # the workers' version when `_inputs` were last compared
        self._wrong_inputs: frozenset[str] = frozenset()  # what was wrong with them then
        # Loads that continue even if their callers no longer wait.
        self._changes: set[asyncio.Task[Response]] = set()

    def renew(self, inputs: Mapping[str, Mapping[str, str]], loads: bool) -> None:
        """Set which inputs of each model have which role, and whether clients may load models."""
        self._inputs, self._loads = inputs, loads
        self._checked_version = -1

    def check_inputs(self) -> None:
        """Log which `triton_inputs` name no model or input that exists, each once. Called on every
        tick.
        """
        version = self._service.dispatcher.core.workers.version
        if version == self._checked_version:
            return
        self._checked_version = version
        wrong = frozenset(self._find_wrong_inputs())
        for line in sorted(wrong - self._wrong_inputs):
            log.warning("triton_inputs: %s", line)
        self._wrong_inputs = wrong

    def _find_wrong_inputs(self) -> Iterator[str]:
        """Yield a text for each name in `triton_inputs` that does not exist, as far as is known."""
        known = [member.recognized for member in self._members(None)]
        served = sorted({model for one in known if one is not None for model in one.facts.models})
        unknown = any(one.recognized is None for one in self._service.fleet.members.values())
        for model, given in self._inputs.items():
            if model not in served:
                if served and not unknown:
                    yield f"no worker serves the model {model!r}; models: {_listed(served)}"
                continue
            roles = [one.roles[model] for one in known if one is not None and model in one.roles]
            there = sorted({name for one in roles for name in one.there})
            for role, name in given.items():
                if there and name and name not in there:
                    yield (
                        f"the model {model!r} has no input {name!r}, which "
                        f"'{model}:{role}={name}' names; its inputs: {_listed(there)}"
                    )

    def has(self, path: str) -> bool:
        return is_kserve(path)

    def target_of(self, path: str) -> HttpTarget | None:
        return target_of(path, self.roles_of)

    def error(self, path: str, body: bytes) -> bytes:
        target = target_of(path)
        return tritons_error(body, None if target is None else target.model)

    def roles_of(self, model: str) -> Roles:
        """Return the roles of a model's inputs, by its servers' configurations and the operator's
        settings, or else by the inputs' names.
        """
        known = (member.recognized for member in self._service.fleet.members.values())
        told = (one.roles[model] for one in known if one is not None and model in one.roles)
        return overridden(next(told, USUAL), self._inputs.get(model, {}))

    async def answer(self, request: Request) -> Response:
        """Return the answer to a request that is not inference. Raises ClientError."""
        path = request.path
        if path in ("/v2/health/live", "/v2/health/ready"):
            well = path.endswith("live") or self._service.takes_any()
            return Response(200 if well else 400, content_type="text/plain")
        terms = self._tenants.key_of(request).terms
        if path.startswith(("/v2/systemsharedmemory", "/v2/cudasharedmemory")):
            raise ClientError(400, _OF_ONE_HOST)
        if self._loads and (load := _LOAD.fullmatch(path)) is not None:
            return await self._change(request, load["model"].replace("%2F", "/"), load["verb"])
        if _LOADS.fullmatch(path) or "/trace/" in path or path == "/v2/logging":
            raise ClientError(400, _OFF)
        if path == PREFIX:
            return json_response(await self._server())
        if path == "/v2/models/stats":
            return await self._statistics(self._members(None), path, terms)
        if _INDEX.fullmatch(path):
            return await self._index(request, terms)
        found = _MODEL.fullmatch(path)
        if found is None:
            raise ClientError(404, "Not Found")
        model = found["model"].replace("%2F", "/")
        check_model(terms, model)
        members = self._members(model)
        if not members:
            raise _absent(model, found["what"])
        asked = f"/v2/models/{quote(model, safe='')}{found['version'] or ''}{found['what'] or ''}"
        if found["what"] == "/stats":
            return await self._statistics(members, asked, terms)
        if found["what"] not in (None, "/ready", "/config"):
            raise ClientError(404, "Not Found")
        return await self._any(members, asked)

    def servers_of(self, model: str, request: Request) -> list[Member]:
        """Return the servers of a model, if the client's key allows the model. Raises ClientError
        if there are none.
        """
        check_model(self._tenants.key_of(request).terms, model)
        if not (members := self._members(model)):
            raise _absent(model, None)
        return members

    def awaits_grpc(self, model: str) -> bool:
        """Return whether nobody answers where a server of the model should speak gRPC."""
        known = (member.recognized for member in self._members(model))
        return any("://" not in at for one in known if one is not None for at in one.silent)

    def _members(self, model: str | None) -> list[Member]:
        """Return the recognized servers that support KServe, for one model or all; those that
        accept requests come first.
        """
        found = [
            member
            for member in self._service.fleet.members.values()
            if (known := member.recognized) is not None
            and adapter_of(known.kind).speaks_kserve
            and (model is None or model in known.facts.models)
        ]
        found.sort(key=lambda member: not member.ready)
        return found

    async def _any(self, members: Sequence[Member], path: str) -> Response:
        """Ask the servers one after another, and return the first good answer, or else the last
        answer.
        """
        last: EngineReply | None = None
        for member in members:
            try:
                last = await self._fetch(member, path)
            except (WireError, aiohttp.ClientError, TimeoutError):
                continue
            if last.status == 200:
                break
        if last is None:
            return Response(503, msgspec.json.encode({"error": "no server answered"}))
        kind = "application/json" if last.body else "text/plain"
        return Response(last.status, last.body, content_type=kind)

    async def _fetch(
        self,
        member: Member,
        path: str,
        method: str = "GET",
        data: bytes | None = None,
        within_s: float = _ASKED_S,
    ) -> EngineReply:
        timeout = aiohttp.ClientTimeout(total=within_s)
        url = f"{member.spec.url}{path}"
        return await fetch(self._http, url, timeout, MAX_METRICS_BYTES, method, data)

    async def _each(
        self, members: Iterable[Member], path: str, method: str = "GET", data: bytes | None = None
    ) -> list[Any]:
        """Ask all servers, and return their good answers as parsed JSON."""
        few = asyncio.Semaphore(_AT_ONCE)

        async def one(member: Member) -> Any:
            async with few:
                try:
                    reply = await self._fetch(member, path, method, data)
                    return msgspec.json.decode(reply.body) if reply.status == 200 else None
                except (WireError, aiohttp.ClientError, TimeoutError, *_BAD):
                    return None

        answers = await asyncio.gather(*map(one, members))
        return [answer for answer in answers if isinstance(answer, dict | list)]

    async def _change(self, request: Request, model: str, verb: str) -> Response:
        """Load or unload a model at all Triton servers. Raises ClientError. The change is completed
        even if the client leaves.
        """
        if request.method != "POST":
            raise ClientError(405, f"{request.path} takes POST, not {request.method}")
        # Not the tenant that a peer names for its client.
        terms = self._tenants.presented(request).terms
        if terms.models:
            why = f"this API key is for some models only, and {verb} is for all servers"
            raise ClientError(403, why, code="model_not_allowed")
        members = {
            member.spec.url: member
            for member in self._service.fleet.members.values()
            if _may_have_repository(member.kind or member.spec.kind)
        }
        if not members:
            raise ClientError(400, "no Triton is known here")
        log.info("%s of %r at %d servers, by key %r", verb, model, len(members), terms.name)
        path = f"/v2/repository/models/{quote(model, safe='')}/{verb}"
        task = asyncio.create_task(self._changed(list(members.values()), path, request.body, model))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _changed(
        self, members: Sequence[Member], path: str, body: bytes, model: str
    ) -> Response:
        """Return the response to a change of models: 200 if all servers have made it."""
        few = asyncio.Semaphore(_AT_ONCE)

        async def one(member: Member) -> tuple[int, str]:
            async with few:
                try:
                    reply = await self._fetch(member, path, "POST", body or b"{}", _LOAD_S)
                except (WireError, aiohttp.ClientError, TimeoutError) as error:
                    return 500, str(error) or type(error).__name__
            await member.look_again()
            return reply.status, _reason(reply)

        ends = await asyncio.gather(*map(one, members))
        failed = [
            (status, f"{member.spec.url}: {why[:_WHY_CHARS]}")
            for member, (status, why) in zip(members, ends, strict=True)
            if status != 200
        ]
        if not failed:
            return Response(200)
        verb = path.rpartition("/")[2]
        told = "; ".join(why for _, why in failed[:_NAMED])
        more = ", and others" if len(failed) > _NAMED else ""
        why = f"{verb} of {model[:200]!r} failed at {len(failed)} of {len(members)} servers: {told}"
        log.error("%s%s", why, more)
        clients = all(400 <= status < 500 for status, _ in failed)
        return json_response({"error": f"{why}{more}"}, 400 if clients else 500)

    async def _server(self) -> dict[str, Any]:
        """Return the server metadata, limited to what all servers have in common."""
        told = _objects(await self._each(self._members(None), PREFIX))
        lists = [one["extensions"] for one in told if isinstance(one.get("extensions"), list)]
        common = [name for name in lists[0] if all(name in one for one in lists)] if lists else []
        # These extensions concern one host, or are off here.
        off = ["shared_memory", "trace", "logging"]
        off += [] if self._loads else ["model_repository("]
        kept = [name for name in common if isinstance(name, str) and not _has(name, off)]
        return {"name": "warmroute", "version": "2", "extensions": kept}

    async def _statistics(self, members: Sequence[Member], path: str, terms: KeyTerms) -> Response:
        """Return the statistics of the models that the key allows, summed over all servers."""
        told = [one.get("model_stats") for one in _objects(await self._each(members, path))]
        lists = [one for one in told if isinstance(one, list)]
        if not lists:  # the servers' own refusal
            return await self._any(members, path)
        shown = [one for one in merged(lists) if _is_for(terms, one)]
        return json_response({"model_stats": shown})

    async def _index(self, request: Request, terms: KeyTerms) -> Response:
        """Return each model of all servers that the key allows, once; it is ready if one server has
        it ready.
        """
        told = await self._each(self._members(None), request.path, "POST", request.body or b"{}")
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for answer in told:
            for one in answer if isinstance(answer, list) else ():
                if isinstance(one, dict) and _is_for(terms, one):
                    key = one["name"], str(one.get("version", ""))
                    known = found.setdefault(key, one)
                    if known.get("state") != "READY" and one.get("state") == "READY":
                        found[key] = one
        return json_response(list(found.values()))


def _reason(reply: EngineReply) -> str:
    """Return a server's error text for a call that it refused."""
    try:
        return msgspec.json.decode(reply.body, type=_TritonErrorBody).error
    except _BAD:
        return f"status {reply.status}"


class _TritonErrorBody(msgspec.Struct):
    error: str


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _absent(model: str, what: str | None) -> ClientError:
    """Return Triton's error for an unknown model."""
    if what == "/ready":
        return ClientError(400, "Model version not ready")
    if what == "/stats":
        return ClientError(400, f"requested model '{model[:200]}' is not available")
    return ClientError(404, unknown_model(model))


def _is_for(terms: KeyTerms, row: Mapping[str, Any]) -> bool:
    """Return whether a row of statistics or of the index is about a model that the key allows."""
    name = row.get("name")
    return isinstance(name, str) and (not terms.models or terms.allows_model(name))


_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _objects(answers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the answers that are JSON objects."""
    return [one for one in answers if isinstance(one, dict)]


def _has(name: str, words: Iterable[str]) -> bool:
    return any(word in name for word in words)


def merged(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the statistics of several servers, summed for each model and version."""
    found: dict[tuple[Any, Any], Any] = {}
    for rows in lists:
        for row in rows:
            if isinstance(row, dict):
                key = str(row.get("name")), str(row.get("version"))
                found[key] = _sum(found[key], row) if key in found else row
    return list(found.values())


def _sum(one: Any, other: Any, name: str = "", depth: int = 0) -> Any:
    """Return the sum of two servers' statistics: numbers are added, and entries for one batch size
    are merged.
    """
    if depth > 8:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        names = dict.fromkeys((*one, *other))
        return {
            key: _sum(one[key], other[key], key, depth + 1)
            if key in one and key in other
            else one.get(key, other.get(key))
            for key in names
        }
    if isinstance(one, list) and isinstance(other, list):
        return _batches(one, other, depth)
    if _is_number(one) and _is_number(other):
        return max(one, other) if name in _NEWEST else one + other
    return one


def _batches(one: list[Any], other: list[Any], depth: int) -> list[Any]:
    found: dict[Any, Any] = {}
    for batch in (*one, *other):
        size = batch.get("batch_size") if isinstance(batch, dict) else None
        if not _is_number(size):
            return one
        if size in found:
            batch = _sum(found[size], batch, "", depth + 1) | {"batch_size": size}
        found[size] = batch
    return [found[size] for size in sorted(found)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _may_have_repository(kind: str | None) -> bool:
    """Return whether a server may be a Triton, which has a model repository; a server that is not
    recognized yet may be one.
    """
    return kind is None or adapter_of(kind).has_repository
