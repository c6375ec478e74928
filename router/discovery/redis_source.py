"""The source of workers that announce themselves in Redis, in the format of
`engine.wire.announcement`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError, ResponseError

from engine.wire.announcement import (
    MAX_BYTES,
    MAX_URL_BYTES,
    decode_announcement,
    entry_key,
    names_key,
)
from engine.wire.events import WireError
from router.discovery.source import MAX_SEEN, bounded
from router.engines.spec import POLL, WorkerSpec, WorkerSpecError
from router.engines.worker_spec import worker_spec_of
from router.events.sources import NO_OTHERS, EventHosts
from router.fleet.sources import Report, ReportedWorker
from router.redis.connection import ANSWER_S, Wire, checked, open_wire, reason_of
from router.redis.url import RedisUrl

LOOK_S = 0.5
MAX_NAMES = 2 * MAX_SEEN  # most names in the list; half of them may have expired
_AT_ONCE = 512
_FORGOTTEN_S = 60.0  # a name that had no entry for so long is taken off the list, seconds


class RedisSource:
    """Reads the workers that announce themselves in Redis. Redis alone decides when the
    announcement of a worker expires, so the clocks of workers and routers are not compared.
    Lifetime: as long as the configuration names the source.
    """

    def __init__(
        self,
        url_now: Callable[[], RedisUrl],
        fleet: str,
        look_s: float = LOOK_S,
        hosts_now: Callable[[], EventHosts] = lambda: NO_OTHERS,
    ) -> None:
        """Make a source for the workers of the fleet named `fleet`. `url_now` returns the URL of
        Redis, which may change between readings. `hosts_now` returns the hosts, besides the
        worker's own, that an entry may name for the worker's KV events.
        """
        self._url_now, self._hosts_now = url_now, hosts_now
        self._url = url_now()
        self._fleet = fleet
        self._look_s = look_s
        self._empty_since: dict[bytes, float] = {}

    async def reports(self) -> AsyncIterator[Report]:
        """Yield a report each time that the entries are read."""
        wire: Wire | None = None
        try:
            while True:
                if (url := self._url_now()) != self._url:
                    self._url = url
                    if wire is not None:
                        await wire.aclose()
                        wire = None
                try:
                    if wire is None:
                        wire = await open_wire(self._url, names_key(self._fleet), ANSWER_S)
                    report = await self._look(wire)
                except (RedisError, OSError, TimeoutError) as error:
                    report = Report(None, f"{self._url} {reason_of(error)}")
                    if wire is not None:
                        await wire.aclose()
                        wire = None
                yield report
                await asyncio.sleep(self._look_s)
        finally:
            if wire is not None:
                await wire.aclose()

    async def _look(self, wire: Wire) -> Report:
        key = names_key(self._fleet)
        (count,) = checked(await wire.call([("SCARD", key)], ANSWER_S))
        if count > MAX_NAMES:
            return Report(None, f"{self._url}: {key} has {count} names; at most {MAX_NAMES} fit")
        (names,) = checked(await wire.call([("SMEMBERS", key)], ANSWER_S))
        entries: dict[bytes, Any] = {}
        known = sorted(name for name in names if len(name) <= MAX_URL_BYTES)
        for start in range(0, len(known), _AT_ONCE):
            some = known[start : start + _AT_ONCE]
            entries |= zip(some, await wire.call(self._reading(some), ANSWER_S), strict=True)
        await self._forget(wire, entries)
        report = read(entries, self._hosts_now())
        if len(known) < len(names):
            long = f"{len(names) - len(known)} names longer than {MAX_URL_BYTES} bytes"
            return Report(report.workers, report.trouble, (*report.refused, long))
        return report

    def _reading(self, names: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Return the commands that read the entries from Redis. Each reads one byte more than an
        entry may have, which shows the entries that are too long.
        """
        prefix = entry_key(self._fleet, "").encode()
        return [("GETRANGE", prefix + name, 0, MAX_BYTES) for name in names]

    async def _forget(self, wire: Wire, entries: Mapping[bytes, Any]) -> None:
        """Remove the names of entries that expired long ago from the list in Redis. Do nothing if
        the Redis user may not do that.
        """
        now_s = asyncio.get_running_loop().time()
        empty = [name for name, entry in entries.items() if entry == b""]
        self._empty_since = {name: self._empty_since.get(name, now_s) for name in empty}
        old = [n for n, since_s in self._empty_since.items() if now_s - since_s > _FORGOTTEN_S]
        if old:
            await wire.call([("SREM", names_key(self._fleet), *old[:_AT_ONCE])], ANSWER_S)


def read(entries: Mapping[bytes, Any], hosts: EventHosts = NO_OTHERS) -> Report:
    """Return a report of the workers in the entries. `entries` has for each name the answer of
    Redis: bytes, None if the entry has expired, or an error.
    """
    seen: list[ReportedWorker] = []
    refused: list[str] = []
    for name, entry in entries.items():
        if entry == b"":
            continue
        try:
            seen.append(_seen(name, entry, hosts))
        except (WireError, WorkerSpecError) as error:
            refused.append(f"{name[:200].decode(errors='replace')!r}: {error}")
    return bounded(seen, refused)


def _seen(name: bytes, entry: Any, hosts: EventHosts) -> ReportedWorker:
    """Return the worker of an entry. Raises WireError or WorkerSpecError for an invalid entry."""
    if isinstance(entry, ResponseError):
        raise WireError(f"the entry cannot be read: it {reason_of(entry)}")
    if not isinstance(entry, bytes):
        raise WireError(f"the entry is of type {type(entry).__name__}")
    one = decode_announcement(entry)
    if one.url.encode() != name:
        raise WireError("the entry names another url")
    if "url" in one.options or "rank" in one.options:
        raise WireError("url and rank are no options of an entry")
    sizes = {"kv_tokens": one.kv_tokens, "block_size": one.block_size}
    spec = worker_spec_of({"url": one.url, **sizes, **one.options})
    _check_events(spec, hosts)
    return ReportedWorker(spec, one.state == "stopping")


def _check_events(spec: WorkerSpec, hosts: EventHosts) -> None:
    """Raise WorkerSpecError if an entry names a host for its KV events that it may not name.
    Workers write their own entries, so an entry is trusted no more than a worker's answers.
    """
    own = {urlsplit(spec.url).hostname or ""}
    for name in ("events", "replay"):
        endpoint = getattr(spec, name)
        if endpoint not in (None, "none", POLL) and not hosts.allow(endpoint, own):
            raise WorkerSpecError(f"{name} is {endpoint!r}, not at its own host (event_hosts)")
