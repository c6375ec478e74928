"""Leases on what one replica alone may do, and the election of who reads KV events by them.

Redis gives a lease for as long as its own clock says; each replica asks again with every beat. Who
has it takes it for lost a tenth of that time before Redis may give it to another one, counted from
when it last asked: so at no moment do two believe that they have it, whatever their clocks show
(they must only run equally fast, to a tenth).

Each time that a lease goes to somebody it comes with a greater fencing token; what outlasts its
holder, such as a request under way while the process was stopped, can be told by it (M. Kleppmann,
"How to do distributed locking", 2016).

Who has the lease reads. Two more things decide where Redis is away or comes back:

- *Redis away*: the lease ends, and nobody else can get it. Who read last goes on, for else the
  events would be lost to all. It cannot see whether it alone is cut off and somebody else has the
  lease by now; then both read, each finds holes in the numbers, and it stops at its first hole.
- *Redis back*: whoever joins asks for the lease only when it knows as much as the one that reads,
  or nobody said in a while that he reads. So the one that went on gets it again.

A reader whose token is not the greatest that was heard of stops at once.
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
_TRUSTED = 0.9  # of its time, by our clock

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
    """What can be called off."""

    def cancel(self) -> None:
        """Do not ring."""


class Lease:
    """One replica's part in it. Lifetime: from `Leases.want` to `Leases.drop`."""

    __slots__ = ("_leases", "on_change", "token", "until_s", "what")

    def __init__(self, leases: Leases, what: str, on_change: Callable[[int | None], None]) -> None:
        self._leases = leases
        self.what = what
        self.on_change = on_change
        self.token: int | None = None  # as last told to `on_change`
        self.until_s = float("-inf")

    @property
    def fence(self) -> int | None:
        """The fencing token, while it is ours; asks the clock, so it is right at once."""
        return self.token if self._leases.clock() < self.until_s else None


class Leases:
    """All that this replica wants. Sans-I/O, but for a timer. Lifetime: process."""

    def __init__(
        self,
        keys: Keys,
        me: str,
        lease_s: float,
        clock: Callable[[], float],
        call_at: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        """`call_at`: rings at a time of `clock`, as `loop.call_at` does."""
        self.clock = clock
        self.refused = 0  # by Redis, for another reason than that somebody else has it
        self._keys, self._me, self._lease_s, self._call_at = keys, me, lease_s, call_at
        self._wanted: dict[str, Lease] = {}
        self._given_up: list[str] = []
        self._timer: Timer | None = None

    def want(self, what: str, on_change: Callable[[int | None], None]) -> Lease:
        """Try to have `what` from now on; `on_change` gets the fencing token, or None at its loss.

        Raises ValueError where it is wanted already, too long, or where too many are.
        """
        if what in self._wanted or not 0 < len(what) <= MOST_KEY_CHARS:
            raise ValueError(f"lease {what[:80]!r}: wanted already, empty, or too long")
        if len(self._wanted) >= MOST_LEASES:
            raise ValueError(f"{MOST_LEASES} leases are wanted already")
        lease = self._wanted[what] = Lease(self, what, on_change)
        return lease

    def drop(self, lease: Lease) -> None:
        """Want it no more; Redis hears of it with the next beat. Its holder is told first."""
        if self._wanted.get(lease.what) is lease:
            del self._wanted[lease.what]
            self._given_up.append(lease.what)
            self._lost(lease)

    def held(self) -> int:
        """How many are ours."""
        return sum(lease.fence is not None for lease in self._wanted.values())

    def commands(self) -> tuple[list[str], list[Command]]:
        """What to ask Redis now, and about what: to be handed to `answered` with the replies."""
        given_up, self._given_up = self._given_up, []
        wanted = list(self._wanted)
        time_ms = int(self._lease_s * 1e3)
        commands = [self._script(GIVE_BACK, what) for what in given_up]
        commands += [self._script(TAKE, what, time_ms) for what in wanted]
        return [*([""] * len(given_up)), *wanted], commands

    def read_replies(self, asked: Sequence[str], replies: Sequence[Any], asked_s: float) -> None:
        """Process the replies of Redis to a batch of commands that take, renew or give back leases.

        asked: the lease of each command; "" if the command gives a lease back.
        asked_s: when the commands were sent, in seconds of the router's own clock.
        """
        for what, token in zip(asked, replies, strict=True):
            lease = self._wanted.get(what)
            if isinstance(token, int) and token > 0 and lease is not None:
                self._taken(lease, token, asked_s + self._lease_s * _TRUSTED)
            elif lease is not None:
                if isinstance(token, Exception):
                    self._complain(what, token)
                self._lost(lease)
        self._set_timer()

    def goodbye(self) -> list[Command]:
        """Gives all back; holders are told first."""
        for lease in list(self._wanted.values()):
            self.drop(lease)
        return self.commands()[1]

    def _taken(self, lease: Lease, token: int, until_s: float) -> None:
        if self.clock() >= until_s:  # the answer took too long
            self._lost(lease)
            return
        lease.until_s = until_s
        if lease.token != token:
            self._lost(lease)  # it was somebody else's between
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
        ends = [lease.until_s for lease in self._wanted.values() if lease.token is not None]
        if ends:
            self._timer = self._call_at(min(ends), self._ring)

    def _ring(self) -> None:
        self._timer = None
        for lease in list(self._wanted.values()):
            if lease.fence is None:
                self._lost(lease)
        self._set_timer()

    def _script(self, script: str, what: str, *arguments: object) -> Command:
        keys = self._keys.lease(what), self._keys.fence(what)
        return ("EVAL", script, 2, *keys, self._me, *arguments)

    def _complain(self, what: str, error: Exception) -> None:
        self.refused += 1
        if worth_a_line(self.refused):
            log.error("nobody can have the lease of %s: redis %s", what, reason_of(error))


LEASE_PREFIX = "kv-events:"
_ALONE_S = 1.0  # for a reader to say so, where none was heard of


class ReaderCandidate(Protocol):
    """One worker's events at this address."""

    @property
    def knows(self) -> bool:
        """All that the reader tells is known here."""

    def elected(self) -> None:
        """Look again who reads."""


class Election:
    """Of one address. Lifetime: while somebody here wants its events."""

    def __init__(self, address: str, leases: Leases, now_s: float, connected: bool) -> None:
        """`connected`: the link to Redis is up."""
        self.candidates: list[ReaderCandidate] = []
        self.token = 0  # ours, the latest
        self._what = f"{LEASE_PREFIX}{address}"
        self._leases = leases
        self._lease: Lease | None = None
        self._rival = 0  # the greatest token of anybody else
        self._torn = False
        self._connected = connected
        self._since_s = now_s  # nobody knows who reads

    @property
    def reads(self) -> bool:
        """Whether to read now."""
        if self._lease is not None and self._lease.fence is not None:
            return True
        return not self._connected and self._last and not self._torn

    @property
    def _last(self) -> bool:
        """Nobody is known to have read after us."""
        return self.token > self._rival

    def consider(self, now_s: float, alone: bool, lease_s: float) -> None:
        """Stand for election, or not yet; called often. `alone`: no other replica is here."""
        if self._lease is not None or not self._connected:
            return
        patience_s = lease_s if self._rival else min(_ALONE_S, lease_s)
        knows = all(one.knows for one in self.candidates)
        if alone or knows or self._last or now_s - self._since_s >= patience_s:
            self._lease = self._leases.want(self._what, self._changed)

    def joined(self, now_s: float) -> None:
        """The link is up."""
        self._connected, self._since_s, self._torn = True, now_s, False
        self._look()

    def parted(self) -> None:
        """The link is down."""
        self._connected = False
        if self._lease is not None and not self._last:
            self._give_up()
        self._look()

    def leave(self) -> None:
        """This replica ends: read no more, also not for want of a link."""
        self._torn = True
        self._give_up()
        self._look()

    def outranked(self, token: int) -> None:
        """Somebody else reads with this token."""
        if token > self._rival:
            self._rival = token
            if self.token < token and self._lease is not None and self._lease.fence == self.token:
                self._give_up()  # ours is of a Redis that forgot; it gives a greater one next time
            self._look()

    def hole(self) -> bool:
        """Events are missing. Whether that ends our reading: somebody else may read, too."""
        if self._lease is not None and self._lease.fence is not None:
            return False
        self._torn = True
        self._look()
        return True

    def close(self) -> None:
        """Nobody wants it any more."""
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
