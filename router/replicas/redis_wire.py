"""One connection to the Redis server that has a fleet's keys, found by what its URL says.

All keys of a fleet are in one slot of a cluster, and so on one server, whatever the URL: sentinels
and cluster nodes are asked only where that is. Where it moves, calls fail, and whoever connects
anew finds it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, RedisClusterException, ResponseError

from router.replicas.redis_url import Address, RedisUrl

Command = tuple[Any, ...]

ANSWER_S = 0.8  # beyond it Redis counts as away
_ASKED_S = 0.4  # each sentinel or node
_COMMON: Mapping[str, Any] = MappingProxyType({"protocol": 2})


class Wire:
    """Commands out, replies back, in turn. Lifetime: until a call fails; to be closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def call(self, commands: Sequence[Command], within_s: float) -> list[Any]:
        """The reply to each: bytes, int, list or None; an error reply as `ResponseError`.

        Raises TimeoutError, redis-py's errors and OSError; then nothing more can be called.
        """
        connection, replies = self._connection, []
        async with asyncio.timeout(within_s):
            await connection.send_packed_command(connection.pack_commands(commands), False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        return replies

    async def aclose(self) -> None:
        """At once, without a word."""
        await self._connection.disconnect(nowait=True)


async def open_wire(url: RedisUrl, key: str, within_s: float) -> Wire:
    """A connection to the server that has `key`.

    Raises TimeoutError, redis-py's errors and OSError.
    """
    async with asyncio.timeout(within_s):
        host, port = await _address(url, key)
        kind = SSLConnection if url.tls else Connection
        options = dict(url.options)
        connection = kind(
            host=host,
            port=port,
            db=url.database,
            socket_timeout=None,
            socket_connect_timeout=within_s,
            **_COMMON,
            **options,
        )
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
    return Wire(connection)


def checked(replies: list[Any]) -> list[Any]:
    """Raises the first that is an error."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies


async def _address(url: RedisUrl, key: str) -> Address:
    if url.kind == "sentinel":
        return await _master(url)
    if url.kind == "cluster":
        return await _owner(url, key)
    return url.hosts[0]


async def _master(url: RedisUrl) -> Address:
    options = {**_asking(), **url.sentinel_options}
    if url.tls:
        options["ssl"] = True
    sentinel = Sentinel(url.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        host, port = await sentinel.discover_master(url.service)
    finally:
        await sentinel.aclose()
    return host, int(port)


async def _owner(url: RedisUrl, key: str) -> Address:
    options = {**_asking(), **url.options}
    cluster = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in url.hosts],
        require_full_coverage=False,
        ssl=url.tls,
        **options,
    )
    try:
        await cluster.initialize()
        node = cluster.get_node_from_key(key)
        if node is None:
            raise ClusterDownError("no node has the slot of this fleet")
        return str(node.host), int(node.port)
    except RedisClusterException as error:  # not one of RedisError
        raise ConnectionError(str(error)) from error
    finally:
        await cluster.aclose()


def _asking() -> dict[str, Any]:
    """Arguments of clients that ask one question and never twice."""
    timeouts = {"socket_timeout": _ASKED_S, "socket_connect_timeout": _ASKED_S}
    return {**_COMMON, **timeouts, "retry": Retry(NoBackoff(), 0)}
