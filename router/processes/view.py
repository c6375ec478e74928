"""The fleet as satellites see it, taken from where the leader keeps it."""

from __future__ import annotations

from router.http.local_desk import LocalDesk
from router.processes.messages import Carrying, Pool, View


def view_of(desk: LocalDesk) -> View:
    """The fleet as of now."""
    members = desk.fleet.members.values()
    longest = {card["id"]: card.get("max_model_len") for card in desk.cards()}
    check, ready = desk.check, desk.ready_by_model()
    return View(
        tuple(Carrying(m.worker_id, str(m.spec), m.rank, m.kind, m.abandoned) for m in members),
        tuple(
            Pool(
                model,
                *desk.identity(model),
                tuple(sorted(desk.block_sizes(model))),
                longest.get(model),
                check is None or check.trusts(model),
                ready.get(model, 0),
            )
            for model in sorted({*desk.models(), *longest})
        ),
        desk.ready_workers(),
        desk.reasons(),
    )
