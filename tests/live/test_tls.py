"""Tests of TLS at both ports and towards workers, with real certificates and the real program."""

from __future__ import annotations

import asyncio
import signal
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from router.http.tls import server_tls
from simulator.live.processes import Programs
from tests.certs import Authority
from tests.live.crowd import Crowd, crowding
from tests.live.stack import engine_arguments, until

MODELS = b'{"object":"list","data":[{"id":"tiny"}]}'
BODY = {"model": "tiny", "prompt": [1, 2, 3]}


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def https_worker(tls: ssl.SSLContext):
    """Run a worker behind TLS that answers every inference request; yield its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [
                    int(x[16:])
                    for x in head.lower().split(b"\r\n")
                    if x[:8] == b"content-" and x.startswith(b"content-length:")
                ]
                await reader.readexactly(length[0] if length else 0)
                body = MODELS if head.startswith(b"GET /v1/models") else b'{"from": "worker"}'
                status = b"200 OK"
                if head.startswith(b"GET") and b"/v1/models" not in head and b"/health" not in head:
                    status = b"404 Not Found"
                writer.write(
                    b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                    % (status, len(body), body)
                )
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def routing(log_dir, *flags: str):
    """Yield a router that runs with these flags."""
    async with Programs(log_dir) as programs:
        arguments = ["serve", "--port", "0", "--admin-port", "0", *flags]
        yield await programs.start("router", "router", arguments)


async def worker_state(http: aiohttp.ClientSession, admin: str, tls) -> dict:
    async with http.get(f"{admin}/workers", ssl=tls) as reply:
        return (await reply.json())["workers"][0]


async def test_tls_works_with_certificates_of_clients_router_and_workers(
    authority, tmp_path
) -> None:
    server, ours = authority.signed("server"), authority.signed("router")
    known, stranger = authority.signed("client"), Authority(tmp_path, "stranger").signed("other")
    flags = [
        *("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca"),
        *(authority.pair.cert, "--admin-tls-cert", server.cert, "--admin-tls-key", server.key),
        *("--workers-tls-ca", authority.pair.cert),
        *("--workers-tls-cert", ours.cert, "--workers-tls-key", ours.key),
    ]
    asking = server_tls(authority.port(authority.signed("worker"), asks=True))
    assert asking is not None
    async with (
        https_worker(asking) as url,
        aiohttp.ClientSession() as http,
        routing(tmp_path, *flags, "--worker", url) as router,
    ):
        admin, tls = router.facts["admin"], authority.client(known)
        assert router.url.startswith("https://")
        assert admin.startswith("https://")

        async def ready() -> bool:
            return (await worker_state(http, admin, authority.client()))["state"] == "ready"

        await until(ready, "the worker to be ready")
        path = f"{router.url}/v1/completions"
        async with http.post(path, json=BODY, ssl=tls) as reply:
            assert (reply.status, await reply.json()) == (200, {"from": "worker"})
        for context in (authority.client(), authority.client(stranger)):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                async with http.post(path, json=BODY, ssl=context) as reply:
                    await reply.read()
        plain = router.url.replace("https", "http")
        with pytest.raises(aiohttp.ClientError):
            async with http.get(f"{plain}/health"):
                pass

        async def counted() -> bool:
            async with http.get(f"{admin}/metrics", ssl=authority.client()) as reply:
                name = 'warmroute_server_refusals_total{reason="bad_handshake"}'
                lines = (await reply.text()).splitlines()
            told = next(line for line in lines if line.startswith(name))
            return float(told.split()[-1]) >= 3  # a client may have tried twice

        await until(counted, "the failed handshakes")


async def test_sighup_applies_new_certificates_and_never_invalid_ones(authority, tmp_path) -> None:
    shown = authority.signed("shown")
    flags = ("--tls-cert", shown.cert, "--tls-key", shown.key)

    def shown_at(url: str) -> str:
        host, port = url.removeprefix("https://").split(":")
        return ssl.get_server_certificate((host, int(port)))

    async with routing(tmp_path, *flags) as router:
        first = await asyncio.to_thread(shown_at, router.url)
        authority.signed("shown")  # the same files with another certificate
        router.process.send_signal(signal.SIGHUP)

        async def renewed() -> bool:
            return await asyncio.to_thread(shown_at, router.url) != first

        await until(renewed, "the new certificate")
        second = await asyncio.to_thread(shown_at, router.url)
        await asyncio.to_thread(Path(shown.key).write_text, "no key at all")
        router.process.send_signal(signal.SIGHUP)

        async def logged() -> bool:
            return "TLS files not read anew" in (tmp_path / "router.log").read_text()

        await until(logged, "the refusal in the log")
        assert await asyncio.to_thread(shown_at, router.url) == second


@pytest.mark.parametrize(
    ("renewals", "rate"),
    [(8, 40.0), pytest.param(300, 80.0, marks=[pytest.mark.full, pytest.mark.timeout(1_200)])],
)
async def test_certificates_that_change_under_load_fail_no_client(
    authority, tmp_path, renewals, rate
) -> None:
    """Certificates that change under load fail no client; each client opens a new connection for
    every third request, while streams continue.
    """
    pair = authority.signed("busy")
    flags = ["--tls-cert", pair.cert, "--tls-key", pair.key]
    flags += ["--admin-tls-cert", pair.cert, "--admin-tls-key", pair.key]
    async with routing(tmp_path, *flags) as router, aiohttp.ClientSession() as http:
        tls, admin = authority.client(), router.facts["admin"]

        async def scraped() -> None:
            async with http.get(f"{admin}/metrics", ssl=tls) as reply:
                assert reply.status == 200

        async with Programs(tmp_path / "engines") as programs:
            for number in range(2):
                worker = await programs.start(f"{number}", "engine", engine_arguments())
                async with http.post(f"{admin}/workers", json=worker.url, ssl=tls) as reply:
                    assert reply.status == 201

            async def ready() -> bool:
                async with http.get(f"{router.url}/ready", ssl=tls) as reply:
                    return reply.status == 200

            await until(ready, "the workers to be ready")
            seen = set()
            load = Crowd(router.url, 6, rate, 40, tls=tls, stays=3)
            async with crowding(load) as crowd:
                for _ in range(renewals):
                    await asyncio.to_thread(authority.signed, "busy")
                    router.process.send_signal(signal.SIGHUP)
                    host, port = router.url.removeprefix("https://").split(":")
                    shown = asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
                    seen.add(await shown)
                    await scraped()
                    assert not crowd.lost, crowd.summary()
            print(f"{len(seen)} certificates were shown; {crowd.summary()}")
            assert crowd.lost == []
            assert len(seen) > renewals / 2
        assert "TLS files not read anew" not in (tmp_path / "router.log").read_text()


@pytest.mark.parametrize(
    ("names", "options", "ready"),
    [
        ("IP:127.0.0.1", "", True),
        ("DNS:engine.internal", "", False),
        ("DNS:engine.internal", ",server_name=engine.internal", True),
        ("DNS:engine.internal", ",server_name=engine.external", False),
        ("DNS:engine.internal", ",insecure=true", True),
    ],
)
async def test_a_worker_is_used_only_if_its_certificate_matches_its_name(
    authority, tmp_path, names, options, ready
) -> None:
    tls = server_tls(authority.port(authority.signed("named", names)))
    assert tls is not None
    async with https_worker(tls) as url, aiohttp.ClientSession() as http:
        flags = ("--workers-tls-ca", authority.pair.cert, "--worker", url + options)
        async with routing(tmp_path, *flags) as router:

            async def settled() -> bool:
                row = await worker_state(http, router.facts["admin"], True)
                return bool(row["state"] == "ready" or row["trouble"])

            await until(settled, "the worker to be recognized or not")
            row = await worker_state(http, router.facts["admin"], True)
            assert (row["state"] == "ready") is ready, row
            if ready:
                async with http.post(f"{router.url}/v1/completions", json=BODY) as reply:
                    assert await reply.json() == {"from": "worker"}
            else:
                assert "ertificate" in row["trouble"]
