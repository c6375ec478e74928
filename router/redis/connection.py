"""Connects to the Redis server that has a fleet's keys, and describes its errors for people.

All keys of a fleet are in one slot of a cluster, and therefore on one server, for any URL.
Sentinels and cluster nodes are only asked where that server is. If it moves, calls fail, and the
next connection finds it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from redis import exceptions as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, RedisClusterException, ResponseError

from router.redis.url import Address, RedisUrl, redacted

_MAX_CHARS = 200
_MOVING_KEYS = "moves our keys to another node"

# A part of an error's text, and its meaning.
_TEXTS = MappingProxyType(
    {
        "Authentication required": "asks for a password: give it in `state`",
        "without any password": "has no password, and one is given: take it out of `state`",
        "WRONGTYPE": "has something else under a key of this fleet: delete it, or choose another "
        "`replicas.fleet`",
        "MISCONF": "refuses writes, for it cannot save to its disk",
        "NOREPLICAS": "refuses writes, for it has too few replicas",
        "unknown command": "does not know a command that is needed: it must be Redis 6.2 or later",
        "DB index is out of range": "has no such database: correct `state`",
        "max number of clients": "has no room for another client",
        "No master found": "is unknown: no sentinel names a master of this service",
        "onnection refused": "cannot be reached: the connection is refused",
        "Connect call failed": "cannot be reached: the connection is refused",
        "CERTIFICATE_VERIFY_FAILED": "shows a certificate that is not believed",
        "Name or service not known": "cannot be found: its name has no address",
        "closed by server": "has closed the connection",
        "imeout": "does not answer",
    }
)
# The meaning of classes of errors, because redis-py cuts the reply's code off their texts.
_CLASSES = (
    (TimeoutError, "does not answer"),
    (redis.TimeoutError, "does not answer"),
    (redis.AuthenticationError, "refuses the user or password: correct `state`"),
    (
        redis.NoPermissionError,
        "lets this user not do what is needed (docs/reference/wire.md)",
    ),
    (redis.ReadOnlyError, "is a read-only replica: name the master, or use redis+sentinel://"),
    (redis.OutOfMemoryError, "is out of memory (maxmemory): it needs more, or not to be shared"),
    (redis.BusyLoadingError, "is loading its data"),
    (redis.MovedError, "is one node of a cluster: use redis+cluster://"),
    (redis.AskError, _MOVING_KEYS),
    (redis.TryAgainError, _MOVING_KEYS),
    (redis.MasterDownError, "is a replica without its master"),
    (redis.ClusterDownError, "is a cluster that is down"),
)


def reason_of(error: BaseException) -> str:
    """Return an error of Redis as words that can follow its address, as in
    `redis://HOST:6379 ...`.
    """
    text = redacted(" ".join(str(error).split()))
    for part, meaning in _TEXTS.items():
        if part in text:
            return meaning
    for kind, meaning in _CLASSES:
        if isinstance(error, kind):
            return meaning
    return f"fails: {type(error).__name__}: {text[:_MAX_CHARS]}"


Command = tuple[Any, ...]

ANSWER_S = 0.8  # after this time without an answer Redis counts as unreachable, seconds
_NODE_TIMEOUT_S = 0.4  # timeout of each sentinel or cluster node, seconds
_COMMON: Mapping[str, Any] = MappingProxyType({"protocol": 2})


class Wire:
    """A connection to Redis that sends commands and returns their replies in order. Lifetime: until
    a call fails; it must be closed.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def call(self, commands: Sequence[Command], within_s: float) -> list[Any]:
        """Return the reply to each command: bytes, int, list or None, or `ResponseError` for an
        error reply.

        Raises TimeoutError, redis-py's errors and OSError; after an error, no more calls are
        possible.
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
        """Close the connection at once, without a message to Redis."""
        await self._connection.disconnect(nowait=True)


async def open_wire(url: RedisUrl, key: str, within_s: float) -> Wire:
    """Return a connection to the server that has `key`. Raises TimeoutError, redis-py's errors and
    OSError if it fails.
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
    """Return the replies, or raise the first one that is an error."""
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
    options = {**_client_options(), **url.sentinel_options}
    if url.tls:
        options["ssl"] = True
    sentinel = Sentinel(url.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        host, port = await sentinel.discover_master(url.service)
    finally:
        await sentinel.aclose()
    return host, int(port)


async def _owner(url: RedisUrl, key: str) -> Address:
    options = {**_client_options(), **url.options}
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


def _client_options() -> dict[str, Any]:
    """Return the arguments for a client of sentinels or cluster nodes, which asks one question
    without retries.
    """
    timeouts = {"socket_timeout": _NODE_TIMEOUT_S, "socket_connect_timeout": _NODE_TIMEOUT_S}
    return {**_COMMON, **timeouts, "retry": Retry(NoBackoff(), 0)}
