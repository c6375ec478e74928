"""Manages leases on tasks that only one replica may do, and elects the reader of KV events by them.

Redis grants a lease for a time on its own clock; the holder renews it with every heartbeat. The
holder treats its lease as lost a tenth of that time before Redis may grant it to another replica,
counted from its latest renewal request. So no two replicas ever believe that they hold the same
lease, whatever their clocks show; the clocks must only run equally fast, to within a tenth.

Each time that a lease gets a new holder, its fencing token grows. The token identifies what
outlives its holder, such as a request that was in flight while the process was stopped (M.
Kleppmann, "How to do distributed locking", 2016).

The replica with the lease reads the events. Two more rules hold when Redis fails or returns:

- *Redis is down*: the lease ends, and no other replica can get it. The last reader continues, or
  all replicas would lose the events. It cannot tell whether it alone is cut off while another
  replica has the lease. If both read, each finds gaps in the sequence numbers, and the old reader
  stops at its first gap.
- *Redis is back*: a replica that joins asks for the lease only if it knows as much as the reader,
  or if no reader was heard of for a while. So the replica that continued gets the lease again. A
  reader stops at once if it hears of a greater token than its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from router.record.logs import worth_a_line
from router.redis.connection import Command, reason_of
from router.replicas.membership import Keys

log = logging.getLogger(__name__)

MOST_LEASES = 4_096
MOST_KEY_CHARS = 2_048
_TRUSTED_SHARE = 0.9  # share of a lease's time, by this router's clock, for which it counts as held

# Tokens are at least the server's time: they grow also over a Redis that forgot everything.
TAKE = """
local held = redis.call('GET', KEYS[1])
if held then
  local holder, fence = string.match(held, '^(%S+) (%d+)$')
  if holder ~= ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(fence)
end
local time = redis.call('TIME')
local fence = math.max(redis.call('INCR', KEYS[2]), time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[2], string.format('%.0f', fence))
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. string.format('%.0f', fence), 'PX', ARGV[2])
return fence
"""
GIVE_BACK = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(%S+) ') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""


class Timer(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the timer."""


class Lease:
    """A lease that this replica wants, and holds at some times. Lifetime: from `Leases.acquire` to
    `Leases.drop`.
    """

    __slots__ = ("_leases", "on_change", "token", "until_s", "what")

    def __init__(self, leases: Leases, what: str, on_change: Callable[[int | None], None]) -> None:
        self._leases = leases
        self.what = what
        self.on_change = on_change
        self.token: int | None = None  # as last passed to `on_change`
        self.until_s = float("-inf")

    @property
    def fence(self) -> int | None:
        """The fencing token of the lease while this replica holds it, otherwise None. Each access
        checks the clock.
        """
        return self.token if self._leases.clock() < self.until_s else None


class Leases:
    """All leases that this replica wants. It does no I/O except for one timer. Lifetime:
    process.
    """

    def __init__(
        self,
        keys: Keys,
        me: str,
        lease_s: float,
        clock: Callable[[], float],
        call_at: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        """Start without leases. `call_at` calls a function at a time of `clock`, as `loop.call_at`
        does.
        """
        self.clock = clock
        self.refused = 0  # refusals by Redis other than that another replica has the lease
        self._keys, self._me, self._lease_s, self._call_at = keys, me, lease_s, call_at
        self._requested: dict[str, Lease] = {}
        self._given_up: list[str] = []
        self._timer: Timer | None = None

    def acquire(self, what: str, on_change: Callable[[int | None], None]) -> Lease:
        """Try to hold the lease `what` from now on. `on_change` is called with the fencing token
        when it is granted, and with None when it is lost.

        Raises ValueError if the lease is wanted already, its name is empty or too long, or too many
        leases are wanted.
        """
        if what in self._requested or not 0 < len(what) <= MOST_KEY_CHARS:
            raise ValueError(f"lease {what[:80]!r}: wanted already, empty, or too long")
        if len(self._requested) >= MOST_LEASES:
            raise ValueError(f"{MOST_LEASES} leases are wanted already")
        lease = self._requested[what] = Lease(self, what, on_change)
        return lease

    def drop(self, lease: Lease) -> None:
        """Give a lease up. The part that holds it is notified at once; Redis is told with the next
        heartbeat.
        """
        if self._requested.get(lease.what) is lease:
            del self._requested[lease.what]
            self._given_up.append(lease.what)
            self._lost(lease)

    def held(self) -> int:
        """Return the number of leases that this replica holds."""
        return sum(lease.fence is not None for lease in self._requested.values())

    def commands(self) -> tuple[list[str], list[Command]]:
        """Return the names of leases and the commands that Redis must run for them now.
        `read_replies` takes the names with the replies.
        """
        given_up, self._given_up = self._given_up, []
        wanted = list(self._requested)
        time_ms = int(self._lease_s * 1e3)
        commands = [self._script(GIVE_BACK, what) for what in given_up]
        commands += [self._script(TAKE, what, time_ms) for what in wanted]
        return [*([""] * len(given_up)), *wanted], commands

    def read_replies(self, requested: Sequence[str], replies: Sequence[Any], sent_s: float) -> None:
        """Process the replies of Redis to a batch of commands that take, renew or give back leases.

        asked: the lease of each command; "" if the command gives a lease back.
        asked_s: when the commands were sent, in seconds of the router's own clock.
        """
        for what, token in zip(requested, replies, strict=True):
            lease = self._requested.get(what)
            if isinstance(token, int) and token > 0 and lease is not None:
                self._taken(lease, token, sent_s + self._lease_s * _TRUSTED_SHARE)
            elif lease is not None:
                if isinstance(token, Exception):
                    self._complain(what, token)
                self._lost(lease)
        self._set_timer()

    def goodbye(self) -> list[Command]:
        """Return the Redis commands that give all leases back. The parts that hold them are
        notified before.
        """
        for lease in list(self._requested.values()):
            self.drop(lease)
        return self.commands()[1]

    def _taken(self, lease: Lease, token: int, until_s: float) -> None:
        if self.clock() >= until_s:  # the answer took too long
            self._lost(lease)
            return
        lease.until_s = until_s
        if lease.token != token:
            self._lost(lease)  # another replica had the lease meanwhile
            lease.until_s, lease.token = until_s, token
            lease.on_change(token)

    def _lost(self, lease: Lease) -> None:
        lease.until_s = float("-inf")
        if lease.token is not None:
            lease.token = None
            lease.on_change(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [lease.until_s for lease in self._requested.values() if lease.token is not None]
        if ends:
            self._timer = self._call_at(min(ends), self._ring)

    def _ring(self) -> None:
        self._timer = None
        for lease in list(self._requested.values()):
            if lease.fence is None:
                self._lost(lease)
        self._set_timer()

    def _script(self, script: str, what: str, *arguments: object) -> Command:
        keys = self._keys.lease(what), self._keys.fence(what)
        return ("EVAL", script, 2, *keys, self._me, *arguments)

    def _complain(self, what: str, error: Exception) -> None:
        self.refused += 1
        if worth_a_line(self.refused):
            log.error("no replica can get the lease of %s: redis %s", what, reason_of(error))


LEASE_PREFIX = "kv-events:"
_ALONE_S = 1.0  # wait of a candidate that knows of no other reader, seconds


class ReaderCandidate(Protocol):
    """A claim to read one worker's events, one of those in an election."""

    @property
    def knows(self) -> bool:
        """True if this replica knows all events that the reading replica has published."""

    def elected(self) -> None:
        """Check again whether this replica reads the events."""


class Election:
    """The election of the one replica that reads the KV events at an address. Lifetime: as long as
    a feed of this replica wants these events.
    """

    def __init__(self, address: str, leases: Leases, now_s: float, connected: bool) -> None:
        """Start without a lease. `connected` says whether the connection to Redis works."""
        self.candidates: list[ReaderCandidate] = []
        self.token = 0  # ours, the latest
        self._what = f"{LEASE_PREFIX}{address}"
        self._leases = leases
        self._lease: Lease | None = None
        self._rival = 0  # the greatest token of other replicas
        self._torn = False
        self._connected = connected
        self._since_s = now_s  # since when no reader is known

    @property
    def reads(self) -> bool:
        """True if this replica is the one that reads the events now."""
        if self._lease is not None and self._lease.fence is not None:
            return True
        return not self._connected and self._last and not self._torn

    @property
    def _last(self) -> bool:
        """True if, as far as this replica knows, no other replica has read the events after it."""
        return self.token > self._rival

    def consider(self, now_s: float, alone: bool, lease_s: float) -> None:
        """Ask for the lease if this replica should have it by now; called often. `alone` True means
        that no other replica is running.
        """
        if self._lease is not None or not self._connected:
            return
        patience_s = lease_s if self._rival else min(_ALONE_S, lease_s)
        knows = all(one.knows for one in self.candidates)
        if alone or knows or self._last or now_s - self._since_s >= patience_s:
            self._lease = self._leases.acquire(self._what, self._changed)

    def joined(self, now_s: float) -> None:
        """Note that the connection to Redis works now."""
        self._connected, self._since_s, self._torn = True, now_s, False
        self._look()

    def parted(self) -> None:
        """Note that the connection to Redis is lost."""
        self._connected = False
        if self._lease is not None and not self._last:
            self._give_up()
        self._look()

    def leave(self) -> None:
        """Stop reading the events and never resume, because this replica ends."""
        self._torn = True
        self._give_up()
        self._look()

    def outranked(self, token: int) -> None:
        """Note that another replica reads with the fencing token `token`. If it is greater than
        this replica's token, give the lease up.
        """
        if token > self._rival:
            self._rival = token
            if self.token < token and self._lease is not None and self._lease.fence == self.token:
                self._give_up()  # ours is of a Redis that forgot; it gives a greater one next time
            self._look()

    def hole(self) -> bool:
        """Handle a gap in the events. Return True if this replica stops reading, because another
        replica may be reading, too.
        """
        if self._lease is not None and self._lease.fence is not None:
            return False
        self._torn = True
        self._look()
        return True

    def close(self) -> None:
        """Give the lease up, because no feed of this replica wants these events any more."""
        self._give_up()

    def _changed(self, token: int | None) -> None:
        if token is not None:
            self.token, self._torn = token, False
        self._look()

    def _give_up(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._leases.drop(lease)

    def _look(self) -> None:
        for one in list(self.candidates):
            one.elected()
