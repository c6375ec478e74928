"""The relay's own tests once more, with TLS between client and router, and router and worker."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from functools import partialmethod

import pytest

from router.http.tls import server_tls, worker_tls
from router.upstream.fallback import Upstream
from tests.router.upstream import relay_support
from tests.router.upstream.test_relay_client import *  # noqa: F403
from tests.router.upstream.test_relay_failures import *  # noqa: F403
from tests.router.upstream.test_relay_replies import *  # noqa: F403
from tests.router.upstream.test_relay_slow_client import *  # noqa: F403
from tests.server.certs import Authority


@dataclass(frozen=True, slots=True)
class Sides:
    """The TLS contexts of server and client. A test module has one."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    router: ssl.SSLContext  # towards workers


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> Sides:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    files = authority.port(authority.signed("server"))
    return Sides(server_tls(files), authority.client(), worker_tls(authority.workers()))


@pytest.fixture
def both_paths() -> None:
    """Over TLS there is one path only, that in Python."""


# A worker that never reads gets no request over TLS, for it answers no handshake.
NOT_OVER_TLS = ("test_a_worker_that_stops_taking_the_request_is_late_in_that_phase",)


@pytest.fixture(autouse=True)
def tls_everywhere(sides: Sides, monkeypatch, request) -> None:
    """Whatever listens does so with TLS, whatever connects expects it."""
    if request.node.originalname in NOT_OVER_TLS:
        pytest.skip("there is no such failure over TLS")
    client = {"ssl": sides.client, "server_hostname": "localhost"}
    start_server, open_connection = asyncio.start_server, asyncio.open_connection

    async def starting(*arguments, **options):
        return await start_server(*arguments, ssl=sides.server, **options)

    async def opening(*arguments, **options):
        return await open_connection(*arguments, **(options | client))

    monkeypatch.setattr(asyncio, "start_server", starting)
    monkeypatch.setattr(asyncio, "open_connection", opening)
    monkeypatch.setattr(Upstream, "__init__", partialmethod(Upstream.__init__, tls=sides.router))
    monkeypatch.setattr(relay_support, "TLS", sides.server)
