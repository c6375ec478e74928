"""The fleet is made to match what is named now, by the configuration and by whoever else names."""

from __future__ import annotations

from collections.abc import Iterable

from router.core.roster import TableFullError
from router.fleet_io.manager import DuplicateWorkerError, FleetManager
from router.fleet_io.member import Member
from router.fleet_io.wanted import (
    CONFIGURATION,
    Key,
    Named,
    Wanted,
    key_of,
    same_but_thresholds,
    spec_of,
)

_RELOAD = "configuration reload"


def reconcile(fleet: FleetManager, wanted: Iterable[Wanted]) -> list[str]:
    """Add the new, drain the dropped, but for those that were added by hand.

    Other thresholds or another weight change a worker in place, and one that is on its way out
    turns round when it is named again. What was taken out by hand stays out for as long as it is
    named without a break. Returns what could not be done, and why.
    """
    missing = {one.key: one for one in wanted}
    fleet.dismissed &= missing.keys()
    for key in fleet.dismissed:
        del missing[key]
    groups: dict[int, tuple[Named, list[Member]]] = {}
    for member in fleet.members.values():
        groups.setdefault(id(member.named), (member.named, []))[1].append(member)
    for named, members in groups.values():
        if staying := [m for m in members if not m.leaving]:
            _keep_or_drop(fleet, named, staying, missing)
    for named, members in groups.values():
        one = missing.get(key_of(named.spec))
        back = [m for m in members if m.leave is not None and m.leave.may_return and not m.parting]
        if one is not None and back and same_but_thresholds(one.spec, named.spec):
            del missing[one.key]
            for member in back:
                fleet.take_back(member, one.by)
            _rename(named, one, back)
    refused = []
    for one in missing.values():
        try:
            fleet.add(one.spec, _who(one.by))
        except (TableFullError, DuplicateWorkerError) as error:
            refused.append(f"worker {one.spec.name}: {error}")
    return refused


def _keep_or_drop(
    fleet: FleetManager, named: Named, staying: list[Member], missing: dict[Key, Wanted]
) -> None:
    one = missing.get(key_of(named.spec))
    if one is not None and same_but_thresholds(one.spec, named.spec):
        del missing[one.key]
        _rename(named, one, staying)
    elif named.by_hand:
        missing.pop(key_of(named.spec), None)
    else:
        for member in staying:
            fleet.drop(member, _who(named.by), may_return=True)


def _rename(named: Named, one: Wanted, members: Iterable[Member]) -> None:
    """`one` names the worker from now on."""
    if not named.by_hand:
        named.by = one.by
    if one.spec != named.spec:
        named.spec = one.spec
        for member in members:
            member.respec(spec_of(named, member.spec.rank))


def _who(by: str) -> str:
    """Whoever named it, as the log calls it once the router runs."""
    return _RELOAD if by == CONFIGURATION else by
