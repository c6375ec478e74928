"""The sessions of a workload: its jobs grouped by session, and random draws of the same sessions.

A recorded trace is one draw: near saturation its figures depend on chance as much as on the policy.
A `Draw` is another one, by the bootstrap (Efron, 1979): as many sessions as were recorded, drawn
with replacement, each moved by a little. Turns of a session keep their order, gaps and prefixes.
Jobs are drawn together if they are of one session or group, or if they continue behind the same
block. A prefix that continues in `FORK` ways or more does not count: it is a system prompt or
tools, which belong to no session. So sub-agents come with their parent, and chats without names are
found by the blocks that their turns share. Blocks of two or more such sessions keep their hashes in
every draw. All other blocks get new hashes each time the session is drawn again, because a copy is
another user with another text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from policies.contract import Hashes
from simulator.traces.chain import light_mix
from simulator.traces.job import Job, TraceError

MAX_SESSION_JOBS = 2_000_000
MAX_BLOCKS = 10_000_000  # different ones of a workload that is drawn from: some 100 bytes each
FORK = 8  # a prefix that continues in this many ways belongs to no session
# A start moves by at most the time in which so many sessions begin: bursts longer than that stay.
JITTER_SESSIONS = 16
COPY = 0xD1342543DE82EF95  # odd, and not in `chain.py`, so that a copy's hashes are new


def sessions(jobs: Iterator[Job]) -> list[tuple[str | None, list[Job]]]:
    """Return the jobs grouped by conversation, in order of first arrival, with turns in order.

    A job without a session is a conversation of its own (None). Raises `TraceError` above
    `MAX_SESSION_JOBS` jobs, because a closed loop would have to hold them.
    """
    groups: list[tuple[str | None, list[Job]]] = []
    by_name: dict[str, list[Job]] = {}
    for count, job in enumerate(jobs):
        if count == MAX_SESSION_JOBS:
            raise TraceError(
                f"more than {MAX_SESSION_JOBS} requests: a closed loop holds its sessions; "
                "take fewer requests"
            )
        turns = by_name.get(job.session) if job.session is not None else None
        if turns is None:
            turns = []
            groups.append((job.session, turns))
            if job.session is not None:
                by_name[job.session] = turns
        turns.append(job)
    return groups


class _Drawn(NamedTuple):
    """One job of a draw, with its time and the number of its copy. Lifetime: stream."""

    at_ns: int
    copy: int  # of its session: how often it was drawn before
    job: Job


class Draw:
    """A random draw of the sessions of `jobs`; equal jobs and seed give an equal draw.

    It draws as many sessions as `jobs` has, each equally likely every time, so that number of
    requests and rate are the same in expectation. A session's start moves by at most the time in
    which `JITTER_SESSIONS` begin, either way; if one of its requests would leave the span from
    first to last arrival, the move is reflected at the end it would cross. It holds all jobs and
    block hashes. Raises `TraceError` for too many of them, and for fewer than two sessions.
    Lifetime: stream.
    """

    def __init__(self, jobs: Iterable[Job], seed: int) -> None:
        held = _Held(jobs)
        groups = held.groups()
        self._shared = held.is_shared
        self._names = {
            name for job in held.jobs for name in (job.session, job.group) if name is not None
        }
        if len(groups) == 1:
            raise TraceError(
                f"resample: all {len(held.jobs)} requests are of one session, so there is nothing "
                "to draw from; take a longer part"
            )
        first_ns = held.jobs[0].at_ns if groups else 0
        last_ns = held.jobs[-1].at_ns if groups else 0
        jitter_ns = JITTER_SESSIONS * (last_ns - first_ns) / max(1, len(groups))
        random, copies = Random(f"resample {seed}"), defaultdict[int, int](int)
        drawn: list[_Drawn] = []
        for _ in groups:
            number = random.randrange(len(groups))
            own, copy = groups[number], copies[number]
            copies[number] += 1
            early_ns, late_ns = own[0].at_ns - first_ns, last_ns - own[-1].at_ns
            moved_ns = random.uniform(-jitter_ns, jitter_ns)
            moved_ns = round(_reflected(moved_ns, -early_ns, late_ns))
            drawn += [_Drawn(job.at_ns + moved_ns, copy, job) for job in own]
        drawn.sort(key=lambda one: one.at_ns)  # stable: turns of one instant keep their order
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self._drawn)

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs of the draw in order of arrival."""
        names: dict[tuple[str, int], str] = {}

        def named(name: str | None, copy: int) -> str | None:
            if name is None:
                return None
            known = names.get((name, copy))
            return known or names.setdefault((name, copy), self._new_name(name, copy))

        for at_ns, copy, job in self._drawn:
            if not copy:
                yield msgspec.structs.replace(job, at_ns=at_ns)
                continue
            yield msgspec.structs.replace(
                job,
                at_ns=at_ns,
                session=named(job.session, copy),
                group=named(job.group, copy),
                parent=named(job.parent, copy),
                waits_for=tuple(filter(None, (named(name, copy) for name in job.waits_for))),
                ids=self._own(job.ids, copy),
                answer_ids=self._own(job.answer_ids, copy),
            )

    def _new_name(self, name: str, copy: int) -> str:
        found = f"{name}~{copy}"
        while found in self._names:
            found += "~"
        self._names.add(found)
        return found

    def _own(self, ids: Hashes, copy: int) -> Hashes:
        """Return the ids of a job in the copy number `copy` of its session: shared ids, which come
        first, stay; the others are new.
        """
        places = range(len(ids))
        shared = bisect_left(places, True, key=lambda place: not self._shared(ids.item(place)))
        if shared == len(ids):
            return ids
        own = light_mix(ids[shared:] + np.uint64(COPY * copy % 2**64))
        return np.concatenate((ids[:shared], own))


def _reflected(moved: float, low: float, high: float) -> float:
    """Return `moved`, reflected at `low` <= 0 and `high` >= 0 as often as it would cross them."""
    span = high - low
    if span <= 0:
        return 0.0
    offset = (moved - low) % (2 * span)
    return low + min(offset, 2 * span - offset)


NOBODY, SHARED = -1, -2


class _Held:
    """All jobs, and the tree of their blocks, in which each id is a node. Lifetime: stream."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.jobs: list[Job] = []
        self._node: dict[int, int] = {}  # id -> its place in the arrays, parents before children
        self._parent = array("i")  # NOBODY: a prompt begins with it
        self._ways = array("i")  # in which a prefix goes on
        self._owner = array("i")  # the only session with it, NOBODY before that is known, or SHARED
        for job in jobs:
            if len(self.jobs) == MAX_SESSION_JOBS:
                raise TraceError(
                    f"resample: more than {MAX_SESSION_JOBS} requests, which it holds; take fewer "
                    "requests"
                )
            self.jobs.append(job)
            self._grow(job.ids)

    def is_shared(self, one: int) -> bool:
        """Return True if two or more sessions have this block."""
        node = self._node.get(one)
        return node is not None and self._owner[node] == SHARED

    def groups(self) -> list[list[Job]]:
        """Return the jobs of each session in order of arrival, sessions in order of their first
        job.
        """
        union, begun = _Union(), self._begun()
        keys: list[Hashable] = []
        for number, job in enumerate(self.jobs):
            last = self._node[job.ids.item(-1)] if len(job.ids) else NOBODY
            key: Hashable = ("job", number)
            if last != NOBODY and self._ways[last] < FORK:
                key = begun[last]
            if job.session is not None:
                union.join(job.session, key)
            if job.group is not None:
                union.join(("group", job.group), key)
            keys.append(key)
        groups: dict[Hashable, list[Job]] = {}
        places: dict[Hashable, int] = {}
        for key, job in zip(keys, self.jobs, strict=True):
            root = union.root(key)
            groups.setdefault(root, []).append(job)
            self._take(job.ids, places.setdefault(root, len(places)))
        return list(groups.values())

    def _grow(self, ids: Hashes) -> None:
        """Add the new blocks of a prompt to the tree.

        The known blocks come first, because an id names its whole prefix.
        """
        node = self._node
        known = bisect_left(range(len(ids)), True, key=lambda place: ids.item(place) not in node)
        parent = node[ids.item(known - 1)] if known else NOBODY
        for one in ids[known:].tolist():
            if one not in node:  # it may be known by an error of the source: behind another prefix
                if len(node) == MAX_BLOCKS:
                    raise TraceError(
                        f"resample: more than {MAX_BLOCKS} different blocks, which it holds; take "
                        "fewer requests"
                    )
                node[one] = len(node)
                self._parent.append(parent)
                self._ways.append(0)
                self._owner.append(NOBODY)
                if parent != NOBODY:
                    self._ways[parent] += 1
            parent = node[one]

    def _begun(self) -> array[int]:
        """Return, for each node, its first ancestor (or itself) that follows all widely shared
        prefixes.
        """
        begun = array("i")
        for node, parent in enumerate(self._parent):
            first = parent == NOBODY or self._ways[parent] >= FORK
            begun.append(node if first else begun[parent])
        return begun

    def _take(self, ids: Hashes, session: int) -> None:
        """Make the session the owner of its blocks; blocks with another owner become shared."""
        owner = self._owner
        for place in range(len(ids) - 1, -1, -1):
            node = self._node[ids.item(place)]
            before = owner[node]
            if before in (session, SHARED):
                break  # all blocks before it are, too
            owner[node] = session if before == NOBODY else SHARED


class _Union:
    """Groups of keys that belong together (union-find). Lifetime: one grouping."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def root(self, key: Hashable) -> Hashable:
        """Return the key that represents the whole group of this key."""
        while (above := self._above.get(key, key)) != key:
            self._above[key] = key = self._above.get(above, above)
        return key

    def join(self, key: Hashable, other: Hashable) -> None:
        """Merge the groups of two keys."""
        one, two = self.root(key), self.root(other)
        if one != two:
            self._above[two] = one
