"""All that names workers, made one list: who comes first is believed where two differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.discovery.source import Seen
from router.fleet_io.wanted import CONFIGURATION, Wanted
from router.worker_spec import WorkerSpec


def union(
    configured: Iterable[WorkerSpec], sources: Sequence[tuple[str, Iterable[Seen]]]
) -> tuple[list[Wanted], list[str]]:
    """Each worker once, and what was passed over for another's sake.

    The configuration comes first, then the sources in their order: the first that names a worker
    says how it is, and whether it stops. An engine as a whole and one of its ranks exclude each
    other.
    """
    wanted: dict[str, dict[int | None, Wanted]] = {}
    stopping: set[tuple[str, int | None]] = set()
    passed_over: list[str] = []

    def name(one: Wanted) -> bool:
        at_url = wanted.setdefault(one.spec.url, {})
        first = at_url.get(one.spec.rank) or at_url.get(None)
        if first is None and one.spec.rank is None:
            first = next(iter(at_url.values()), None)
        if first is None:
            at_url[one.spec.rank] = one
            return True
        if first.spec != one.spec:
            passed_over.append(
                f"{one.by} names {one.spec}, which {first.by} names as {first.spec}: that counts"
            )
        return False

    for spec in configured:
        name(Wanted(spec, CONFIGURATION))
    for by, workers in sources:
        for seen in workers:
            if name(Wanted(seen.spec, by)) and seen.stopping:
                stopping.add((seen.spec.url, seen.spec.rank))
    all_of_them = [one for at_url in wanted.values() for one in at_url.values()]
    return [one for one in all_of_them if one.key not in stopping], passed_over
