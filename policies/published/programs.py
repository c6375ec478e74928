"""The memory of the policy ThunderAgent: the agents' programs, the worker and KV tokens of each,
and which are paused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf, isnan

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.facts import (
    Arrival,
    Dispatched,
    Fact,
    Failure,
    Finish,
    Progress,
    Role,
    Tick,
    WorkerChange,
)

MAX_CHAINS = 64  # sessions of one program; beyond it the least recently used is dropped
MAX_REQUESTS = 65_536  # under way; beyond it the oldest is assumed to have ended

Key = tuple[str | None, str, str]  # tenant, "group", "session" or "request", and its name


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The parameters of ThunderAgent, which the policy and its memory share.

    Shares are of a worker's KV memory, in [0, 1]. Raises ValueError for invalid values. Lifetime:
    process.
    """

    pause_above: float = 0.95
    pause_target: float = 0.80
    resume_below: float = 0.85
    interval_s: float = 5.0
    force_s: float = 1_800.0
    retention_s: float = 1_800.0
    program_tokens: int = 100
    acting_half_life_s: float = 1.0
    acting_decay: bool = False
    max_programs: int = 10_000
    hold_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("pause_above", "pause_target", "resume_below"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in (0, 1]")
        for name in ("pause_target", "resume_below"):
            if getattr(self, name) > self.pause_above:
                raise ValueError(f"{name} is {getattr(self, name)}, above pause_above")
        for one in fields(self):
            if one.name.endswith("_s") and not 0.0 < getattr(self, one.name) < inf:
                raise ValueError(f"{one.name} is {getattr(self, one.name)}; it must be above 0")
        if self.program_tokens < 0:
            raise ValueError(f"program_tokens is {self.program_tokens}; it must be 0 or more")
        if self.max_programs < 1:
            raise ValueError(f"max_programs is {self.max_programs}; it must be 1 or more")


@dataclass(slots=True, eq=False)
class Program:
    """A program: one agent's run, or a group of runs, with its context tokens and the worker that
    holds them. It is reasoning while one of its requests is under way, and else acting: one of its
    tools runs.
    """

    key: Key
    number: int  # in the order in which programs began, which breaks ties
    chains: OrderedDict[str | None, tuple[int, float]]  # session -> context tokens, last use
    worker_id: int | None = None
    paused: bool = False  # until the check resumes it
    marked: bool = False  # it is paused once it has no request at a worker
    steps: int = 0  # requests sent; 0: it is new
    waiting: int = 0  # requests at the router
    running: int = 0  # requests at workers
    deferred_s: float | None = None  # time since which one of its requests waits for a resumption
    acting_s: float = 0.0  # when its latest request ended
    charged: tuple[int | None, int] = (None, 0)  # worker and its charged tokens

    @property
    def tokens(self) -> int:
        """The number of context tokens of all the program's sessions together."""
        return sum(tokens for tokens, _ in self.chains.values())

    @property
    def acting(self) -> bool:
        """True if no request of the program is under way."""
        return not (self.waiting or self.running)


@dataclass(slots=True)
class UnderWay:
    """A request of a program that waits at the router or is at a worker."""

    key: Key
    session: str | None
    prompt_tokens: int
    touched_s: float
    output_tokens: int = 0
    final: bool = False
    sent: bool = False
    leg: Role = "both"


def key_of(tenant: str | None, group: str | None, session: str | None) -> Key | None:
    """Return the key of the program that a request belongs to: its group, else its session; None if
    the request has neither.
    """
    if group is not None:
        return tenant, "group", group
    return None if session is None else (tenant, "session", session)


@dataclass(slots=True)
class Programs:
    """All programs and their requests, and how many tokens of programs each worker has. Lifetime:
    the policy's.
    """

    limits: ProgramLimits
    programs: OrderedDict[Key, Program] = field(default_factory=OrderedDict)
    paused: set[Key] = field(default_factory=set)
    used: dict[int, int] = field(default_factory=dict)  # worker -> tokens of its programs, above 0
    capacity: dict[int, float] = field(default_factory=dict)  # worker -> KV tokens; inf: unknown
    live: set[int] = field(default_factory=set)
    requests: OrderedDict[int, UnderWay] = field(default_factory=OrderedDict)
    checked: bool = False  # by the latest fact
    _new_waits: set[Key] = field(default_factory=set)  # asked since the last fact
    _begun: int = 0
    _checked_s: float = -inf

    # --- what a policy asks -----------------------------------------------------------------

    def costs(self, request: RequestView, fleet: FleetView) -> Floats:
        """Return the cost of each worker, float64[rows]: the tokens that it has of programs, -1 for
        the worker of the request's own program, or +inf for a worker that may not be used.
        """
        key = key_of(request.tenant, request.group, request.session)
        program = None if key is None else self.programs.get(key)
        ids = fleet.worker_id.tolist()
        used = np.array([self.used.get(worker_id, 0) for worker_id in ids], dtype=np.float64)
        if program is not None and program.worker_id in ids:
            used[ids.index(program.worker_id)] = -1.0
            return used
        if program is not None and program.worker_id is None:
            others_wait = len(self.paused) > (program.key in self.paused)
            if program.paused or (not program.steps and others_wait):
                return np.full(len(ids), inf)
        tokens = request.prompt_tokens if program is None else program.tokens
        capacity = fleet.kv_capacity_tokens
        full = capacity - used < tokens + self.limits.program_tokens  # NaN: False
        return np.where(full, inf, used)

    # --- facts ------------------------------------------------------------------------------

    def observe(self, fact: Fact) -> None:
        """Update the programs by a fact, and check all of them if the interval between two checks
        is over.
        """
        kind = type(fact)
        self.checked = False
        if kind is Arrival:
            self._defer(fact.now_s)
            self._arrived(fact)  # type: ignore[arg-type]
        elif kind is Dispatched:
            self._dispatched(fact)  # type: ignore[arg-type]
        elif kind is Progress:
            self._progressed(fact)  # type: ignore[arg-type]
        elif kind is Finish:
            self._finished(fact)  # type: ignore[arg-type]
        elif kind is Failure:
            self._failed(fact)  # type: ignore[arg-type]
        elif kind is WorkerChange:
            self._changed(fact)  # type: ignore[arg-type]
        elif kind is Tick:
            self._defer(fact.now_s)
            if fact.now_s - self._checked_s >= self.limits.interval_s:
                self.checked, self._checked_s = True, fact.now_s
                self._expire(fact.now_s)
                self._resume(fact.now_s)
                self._force(fact.now_s)
                self._pause()

    def _arrived(self, fact: Arrival) -> None:
        key = key_of(fact.tenant, fact.identity.group, fact.session)
        if key is None or fact.request_id in self.requests:
            return
        program = self._program(key, fact.now_s)
        if program is None:
            return
        under_way = UnderWay(key, fact.session, fact.prompt_tokens, fact.now_s)
        under_way.final = fact.identity.final
        self._remember(fact.request_id, under_way)
        program.waiting += 1
        self._new_waits.add(key)
        self._context(program, fact.session, fact.prompt_tokens, fact.now_s)

    def _dispatched(self, fact: Dispatched) -> None:
        under_way = self.requests.get(fact.request_id)
        if under_way is None:  # no known program: the request is one by itself
            key = fact.tenant, "request", str(fact.request_id)
            program = self._program(key, fact.now_s)
            if program is None:
                return
            tokens = fact.hit_tokens + fact.uncached_tokens
            under_way = UnderWay(key, None, tokens, fact.now_s, final=True)
            self._remember(fact.request_id, under_way)
            program.waiting += 1
            self._context(program, None, tokens, fact.now_s)
        program = self.programs[under_way.key]
        if not under_way.sent:
            under_way.sent = True
            program.waiting -= 1
            program.running += 1
            program.steps += 1
        under_way.leg, under_way.touched_s = fact.leg, fact.now_s
        if fact.leg != "prefill":
            self._place(program, fact.worker_id)

    def _progressed(self, fact: Progress) -> None:
        under_way = self.requests.get(fact.request_id)
        if under_way is not None:
            under_way.output_tokens, under_way.touched_s = fact.output_tokens, fact.now_s
            tokens = under_way.prompt_tokens + fact.output_tokens
            program = self.programs[under_way.key]
            self._context(program, under_way.session, tokens, fact.now_s)

    def _finished(self, fact: Finish) -> None:
        under_way = self.requests.get(fact.request_id)
        if under_way is None:
            return
        if under_way.leg == "prefill":  # the decode leg follows
            under_way.touched_s = fact.now_s
            return
        program = self.programs[under_way.key]
        prompt = under_way.prompt_tokens if fact.prompt_tokens is None else fact.prompt_tokens
        output = under_way.output_tokens if fact.output_tokens is None else fact.output_tokens
        if under_way.final:
            program.chains.pop(under_way.session, None)
        else:
            self._context(program, under_way.session, prompt + output, fact.now_s)
        self._end(fact.request_id, fact.now_s)

    def _failed(self, fact: Failure) -> None:
        under_way = self.requests.get(fact.request_id)
        if under_way is None or fact.runs_on or (fact.leg == "prefill" and not fact.retry):
            return
        if not fact.retry:
            self._end(fact.request_id, fact.now_s)
        elif under_way.sent:
            program = self.programs[under_way.key]
            under_way.sent, under_way.leg, under_way.touched_s = False, "both", fact.now_s
            program.running -= 1
            program.waiting += 1
            self._new_waits.add(program.key)

    def _changed(self, fact: WorkerChange) -> None:
        worker_id = fact.worker_id
        if fact.spec is not None:
            tokens = fact.spec.kv_capacity_tokens
            self.capacity[worker_id] = inf if isnan(tokens) else tokens
        if fact.state == "ready":
            self.live.add(worker_id)
            return
        self.live.discard(worker_id)
        if fact.state == "gone":
            self.capacity.pop(worker_id, None)
        if fact.state != "draining":
            for program in self.programs.values():
                if program.worker_id == worker_id:
                    program.worker_id = None
                    self._charge(program)

    # --- one program ------------------------------------------------------------------------

    def _program(self, key: Key, now_s: float) -> Program | None:
        """Return the program called `key`, a new one if it is unknown. Return None if it is new and
        the allowed number of programs all have requests.
        """
        program = self.programs.get(key)
        if program is not None:
            self.programs.move_to_end(key)
            return program
        if len(self.programs) >= self.limits.max_programs:
            idle = next((one for one in self.programs.values() if one.acting), None)
            if idle is None:
                return None
            self._forget(idle)
        self._begun += 1
        program = Program(key, self._begun, OrderedDict(), acting_s=now_s)
        self.programs[key] = program
        return program

    def _context(self, program: Program, session: str | None, tokens: int, now_s: float) -> None:
        program.chains[session] = tokens, now_s
        program.chains.move_to_end(session)
        if len(program.chains) > MAX_CHAINS:
            program.chains.popitem(last=False)
        self._charge(program)

    def _charge(self, program: Program) -> None:
        """Charge a program's tokens to its worker, and replace its earlier charge."""
        worker_id, tokens = program.charged
        if worker_id is not None:
            left = self.used[worker_id] - tokens
            self.used[worker_id] = left
            if not left:
                del self.used[worker_id]
        tokens = program.tokens + self.limits.program_tokens
        worker_id = program.worker_id if tokens else None
        program.charged = worker_id, tokens
        if worker_id is not None:
            self.used[worker_id] = self.used.get(worker_id, 0) + tokens

    def _place(self, program: Program, worker_id: int) -> None:
        program.worker_id, program.paused, program.deferred_s = worker_id, False, None
        self.paused.discard(program.key)
        self._charge(program)

    def _take_worker(self, program: Program) -> None:
        """Pause a program: it has no worker until a check gives it one."""
        program.worker_id, program.paused, program.marked = None, True, False
        self.paused.add(program.key)
        self._charge(program)

    def _forget(self, program: Program) -> None:
        program.worker_id = None
        self._charge(program)
        self.paused.discard(program.key)
        self._new_waits.discard(program.key)
        del self.programs[program.key]

    # --- one request ------------------------------------------------------------------------

    def _remember(self, request_id: int, under_way: UnderWay) -> None:
        self.requests[request_id] = under_way
        if len(self.requests) > MAX_REQUESTS:
            self._end(next(iter(self.requests)), under_way.touched_s)

    def _end(self, request_id: int, now_s: float) -> None:
        """Forget a request that has ended; its program acts again, or is paused if it was
        marked.
        """
        under_way = self.requests.pop(request_id)
        program = self.programs[under_way.key]
        if under_way.sent:
            program.running -= 1
            program.acting_s = now_s
        else:
            program.waiting -= 1
        if not program.waiting:
            program.deferred_s = None
        self._charge(program)
        if not program.acting:
            return
        if not program.chains or not program.steps:
            self._forget(program)
        elif program.marked:
            self._take_worker(program)

    def _defer(self, now_s: float) -> None:
        """Pause programs whose requests got no worker when the policy was asked."""
        for key in self._new_waits:
            program = self.programs.get(key)
            if program is not None and program.waiting and program.worker_id is None:
                if program.deferred_s is None:
                    program.deferred_s = now_s
                self._take_worker(program)
        self._new_waits.clear()

    # --- the check --------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        """Forget requests for which no fact has come for too long, and programs that do not come
        back.
        """
        limits = self.limits
        for request_id, one in list(self.requests.items()):
            longest_s = limits.retention_s if one.sent else limits.hold_s
            if now_s - one.touched_s > longest_s:
                self._end(request_id, now_s)
        for program in list(self.programs.values()):
            chains = program.chains
            if not program.acting:
                continue
            while chains and now_s - next(iter(chains.values()))[1] >= limits.retention_s:
                chains.popitem(last=False)
            if not chains:
                self._forget(program)
            else:
                self._charge(program)

    def _room(self, now_s: float) -> list[tuple[float, int]]:
        """Return (minus the free tokens, worker id) of each worker that has room to resume a
        program, the one with most room first.
        """
        room = []
        decays = self.limits.acting_decay
        used: Mapping[int, float] = self._decayed(now_s) if decays else self.used
        for worker_id in self.live:
            share = self.capacity.get(worker_id, inf) * self.limits.resume_below
            free = share - used.get(worker_id, 0)
            if free > self.limits.program_tokens:
                room.append((-free, worker_id))
        return sorted(room)

    def _resume(self, now_s: float) -> None:
        """Resume as many paused programs as fit: those with a waiting request first, then new ones,
        and small ones before large ones.

        The programs that fit into all free memory together are placed one by one, the largest
        first, each at the worker with the most free memory.
        """
        if not self.paused:
            return
        room = self._room(now_s)
        if not room:
            return
        free = -sum(minus for minus, _ in room)
        chosen: list[tuple[int, Program]] = []
        for program in sorted((self.programs[key] for key in self.paused), key=_resume_order):
            required = program.tokens + self.limits.program_tokens
            if required <= free:
                free -= required
                chosen.append((required, program))
        for required, program in sorted(chosen, key=lambda one: (-one[0], one[1].number)):
            minus, worker_id = room[0]
            if required > -minus:
                continue
            self._place(program, worker_id)
            room[0] = minus + required, worker_id
            if -room[0][0] <= self.limits.program_tokens:
                del room[0]
                if not room:
                    return
            room.sort()

    def _force(self, now_s: float) -> None:
        """Resume programs whose requests wait for too long, at the worker with the most room."""
        late = [
            program
            for program in (self.programs[key] for key in self.paused)
            if program.deferred_s is not None and now_s - program.deferred_s >= self.limits.force_s
        ]
        if not late or not self.live:
            return
        used = dict(self._decayed(now_s))
        for program in sorted(late, key=_resume_order):
            room = ((used.get(one, 0.0) - self.capacity.get(one, inf), one) for one in self.live)
            worker_id = min(room)[1]
            self._place(program, worker_id)
            used[worker_id] = used.get(worker_id, 0.0) + program.charged[1]

    def _decayed(self, now_s: float) -> Mapping[int, float]:
        """Return the tokens on each worker; those of acting programs count less, the longer they
        act.
        """
        used: dict[int, float] = {}
        for program in self.programs.values():
            if program.worker_id is not None:
                tokens = float(program.tokens)
                if program.acting:
                    idle_s = now_s - program.acting_s
                    tokens *= 2.0 ** (-idle_s / self.limits.acting_half_life_s)
                before = used.get(program.worker_id, 0.0)
                used[program.worker_id] = before + tokens + self.limits.program_tokens
        return used

    def _pause(self) -> None:
        """Pause acting programs of full workers, small ones first; if that is not enough, mark
        reasoning ones to be paused later.
        """
        limits = self.limits
        full: dict[int, list[Program]] = {
            worker_id: []
            for worker_id, tokens in self.used.items()
            if tokens > limits.pause_above * self.capacity.get(worker_id, inf)
        }
        if not full:
            return
        for program in self.programs.values():
            if program.worker_id in full:
                full[program.worker_id].append(program)
        for worker_id, programs in full.items():
            self._relieve(worker_id, programs)

    def _relieve(self, worker_id: int, programs: Iterable[Program]) -> None:
        capacity = self.capacity[worker_id]
        by_size = sorted(programs, key=lambda one: (one.tokens, one.number))
        marked = sum(one.charged[1] for one in by_size if one.marked)
        left = self.used[worker_id] - marked
        if left <= self.limits.pause_above * capacity:
            return
        target = self.limits.pause_target * capacity
        for program in by_size:
            if left > target and program.acting:
                left -= program.charged[1]
                self._take_worker(program)
        for program in by_size:
            if left > target and not (program.acting or program.marked):
                left -= program.charged[1]
                program.marked = True


def _resume_order(program: Program) -> tuple[int, int, int]:
    """Return a sort key: programs with a request, then new ones, then acting ones; small ones
    first.
    """
    group = 2 if not program.waiting else 0 if program.steps else 1
    return group, program.tokens, program.number
