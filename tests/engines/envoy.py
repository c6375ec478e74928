"""Runs a real Envoy with the bootstraps of docs/deploy/envoy and this machine's ports and
engines.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from simulator import CHECKOUT
from tests.engines.environment import NEWEST_ENVOY, Environment
from tests.live.ports import lasting_port
from tests.live.stack import until

BOOTSTRAPS = CHECKOUT / "docs" / "deploy" / "envoy"
ENVOY = Environment("envoy", NEWEST_ENVOY)
_HTTP_2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_ids = itertools.count(os.getpid() % 20_000 * 100 + 1)


@dataclass(slots=True)
class Envoy:
    """A running Envoy process with its ports. Lifetime: test."""

    url: str
    admin: str
    process: Any
    http: aiohttp.ClientSession

    async def stats(self, name: str) -> int:
        """Return the sum of Envoy's statistics whose names end with `name`."""
        async with self.http.get(f"{self.admin}/stats?format=json") as reply:
            found = (await reply.json())["stats"]
        return sum(one["value"] for one in found if one.get("name", "").endswith(name))

    async def until_healthy(self, cluster: str = "picker", healthy: int = 1) -> None:
        """Wait until `healthy` hosts of a cluster are healthy."""

        async def there() -> bool:
            return await self.stats(f"cluster.{cluster}.membership_healthy") == healthy

        await until(there, f"{healthy} healthy hosts of {cluster}")


def filters_of(config: Any) -> list[Any]:
    """Return the HTTP filters of the bootstrap's listener."""
    listener = config["static_resources"]["listeners"][0]
    filters: list[Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    return filters


def picker_of(config: Any) -> Any:
    """Return the configuration of the external-processing filter, which calls the picker."""
    named = (one for one in filters_of(config) if one["name"] == "envoy.filters.http.ext_proc")
    return next(named)["typed_config"]


def duplex(config: Any) -> None:
    """Change the configuration to the body modes that gateways use: full duplex, streamed."""
    picker_of(config)["processing_mode"] |= {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
    }


def tls_to_picker(config: Any) -> None:
    """Change the configuration so that Envoy calls the picker by TLS without checking its
    certificate, as most gateways do.
    """
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    common: dict[str, Any] = {"validation_context": {}, "alpn_protocols": ["h2"]}
    typed = {"@type": kind, "common_tls_context": common}
    socket = {"name": "envoy.transport_sockets.tls", "typed_config": typed}
    cluster_of(config, "picker")["transport_socket"] = socket


def cluster_of(config: Any, name: str) -> Any:
    """Return the bootstrap's cluster with this name."""
    clusters = config["static_resources"]["clusters"]
    return next(one for one in clusters if one["name"] == name)


def endpoint(address: str) -> dict[str, Any]:
    """Return a cluster's endpoint for an address HOST:PORT."""
    host, _, port = address.rpartition(":")
    place = {"socket_address": {"address": host, "port_value": int(port)}}
    return {"endpoint": {"address": place}}


def bootstrap(
    file: str, port: int, admin: int, pickers: Sequence[str], engines: Sequence[str]
) -> Any:
    """Return a sample bootstrap whose addresses are replaced by the given ones (HOST:PORT)."""
    config = yaml.safe_load((BOOTSTRAPS / file).read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    listener = config["static_resources"]["listeners"][0]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    picker = cluster_of(config, "picker")
    picker["load_assignment"]["endpoints"] = [{"lb_endpoints": [*map(endpoint, pickers)]}]
    if "load_assignment" in (cluster := cluster_of(config, "engines")):
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [*map(endpoint, engines)]}]
    return config


@asynccontextmanager
async def running_envoy(
    folder: Path,
    file: str,
    pickers: Sequence[str],
    engines: Sequence[str] = (),
    change: Any = lambda config: None,
    concurrency: int = 1,
) -> AsyncIterator[Envoy]:
    """Run Envoy with a sample bootstrap, which `change` may alter before the start."""
    port, admin = lasting_port(), lasting_port()
    config = bootstrap(file, port, admin, pickers, engines)
    change(config)
    path = folder / f"envoy-{port}.yaml"
    path.write_text(yaml.safe_dump(config))
    log = (folder / f"envoy-{port}.log").open("wb")
    command = [str(ENVOY.folder / "bin" / "envoy"), "-c", str(path), "-l", "warning"]
    command += ["--concurrency", str(concurrency), "--base-id", str(next(_ids))]
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)
    try:
        async with aiohttp.ClientSession() as http:
            envoy = Envoy(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", process, http)
            await until(partial(_ready, envoy, log), "Envoy to be ready")
            if any("health_checks" in one for one in config["static_resources"]["clusters"]):
                await envoy.until_healthy(healthy=len(pickers))
            yield envoy
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        log.close()


async def _ready(envoy: Envoy, log: Any) -> bool:
    assert envoy.process.returncode is None, log.name
    try:
        async with envoy.http.get(f"{envoy.admin}/ready") as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False
