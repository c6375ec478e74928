"""Parts of a router that tests run alone: a fleet manager without a core, and an admin port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import zmq.asyncio

from router.assembly import Router
from router.fleet.context import FleetContext, FleetTerms, WorkerFact
from router.fleet.manager import FleetManager
from router.http.reply import RelayLimits
from router.server.listener import AdminListener
from router.settings.ports import admin_port_settings


@asynccontextmanager
async def fleet_of(max_workers: int) -> AsyncIterator[tuple[FleetManager, list[WorkerFact]]]:
    """Yield a fleet manager that probes its workers 50 times a second, and ends with the block."""
    others, told = asyncio.all_tasks(), list[WorkerFact]()
    context = zmq.asyncio.Context()
    terms = FleetTerms(0.5, 0.02, 0.02, 100, RelayLimits())
    async with aiohttp.ClientSession() as http:
        shared = FleetContext(http, context, time.monotonic, told.append, terms)
        manager = FleetManager(shared, max_workers)
        yield manager, told
        await manager.aclose()
        assert not manager.members
    context.destroy(linger=0)
    left = asyncio.all_tasks() - others
    assert [task for task in left if task.get_name().startswith("worker")] == []


@asynccontextmanager
async def admin_port(router: Router) -> AsyncIterator[str]:
    """Yield the URL of a router's admin port on a free port."""
    config = msgspec.structs.replace(router.config, admin_port=0)
    listener = AdminListener(lambda: admin_port_settings(config))
    try:
        yield await listener.listen(router.admin)
    finally:
        await listener.server.aclose(0.0)  # who is still connected has all that it asked for
