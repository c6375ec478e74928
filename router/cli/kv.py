"""The command `warmroute kv`, which compares the blocks that the router believes a worker holds
with those that the worker reports.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from engine.wire.events import MAX_SNAPSHOT_BYTES, BlockStored, WireError, decode_snapshot
from router.admin.kv_view import MAX_VIEW_BYTES, Chains, KvView, KvViewError, decode_kv_view
from router.cli.admin import AdminClient, AdminError, add_admin_flags, admin_of

_TRIES = 20  # to see both sides as of the same batch
_BETWEEN_TRIES_S = 0.05

ABOUT = """\
Print the KV blocks that the router knows of a worker, or compare these blocks with the worker's.

  warmroute kv --worker 0
  warmroute kv --worker 0 --compare http://127.0.0.1:8001

--compare needs a worker with GET /kv_snapshot, such as warmroute-engine. Under load the command
asks router and worker again until both answers include the same batch of events. Exit status:
0 blocks are equal or not compared, 1 blocks differ, 2 router or worker did not answer.
"""


def add_kv_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute kv`."""
    add_admin_flags(parser)
    parser.add_argument(
        "--worker", metavar="N", type=int, required=True,
        help="number of the worker, as in /workers",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar="URL",
        help="address of the worker; the command counts blocks that router and worker see alike "
            "or differently",
    )  # fmt: skip


def kv_command(args: argparse.Namespace) -> int:
    """Run `warmroute kv`, and return its exit status."""
    try:
        admin = admin_of(args)
        if args.compare is None:
            print(_shown(_view(admin, args.worker)))
            return 0
        engine = AdminClient(args.compare, None, "is this the worker's own address?")
        view, seq, held = _both(admin, args.worker, engine)
    except (AdminError, WireError, KvViewError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_shown(view))
    ours = view.chains()
    equal = len(np.intersect1d(ours, held, assume_unique=True))
    print(f"engine: as of batch {seq}, {len(held)} blocks")
    if not view.index_agrees:
        print("the index holds other blocks for it than its events told of")
    print(f"equal {equal}, missing here {len(held) - equal}, only here {len(ours) - equal}")
    if (apart := abs(view.next_seq - 1 - seq)) != 0:
        print(f"{apart} batches apart: the difference may be on its way; try again without load")
    return 0 if equal == len(ours) == len(held) else 1


def _view(admin: AdminClient, worker_id: int) -> KvView:
    """Return the router's view of a worker's cache. Raises AdminError or KvViewError if the view
    cannot be read.
    """
    return decode_kv_view(admin.data(f"/kv?worker={worker_id}", MAX_VIEW_BYTES))


def _both(admin: AdminClient, worker_id: int, engine: AdminClient) -> tuple[KvView, int, Chains]:
    """Return the router's view of a worker's cache, the worker's own batch number and the worker's
    own blocks. If possible, both are as of the same batch of events.
    """
    for last in [False] * (_TRIES - 1) + [True]:
        seq, held = truth_of(engine.data("/kv_snapshot", MAX_SNAPSHOT_BYTES))
        view = _view(admin, worker_id)
        if view.next_seq == seq + 1 or last:
            break
        time.sleep(_BETWEEN_TRIES_S)
    return view, seq, held


def truth_of(snapshot: bytes) -> tuple[int, Chains]:
    """Return the batch number and the chain hashes of all blocks, ascending, in a worker's
    snapshot. Our engine names its blocks by their chain hashes. Raises WireError for a malformed
    snapshot.
    """
    decoded = decode_snapshot(snapshot)
    events = (event for batch in decoded.batches for event in batch.events)
    stored = (event for event in events if isinstance(event, BlockStored))
    names = [name for event in stored for name in event.hashes]
    return decoded.seq, np.unique(np.array(names, dtype=np.uint64))


def _shown(view: KvView) -> str:
    if not view.has_events:
        return f"worker {view.worker} ({view.url}): no KV events, mirrored from what was sent to it"
    state = "known" if view.known else "unknown: a lower bound"
    if view.known and not view.exact:
        state = "known, for its cache has turned over since events were missed"
    tiers = ", ".join(f"{len(t.chains) // 8} blocks on tier {t.tier}" for t in view.tiers)
    waiting = f"{view.backlog_batches} batches and {view.parked_blocks} blocks wait"
    asked = "; missing events were asked for" if view.resyncing else ""
    asked += "" if view.heard else "; its events do not reach the router"
    return (
        f"worker {view.worker} ({view.url}): {state}, next batch {view.next_seq}, {tiers}, "
        f"{waiting}{asked}"
    )
