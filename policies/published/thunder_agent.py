"""ThunderAgent: programs of agents are paused at the router while their workers' memory is full."""

from __future__ import annotations

from dataclasses import dataclass

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.programs import ProgramLimits, Programs


@dataclass(frozen=True, slots=True)
class ThunderAgent(ProgramLimits):
    """cost = -1 for the worker of the request's program, else the tokens that workers have of
    programs; +inf for all while the program is paused, or where a new one has no room.

    A program is a group, or else a session (`RequestView.group`). It is reasoning while a request
    of it is under way, and acting else. A worker's used tokens are the contexts of its programs,
    and `program_tokens` for each. Every `interval_s` seconds:

    1. While less than `resume_below` of a worker's KV memory is used, paused programs are resumed:
       those with a waiting request, then new ones, then acting ones, small ones first, as far as
       all fit; then placed, the largest first, where most is free.
    2. A program whose request waits for `force_s` is resumed where most is free, the tokens of
       acting programs halved for every `acting_half_life_s` they act.
    3. Where more than `pause_above` is used, acting programs are paused until `pause_target` is,
       small ones first. If that is not enough, reasoning ones are marked, small ones first, and
       paused when their requests end.

    A paused program loses its worker. A new program waits while any other is paused; else it goes
    to the worker with the fewest tokens of those with room for it; such ties are drawn. In the
    check ties go to the program that began first, and to the lower worker id.

    Source: ThunderAgent-org/ThunderAgent 30ae41a and its port in ai-dynamo/dynamo 227ce2e, 8c8d735
    (2026), whose constants these are; upstream pauses above 1.0 and marks as here, where the port
    marks all. Acting tokens weigh 1.0 in both. What differs here:

    - A policy sees no request that the router refused. One that waits longer than `hold_s` is taken
      for one; set it as `limits.hold_s`. Where that is below `force_s`, nothing is ever forced.
    - A group's tokens are those of its sessions together, at most 64 of them, each until its client
      says that it is over or it is idle for `retention_s`; shared prefixes count in each, as the
      port does by default. Upstream takes an engine's own count.
    - Requests of one program run at the same time; the port sends one after another.
    - A request without group and session is a program of its own that waits for room only.
    - Of two legs the worker that decodes is the program's.

    A capacity that is NaN has room for all. Beyond `max_programs` the program used longest ago and
    without a request is forgotten; if all have one, a new one goes by room only. Hits are not read.

    Spill depth: a program's worker is never left until it is paused; no affinity between programs.
    """

    def initial_state(self) -> Programs:
        return Programs(self)

    def observe(self, fact: Fact, state: Programs) -> Programs:
        state.observe(fact)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: Programs) -> Floats:
        return state.costs(request, fleet)

    def asks_held(self, state: Programs) -> bool:
        """Return True right after a check, which may have resumed any program."""
        return state.checked
