"""Announces a worker in a registry by heartbeats: `--announce redis://HOST[,url=http://...]`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.server.worker import Worker
from engine.wire.announcement import (
    Announcement,
    check_fleet,
    encode_announcement,
    entry_key,
    names_key,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

LEASE_S = (1.0, 600.0)
_BEATS = 3  # heartbeats in a lease: two may be lost
_ANSWER_S = 2.0  # Redis to answer one
NOTICE_S = 1.0  # from saying that it stops to stopping: routers read twice meanwhile
_OPTIONS = ("url", "fleet", "lease")
_COMMA = "a comma in a password is written %2C"


@dataclass(frozen=True, slots=True)
class Announce:
    """The registry to announce a worker in, and the data of its entry. Lifetime: process."""

    redis: str = field(repr=False)  # it may have a password
    url: str | None = None  # by which routers reach the worker; None: the bound address
    fleet: str = "default"
    lease_s: float = 5.0  # without a heartbeat for so long the entry expires


def parse_announce(text: str, host: str) -> Announce:
    """Return what the flag `REDIS_URL[,url=URL][,fleet=NAME][,lease=SECONDS]` says. `host` is the
    address that the worker listens on. Raises ValueError, which says what is wrong and what to
    write, without the password.
    """
    place, *given = text.split(",")
    parts = urlsplit(place)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError(f"--announce must begin with redis://HOST or rediss://HOST; {_COMMA}")
    options: dict[str, str] = {}
    for number, one in enumerate(given, 1):
        name, equals, value = one.partition("=")
        if not equals or name not in _OPTIONS or name in options:
            raise ValueError(
                f"--announce: option {number} must be one of {', '.join(_OPTIONS)}, once, as in "
                f"url=http://10.0.0.1:8000; {_COMMA}"
            )
        options[name] = value
    fleet = options.get("fleet", "default")
    check_fleet(fleet)
    try:
        lease_s = float(options.get("lease", "5"))
    except ValueError:
        lease_s = 0.0
    if not LEASE_S[0] <= lease_s <= LEASE_S[1]:
        raise ValueError(f"--announce: lease must be {LEASE_S[0]:g}..{LEASE_S[1]:g} seconds")
    url = options.get("url")
    if url is None and _is_wildcard(host):
        raise ValueError(
            f"--announce: other hosts cannot reach {host}; add ,url=http://ADDRESS:PORT"
        )
    if url is not None:
        reached = urlsplit(url)
        if reached.scheme not in ("http", "https") or not reached.hostname or "@" in url:
            raise ValueError("--announce: url must be http(s)://host[:port], without a user")
    return Announce(place, url, fleet, lease_s)


class Announcer:
    """Renews this worker's entry in Redis; Redis may be unreachable for a time. Lifetime:
    worker.
    """

    def __init__(self, announce: Announce, entry: Announcement) -> None:
        self._announce = announce
        self._entry = entry
        self._reached = True  # whether the latest heartbeat arrived
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Renew the entry until `goodbye` is called or the task is cancelled."""
        every_s = self._announce.lease_s / _BEATS
        async with _client(self._announce.redis) as redis:
            while not self._stopping.is_set():
                await self._beat(redis, self._entry)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), every_s)
            await self._beat(redis, replace(self._entry, state="stopping"))

    def goodbye(self) -> None:
        """Announce that the worker stops; the entry expires by itself."""
        self._stopping.set()

    async def _beat(self, redis: Redis, entry: Announcement) -> None:
        from redis.exceptions import RedisError

        announce = self._announce
        try:
            async with asyncio.timeout(_ANSWER_S), redis.pipeline(transaction=True) as both:
                lease_ms = int(announce.lease_s * 1e3)
                both.set(
                    entry_key(announce.fleet, entry.url), encode_announcement(entry), px=lease_ms
                )
                both.sadd(names_key(announce.fleet), entry.url)
                await both.execute()
        except (RedisError, OSError, TimeoutError) as error:
            if self._reached:  # the error's text may quote a password
                log.warning(
                    "not announced at %s, so that routers do not find this worker: %s; tries again",
                    _without_user(announce.redis),
                    _remedy(error),
                )
            self._reached = False
            return
        if not self._reached:
            log.warning("announced again at %s", _without_user(announce.redis))
        self._reached = True


def announcement_of(announce: Announce, url: str, worker: Worker) -> Announcement:
    """Return the registry entry of this worker, which listens at `url`."""
    settings = worker.settings
    return Announcement(
        url=(announce.url or url).rstrip("/"),
        models=(worker.model,),
        kv_tokens=settings.blocks * settings.block_size,
        block_size=settings.block_size,
        options={} if settings.revision is None else {"revision": settings.revision},
    )


@contextlib.asynccontextmanager
async def announcing(announce: Announce | None, url: str, worker: Worker) -> Any:
    """Renew the worker's entry in the registry within the block; at its end, announce the stop and
    give routers time to read that.
    """
    if announce is None:
        yield
        return
    announcer = Announcer(announce, announcement_of(announce, url, worker))
    task = asyncio.create_task(announcer.run(), name="announcer")
    try:
        yield
        announcer.goodbye()
        await asyncio.wait([task], timeout=_ANSWER_S)
        await asyncio.sleep(NOTICE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _client(url: str) -> Redis:
    # Imported here: most workers do without.
    from redis.asyncio import from_url

    made: Callable[..., Redis] = from_url
    return made(url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S)


def _remedy(error: Exception) -> str:
    """Return what to do about an error, without the error's own text, which may quote a
    password.
    """
    from redis import exceptions

    if isinstance(error, exceptions.AuthenticationError):
        return "it refuses the user or password, or asks for one: correct --announce"
    if isinstance(error, exceptions.NoPermissionError):
        return "it lets this user not write there (docs/reference/wire.md has the keys)"
    if isinstance(error, OSError | exceptions.ConnectionError | exceptions.TimeoutError):
        return "no answer: does Redis run there?"
    return type(error).__name__


def _without_user(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return not host
