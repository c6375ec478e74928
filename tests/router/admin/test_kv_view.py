"""Tests of the admin port's view of a worker's cache."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from policies.facts import KvEvents, WorkerChange, WorkerFacts
from router.admin.kv_view import KvViewError, decode_kv_view
from tests.router.admin_port import URL, Admin, admin
from tests.router.core.core_world import BLOCK, stored


async def view_of(one: Admin, worker_id: int) -> bytes:
    async with one.http.get(f"{one.url}/kv?worker={worker_id}") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.read()


async def worker_with_events(one: Admin) -> int:
    """Add a worker whose KV events the test itself sends; return its id."""
    _, row = await one.request("POST", "/workers", URL)
    facts = WorkerFacts(name=URL, models=("m",), block_size=BLOCK, has_events=True)
    one.router.dispatcher.handle_fact(WorkerChange(0.0, row["id"], "ready", facts))
    return int(row["id"])


async def test_the_view_has_all_blocks_of_a_worker_and_the_state_of_its_events() -> None:
    async with admin() as one:
        worker_id = await worker_with_events(one)
        assert not decode_kv_view(await view_of(one, worker_id)).known
        events = tuple(stored([n]) for n in range(3))
        one.router.dispatcher.handle_fact(KvEvents(0.0, worker_id, 0, events))
        one.router.dispatcher.handle_fact(KvEvents(0.0, worker_id, 5, (stored([9]),)))
        view = decode_kv_view(await view_of(one, worker_id))
        worker = one.router.dispatcher.core.workers.get(worker_id)
        assert worker is not None
        expected = np.sort(worker.kv.chains())
        assert np.array_equal(view.chains(), expected)
        assert len(expected) == 3
        assert (view.next_seq, view.backlog_batches, view.resyncing) == (1, 1, True)
        assert (view.known, view.block_size, view.url) == (False, BLOCK, URL)
        assert view.counters["gaps"] == 1
        assert view.index_agrees
        one.router.dispatcher.core.caches.index.remove(worker.slot, expected[:1])
        assert not decode_kv_view(await view_of(one, worker_id)).index_agrees
        assert len(view.chains("disk")) == 0


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("", 404, "no worker"),
        ("?worker=7", 404, "ids: 0"),
        ("?worker=-0", 404, "no worker"),
        ("?worker=0", 409, "not recognized"),
    ],
)
async def test_an_unknown_or_unrecognized_worker_is_refused(
    query: str, status: int, says: str
) -> None:
    async with admin() as one:
        await one.request("POST", "/workers", URL)  # where nobody listens
        got, answer = await one.request("GET", f"/kv{query}")
        assert got == status
        assert says in answer["error"]["message"]


async def test_bytes_that_are_not_a_kv_view_are_refused() -> None:
    async with admin() as one:
        body = await view_of(one, await worker_with_events(one))
    fields = msgspec.msgpack.decode(body)
    odd = {"tier": "gpu", "chains": b"1234567", "indexed": 0, "index_held": 0}
    for wrong in (
        b"",
        body[:-1],
        b"\x81" * 5_000,
        msgspec.msgpack.encode(fields | {"version": 1}),
        msgspec.msgpack.encode(fields | {"tiers": [odd]}),
        msgspec.msgpack.encode(fields | {"known": "yes"}),
    ):
        with pytest.raises(KvViewError):
            decode_kv_view(wrong)
