"""Puts TLS between client and router and between router and worker, in tests that are written for
plain TCP.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from functools import partialmethod

import pytest

from router.http.tls import server_tls, worker_tls
from router.upstream.fallback import Upstream
from tests.certs import Authority
from tests.router import relay_support


@dataclass(frozen=True, slots=True)
class Sides:
    """The TLS contexts of server, client and router. A test module has one set of them."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    router: ssl.SSLContext  # towards workers


def sides_of(authority: Authority) -> Sides:
    files = authority.port(authority.signed("server"))
    return Sides(server_tls(files), authority.client(), worker_tls(authority.workers()))


def tls_everywhere(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch asyncio so that all servers listen with TLS and all clients connect with TLS."""
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
