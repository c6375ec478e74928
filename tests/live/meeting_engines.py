"""Disaggregated workers that find each other: SGLang, and vLLM with MooncakeConnector, as real HTTP
servers.

A request arrives at the prefill and the decode worker at once. The decode worker finds the prefill
worker over the network by what its request body says, and neither gives up soon by itself: the
minutes that real workers wait are `PATIENCE_S` here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tests.live.stack import MODEL
from tests.served_app import served_app

PATIENCE_S = 30.0  # really 300 s or 480 s; a router that waited so long would fail these tests
FIRST, REST = " P", (" D1", " D2")  # the answer's text: the prefill worker makes the first token
_JSON = "application/json"
Faults = list[str]


@dataclass
class Room:
    """The KV of one request that a prefill worker keeps for a decode worker.

    Lifetime: until the KV was fetched, or failed.
    """

    joined: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, why: str) -> None:
        """End the transfer: `why` is the reason of its failure, or "" if the KV was fetched."""
        if not self.over.done():
            self.over.set_result(why)


class MeetingWorker:
    """One prefill or decode worker of either engine.

    Each request takes the next of `faults`: "" (none), a status, "hang", "close" (before the first
    byte), "break" (after it), "late" (a prefill that fails after its KV was fetched). Lifetime:
    test.
    """

    def __init__(self, role: str, ranks: int = 1) -> None:
        self.role, self.ranks = role, ranks
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.faults: Faults = []
        self.running = 0
        self.left_s: list[float] = []  # when a peer hung up
        self.gate = asyncio.Event()  # closed: the second token of an answer waits
        self.gate.set()
        self.deaf = False  # it decodes, but no KV reaches it
        self.late = asyncio.Event()  # set: faults that come late happen now
        self.began = asyncio.Event()  # a request came
        self.rooms: dict[str, Room] = {}
        self.url = self.bootstrap = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[MeetingWorker]:
        """Run both servers of the worker during the block: the API and the bootstrap server."""
        app, bootstrap = web.Application(), web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._well)
        app.router.add_get("/version", self._version)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/pd_role_switch", self._switch)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._serve)
        bootstrap.router.add_get("/query", self._query)
        bootstrap.router.add_post("/fetch", self._fetch)
        options = {"handler_cancellation": True}
        async with served_app(app, **options) as url, served_app(bootstrap, **options) as met:
            self.url, self.bootstrap = url, met
            async with aiohttp.ClientSession() as self.http:
                yield self

    @property
    def bootstrap_port(self) -> int:
        return int(self.bootstrap.rpartition(":")[2])

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _well(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.0"})

    async def _info(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def _switch(self, request: web.Request) -> web.Response:
        """Switch the role as SGLang does with `--enable-pd-role-switch`: only while no request
        runs.
        """
        if self.running:
            said = {"success": False, "message": "the engine is not idle"}
            return web.json_response(said, status=400)
        self.role = (await request.json())["new_role"]
        return web.json_response({"success": True, "new_role": self.role})

    async def _query(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.running += 1
        self.began.set()
        try:
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "hang":
                await asyncio.sleep(PATIENCE_S)
            if fault == "close":
                return self._cut(request)
            if fault.isdecimal():
                return failed("out of order", int(fault))
            return await self._answer(request, json.loads(body), fault)
        except asyncio.CancelledError:
            self.left_s.append(asyncio.get_running_loop().time())
            raise
        finally:
            self.running -= 1

    def _cut(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        raise NotImplementedError

    async def _fetch(self, request: web.Request) -> web.Response:
        """Serve a decode worker that fetches KV computed here; the KV is dropped when that worker
        hangs up.
        """
        room = self.rooms.get(request.query["room"])
        if room is None:
            for _ in range(int(PATIENCE_S / 0.01)):  # the request may come before the other leg
                await asyncio.sleep(0.01)
                if room := self.rooms.get(request.query["room"]):
                    break
            else:
                return web.Response(status=404)
        room.joined.set()
        try:
            why = await asyncio.shield(room.over)
        except asyncio.CancelledError:
            room.end("the transfer was aborted by the other worker")
            raise
        self.rooms.pop(request.query["room"], None)
        return web.Response(status=500 if why else 200, text=why)

    async def fetched(self, address: str, room: str) -> str:
        """Fetch KV from another worker; return why it failed, or "" if it succeeded."""
        if self.deaf:
            await asyncio.sleep(PATIENCE_S)
            return f"timed out after {PATIENCE_S} s"
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        try:
            where = f"{address}/fetch"
            async with self.http.post(where, params={"room": room}, timeout=timeout) as reply:
                return "" if reply.status == 200 else await reply.text() or "handshake failed"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"handshake failed: {error!r}"

    async def answered(
        self, request: web.Request, asked: dict[str, Any], words: tuple[str, ...], fault: str
    ) -> web.StreamResponse:
        """Write the whole answer to a request, streamed or not."""
        usage = {"prompt_tokens": 9, "completion_tokens": len(words)}
        if not asked.get("stream"):
            if fault == "break":
                reply = web.StreamResponse(headers={"Content-Length": "1000"})
                await reply.prepare(request)
                await reply.write(b'{"choices"')
                return self._cut(request)
            await self.gate.wait()
            choice = {"text": "".join(words), "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for number, word in enumerate(words):
            if number == 1:
                await self.gate.wait()
                if fault == "break":
                    return self._cut(request)
            event = json.dumps({"choices": [{"text": word}]})
            await reply.write(f"data: {event}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply


def failed(why: str, status: int = 500) -> web.Response:
    return web.json_response(
        {"error": {"message": why, "type": "error", "code": status}}, status=status
    )


class SGLang(MeetingWorker):
    """SGLang 0.5.23: each request has a room, under which its KV is kept, and a prefill is answered
    once its KV was fetched.
    """

    async def _info(self, request: web.Request) -> web.Response:
        mode = {"both": "null"}.get(self.role, self.role)
        return web.json_response(
            {
                "page_size": 16,
                "max_total_num_tokens": 400_000,
                "internal_states": [],
                "dp_size": self.ranks,
                "version": "0.5.23",
                "kv_cache_dtype": "auto",
                "load_balance_method": "auto",
                "disaggregation_mode": mode,
                "disaggregation_bootstrap_port": self.bootstrap_port,
                "disaggregation_transfer_backend": "mooncake",
            }
        )

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        if self.role == "both":
            return await self.answered(request, asked, (FIRST, *REST), fault)
        room = asked.get("bootstrap_room")
        if not isinstance(room, int) or not 0 <= room < 2**53:
            return failed("Disaggregated request received without bootstrap room id", 400)
        if self.role == "decode":
            host, port = asked["bootstrap_host"], asked["bootstrap_port"]
            if why := await self.fetched(f"http://{host}:{port}", str(room)):
                return failed(f"KVTransferError(bootstrap_room={room}): {why}")
            return await self.answered(request, asked, (FIRST, *REST), fault)
        named = self.headers[-1].get("x-data-parallel-rank")
        if named is not None and int(named) != room % self.ranks:
            return failed(f"rank {named} contradicts bootstrap room {room}", 400)
        return await self._prefilled(request, asked, str(room), fault)

    async def _prefilled(
        self, request: web.Request, asked: dict[str, Any], name: str, fault: str
    ) -> web.StreamResponse:
        if name in self.rooms:
            return failed(f"duplicate bootstrap room {name}", 400)
        room = self.rooms[name] = Room()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await room.joined.wait()
            room.end("")
            if fault == "late":
                await self.late.wait()
                return failed("out of order when all was sent")
            return await self.answered(request, asked | {"stream": False}, (FIRST,), "")
        except TimeoutError:
            return failed("KVTransferError: bootstrap timed out")
        finally:
            room.end("the transfer was aborted by the other worker")
            self.rooms.pop(name, None)


class Mooncake(MeetingWorker):
    """vLLM 0.33 with MooncakeConnector: each request has an id for its transfer. A prefill is
    answered once it was computed, and its KV waits to be fetched.
    """

    def __init__(self, role: str, ranks: int = 1) -> None:
        super().__init__(role, ranks)
        self.engine_ids = [f"engine-{role}-{rank}" for rank in range(ranks)]

    async def _query(self, request: web.Request) -> web.Response:
        rows = {
            str(n): {"engine_id": name, "worker_addr": {}} for n, name in enumerate(self.engine_ids)
        }
        return web.json_response(rows)

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        params = asked.get("kv_transfer_params")
        if params is None:
            return await self.answered(request, asked, (FIRST, *REST), fault)
        name = params["transfer_id"]
        if params["do_remote_prefill"]:
            return await self._decoded(request, asked, params, fault)
        rank = int(self.headers[-1].get("x-data-parallel-rank", 0))
        if asked["max_tokens"] == 1 and asked["ignore_eos"] is True:
            room = self.rooms[f"{self.engine_ids[rank]}:{name}"] = Room()
            room.end("")
        if fault == "late":
            await self.late.wait()
            return failed("out of order when all was computed")
        return await self.answered(request, asked, (FIRST,), "")

    async def _decoded(
        self, request: web.Request, asked: dict[str, Any], params: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        address = params["remote_bootstrap_addr"]
        async with self.http.get(f"{address}/query") as reply:
            known = {row["engine_id"] for row in (await reply.json()).values()}
        if params["remote_engine_id"] not in known:
            return failed("handshake with an engine that is not there")
        room = f"{params['remote_engine_id']}:{params['transfer_id']}"
        if why := await self.fetched(address, room):
            return failed(f"transfer failed: {why}")
        return await self.answered(request, asked, (FIRST, *REST), fault)
