"""Tests of where the rules of model names apply while a request is read, and where the body stays
unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from router.assembly import Router
from router.body.paths import OTHER, PATHS, Path
from router.config.extras import NameSettings
from router.http.errors import ClientError
from router.http.parser import Fields
from router.keys.key_file import KeyTerms
from router.request.reading import Understood
from router.settings.schema import Config

EMBED = PATHS["/v1/embeddings"]
BODY = b'{"input":"x", "model":"a"}'
RENAMED = b'{"input":"x", "model":"m"}'
NAMES = NameSettings(aliases=("a=m@v1", "same=same@v2"), missing_model="refuse")


@asynccontextmanager
async def router_of(names: NameSettings) -> AsyncIterator[Router]:
    async with aiohttp.ClientSession() as http:
        router = Router(Config(port=0, admin_port=0, names=names), http)
        yield router
        await router.aclose()


async def read(
    router: Router, body: bytes = BODY, path: Path = EMBED, edits: bool = True, models: str = ""
) -> Understood:
    key = KeyTerms(models=(models,) if models else ())
    reader = router.inference.reader
    return await reader.arrival(body, path, Fields(b"POST / HTTP/1.1\r\n\r\n"), key, edits=edits)


async def test_names_apply_only_if_the_router_writes_the_body() -> None:
    async with router_of(NAMES) as router:
        found = await read(router)
        assert (found.arrival.model, found.arrival.revision, found.body) == ("m", "v1", RENAMED)
        for path, edits in ((EMBED, False), (OTHER, True)):  # a data plane; paths passed on
            found = await read(router, path=path, edits=edits)
            assert (found.arrival.revision, found.body, found.name) == (None, BODY, None)


async def test_a_name_that_only_selects_a_revision_does_not_change_the_body() -> None:
    body = BODY.replace(b'"a"', b'"same"')
    async with router_of(NAMES) as router:
        found = await read(router, body)
        assert found.body is body
        assert (found.arrival.model, found.arrival.revision) == ("same", "v2")


async def test_without_rules_the_body_stays_unchanged() -> None:
    async with router_of(NameSettings()) as router:
        assert router.service.names is None
        found = await read(router)
        assert found.body is BODY
        assert found.name is None


async def test_keys_are_checked_against_both_names_and_a_model_is_required() -> None:
    async with router_of(NAMES) as router:
        for allowed in ("a", "m"):
            assert (await read(router, models=allowed)).arrival.model == "m"
        with pytest.raises(ClientError, match="may not use the model 'a'"):
            await read(router, models="other")
        with pytest.raises(ClientError, match="`model` is missing"):
            await read(router, b'{"input":"x"}')


async def test_the_model_in_a_long_body_is_renamed() -> None:
    long = BODY.replace(b'"x"', b'"%b"' % (b"x" * 200_000))
    async with router_of(NAMES) as router:
        found = await read(router, long)
        assert found.body == long.replace(b'"a"', b'"m"')


async def test_requests_no_longer_wait_for_models_of_removed_names() -> None:
    async with router_of(NAMES) as router:
        assert "m" in router.waiting.known
        assert router.apply(msgspec.structs.replace(router.config, names=NameSettings())) == []
        assert "m" not in router.waiting.known
