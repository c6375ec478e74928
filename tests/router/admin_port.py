"""An admin port for tests, in front of a fleet of fake workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from policies.facts import WorkerChange, WorkerFacts
from router.assembly import Router
from router.settings.schema import Config, Limits
from tests.router.core.core_world import BLOCK
from tests.router.fleet.fleet_support import admin_port

URL = "http://127.0.0.1:9"
BODY_BYTES = 4096


@dataclass
class Admin:
    """The admin port of a router with fake workers. Lifetime: test."""

    router: Router
    url: str
    http: aiohttp.ClientSession

    async def request(
        self, method: str, path: str, body: Any = None, **kwargs: Any
    ) -> tuple[int, Any]:
        if body is not None:
            kwargs["json"] = body
        async with self.http.request(method, self.url + path, **kwargs) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text else None

    async def join(self, spec: Any = URL) -> int:
        """Add a worker to the core, although no server listens at its address; return its id."""
        status, row = await self.request("POST", "/workers", spec)
        assert status == 201, row
        facts = WorkerFacts(name=URL, models=("m",), block_size=BLOCK, has_events=False)
        self.router.dispatcher.handle_fact(WorkerChange(0.0, row["id"], "ready", facts))
        return int(row["id"])


@asynccontextmanager
async def admin() -> AsyncIterator[Admin]:
    async with aiohttp.ClientSession() as http:
        router = Router(Config(limits=Limits(workers=2, body_bytes=BODY_BYTES)), http)
        try:
            async with admin_port(router) as url:
                yield Admin(router, url, http)
        finally:
            await router.aclose()
