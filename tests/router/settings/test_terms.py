"""Tests that a reload of the configuration gives each part the values that it needs."""

from __future__ import annotations

import aiohttp
import msgspec

from router.assembly import Router
from router.migration.stream import Migrations
from router.settings.schema import Config


async def test_a_reload_reaches_every_part() -> None:
    config = Config(session_header="x-one")
    async with aiohttp.ClientSession() as http:
        router = Router(config, http)
        assert router.inference.reader.terms.identity.session_header == "x-one"
        assert router.inference.attempts.movers is None
        migration = msgspec.structs.replace(config.migration, moves=3)
        new = {"session_header": "x-other", "forward_token_ids": True, "migration": migration}
        assert router.apply(msgspec.structs.replace(config, **new)) == []
        attempts = router.inference.attempts
        assert router.inference.reader.terms.identity.session_header == "x-other"
        assert attempts.terms.forward_token_ids
        assert isinstance(attempts.movers, Migrations)
        assert attempts.movers.terms.moves == 3
        await router.aclose()
