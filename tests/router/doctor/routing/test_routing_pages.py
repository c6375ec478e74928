"""Tests of strange, incomplete or hostile pages of routers and engines: they give facts, or one
error.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.doctor.report import DoctorError
from router.doctor.routing.examine import RoutingOptions, examine_routing
from router.doctor.routing.tokens import ComparedTokens, compared_tokens, fixed_prompts
from tests.tokenizer_folder import write_model

WORKER: dict[str, Any] = {
    "id": 0,
    "state": "ready",
    "kind": "vllm",
    "block_size": 16,
    "told_block_size": 16,
    "events": "tcp://127.0.0.1:5557",
    "kv_known": True,
}
GOOD = {
    "/workers": b"",  # made for each server
    "/explain": b'{"decisions": []}',
    "/policy": b'{"policy": "warmset", "deciding": "warmset"}',
    "/metrics": b"warmroute_decisions_total 0\n",
    "/v1/models": b'{"data": [{"id": "m", "parent": null}]}',
    "/server_info": b"{}",
    "/kv_event_sources": b'{"0": {"endpoint": "tcp://127.0.0.1:5557"}}',
}
OPTIONS = RoutingOptions(seconds=0.1, timeout_s=2.0, again="again")
OF_ROUTER = ("/workers", "/explain", "/policy")


class FakePages:
    """A router and its engine, both at one address. Lifetime: test."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.server = TestServer(web.Application())
        self.server.app.router.add_route("*", "/{path:.*}", self._page)

    async def _page(self, request: web.Request) -> web.Response:
        body = self.pages.get(request.path)
        return web.Response(status=404) if body is None else web.Response(body=body)

    async def run_doctor(self, **other: bytes) -> tuple[int, str]:
        """Replace some good pages by these and run the doctor; return its exit status and text."""
        url = str(self.server.make_url("")).rstrip("/")
        workers = json.dumps({"workers": [WORKER | {"url": url}]}).encode()
        self.pages = GOOD | {"/workers": workers} | {f"/{k}": v for k, v in other.items()}
        report = await examine_routing([url], OPTIONS)
        json.dumps(report.shown(), allow_nan=False)
        return report.status, report.text()


async def test_valid_pages_give_no_findings() -> None:
    pages = FakePages()
    async with pages.server:
        assert (await pages.run_doctor())[0] == 0


async def test_an_invalid_router_page_is_one_error() -> None:
    pages = FakePages()
    async with pages.server:
        for name in (path[1:] for path in OF_ROUTER):
            for body in (b"", b"null", b"[]", b"{", b"[" * 100_000, b"3", b"\xff"):
                with pytest.raises(DoctorError):
                    await pages.run_doctor(**{name: body})
        with pytest.raises(DoctorError, match="metrics line 1"):
            await pages.run_doctor(metrics=b'warmroute_tokenizer_exact{model="m"} x\n')


async def test_random_engine_pages_raise_no_error() -> None:
    draw = random.Random(11)
    pages = FakePages()
    parts = (b'{"0":', b"null", b"}", b"[", b'"endpoint"', b":", b'"tcp://x:1"', b"1e999", b"\xff")
    async with pages.server:
        for _ in range(12):
            body = b"".join(draw.choice(parts) for _ in range(draw.randrange(8)))
            name = draw.choice(["kv_event_sources", "server_info"])
            status, text = await pages.run_doctor(**{name: body})
            assert status in (0, 1)
            assert text


def test_token_ids_of_the_tokenizer_folder_are_compared_with_an_engines(tmp_path: Path) -> None:
    prompts = fixed_prompts(write_model(tmp_path), 0.0)
    assert [one.chat for one in prompts] == [False, False, True, True, True]
    told = ComparedTokens()
    for one in prompts:
        told += compared_tokens(one, json.dumps({"tokens": one.own}).encode())
        told += compared_tokens(one, json.dumps({"tokens": [*one.own, 1]}).encode())
        for broken in (b"", b"{}", b"[", b'{"tokens": null}'):
            told += compared_tokens(one, broken)
    assert told == ComparedTokens(4, 2, 6, 3)
    with pytest.raises(ValueError, match="No such file"):
        fixed_prompts(tmp_path / "none", 0.0)
