"""Which replica reads events that one alone can have: a lease by their address.

Who has the lease reads. Two more things decide where Redis is away or comes back:

- *Redis away*: the lease ends, and nobody else can get it. Who read last goes on, for else the
  events would be lost to all. It cannot see whether it alone is cut off and somebody else has the
  lease by now; then both read, each finds holes in the numbers, and it stops at its first hole.
- *Redis back*: whoever joins asks for the lease only when it knows as much as the one that reads,
  or nobody said in a while that he reads. So the one that went on gets it again.

A reader whose token is not the greatest that was heard of stops at once.
"""

from __future__ import annotations

from typing import Protocol

from router.replicas.lease import Lease, Leases

LEASE_PREFIX = "kv-events:"
_ALONE_S = 1.0  # for a reader to say so, where none was heard of


class Candidate(Protocol):
    """One worker's events at this address."""

    @property
    def knows(self) -> bool:
        """All that the reader tells is known here."""
        ...

    def elected(self) -> None:
        """Look again who reads."""
        ...


class Election:
    """Of one address. Lifetime: while somebody here wants its events."""

    def __init__(self, address: str, leases: Leases, now_s: float, connected: bool) -> None:
        """`connected`: the link to Redis is up."""
        self.candidates: list[Candidate] = []
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
