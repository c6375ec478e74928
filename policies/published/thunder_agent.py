"""ThunderAgent: pauses agents' programs at the router while the KV memory of workers is full."""

from __future__ import annotations

from dataclasses import dataclass

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.programs import ProgramLimits, Programs


@dataclass(frozen=True, slots=True)
class ThunderAgent(ProgramLimits):
    """The cost is -1 for the worker of the request's program, else the tokens that workers have of
    programs.

    All costs are +inf while the program is paused, or if it is new and no worker has room for it. A
    program is a group, or else a session (`RequestView.group`). It is reasoning while one of its
    requests is under way, else acting. A worker's used tokens are the contexts of its programs,
    plus `program_tokens` for each. Every `interval_s` seconds:

    1. While less than `resume_below` of a worker's KV memory is used, paused programs are resumed:
       those with a waiting request, then new ones, then acting ones, small ones first, as far as
       all fit. Then they are placed, the largest first, at the worker with the most free memory.
    2. A program whose request has waited for `force_s` is resumed at the worker with the most free
       memory; the tokens of acting programs are halved for every `acting_half_life_s` they act.
    3. If more than `pause_above` is used, acting programs are paused until `pause_target` is
       reached, small ones first. If that is not enough, reasoning ones are marked, small ones
       first, and paused when their requests end.

    A paused program loses its worker. A new program waits while any other is paused; else it goes
    to the worker with the fewest tokens among those with room for it, with ties broken at random.
    In the check, ties go to the program that began first, and to the lower worker id.

    Source: ThunderAgent-org/ThunderAgent 30ae41a and its port in ai-dynamo/dynamo 227ce2e, 8c8d735
    (2026), which has the constants used here. Upstream pauses above 1.0 and marks as this policy
    does; the port marks all. Acting tokens have the weight 1.0 in both. The differences are:

    - A policy sees no request that the router refused. One that waits longer than `hold_s` is
      assumed to be refused; set it as `limits.hold_s`. If it is below `force_s`, no program is
      ever forced.
    - A group's tokens are those of its sessions together, at most 64 of them, each until its client
      says that it is over or it is idle for `retention_s`; shared prefixes count in each, as the
      port does by default. Upstream takes an engine's own count.
    - Requests of one program run at the same time; the port sends one after another.
    - A request without group and session is a program of its own that waits for room only.
    - If a request has two legs, the worker that decodes is the program's.

    A worker whose capacity is NaN has room for all. Beyond `max_programs`, the program that was
    used longest ago and has no request is forgotten; if all have a request, a new one is placed by
    room only. Hits are not read.

    Spill depth: a program never leaves its worker until it is paused; there is no affinity between
    programs.
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
