"""Puts a tenant's waiting requests in an order that is fair between the persons who sent them."""

from __future__ import annotations

from collections import Counter

from policies.facts import Arrival

_REMEMBERED_MAX = 4_096  # most groups without waiting requests whose finish tags are kept


def group_of(arrival: Arrival) -> str | None:
    """Return the id under which a request is counted, or None if the request counts by itself. The
    id is that of the group (one person's main agent with its sub-agents), else of the cache group,
    else of the user.
    """
    identity = arrival.identity
    return identity.group or identity.cache_group or identity.user


class GroupTurns:
    """Gives the waiting requests of one tenant start tags; the request with the lowest tag is
    served first. This is start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts at
    the virtual time of its arrival, or when the request before it in its group finishes, if that is
    later. So 30 sub-agents that one person starts at once do not keep other persons waiting until
    the last of them is served. The virtual time advances by the served work divided by the number
    of groups that wait, as if all groups were served at once (generalized processor sharing: Parekh
    and Gallager, 1993). A request without a group is a group of its own; such requests keep the
    order of their arrival. Lifetime: as long as a request of the tenant waits.
    """

    def __init__(self) -> None:
        self._now = 0.0  # virtual time, in tokens of work
        # By group: the virtual time at which its last request finishes.
        self._finish: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._alone = 0  # waiting requests without a group

    def begins(self, group: str | None, work: float) -> float:
        """Count a request that begins to wait, and return its start tag. `work` is the request's
        predicted work in tokens.
        """
        if group is None:
            self._alone += 1
            return self._now
        self._waiting[group] += 1
        return self._charge(group, work)

    def ends(self, group: str | None) -> None:
        """Count a request that stops waiting, for any reason."""
        if group is None:
            self._alone -= 1
            return
        self._waiting[group] -= 1
        if not self._waiting[group]:
            del self._waiting[group]

    def served(self, group: str | None, work: float, waited: bool) -> None:
        """Advance the virtual time by the work of a request that is sent to a worker. `waited` says
        whether the request waited here. If it did, it must still be counted as waiting, so `ends`
        is called after this method. If it did not, its group is charged now.
        """
        groups = len(self._waiting) + self._alone
        if not waited:
            groups += group is None or group not in self._waiting
            if group is not None:
                self._charge(group, work)
        self._now += work / groups

    def _charge(self, group: str, work: float) -> float:
        start = max(self._finish.pop(group, 0.0), self._now)
        self._finish[group] = start + work
        if len(self._finish) > _REMEMBERED_MAX + len(self._waiting):
            self._forget()
        return start

    def _forget(self) -> None:
        """Forget the groups whose work the virtual time has passed. If too many groups are left,
        also forget those that it will pass next.
        """
        kept = {g: tag for g, tag in self._finish.items() if tag > self._now or g in self._waiting}
        for group in sorted(kept, key=kept.__getitem__):
            if len(kept) <= _REMEMBERED_MAX // 2 + len(self._waiting):
                break
            if group not in self._waiting:
                del kept[group]
        self._finish = kept
