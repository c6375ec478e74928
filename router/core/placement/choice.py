"""The possible results of a decision: one worker, two workers, or no worker now."""

from __future__ import annotations

from typing import NamedTuple

from policies.facts import Role
from policies.record import record
from router.core.contract.actions import Decision, Details
from router.core.workers.ledger import NO_LOADS, Loads
from router.core.workers.table import Worker


@record
class Choice:
    """The worker chosen for a request, or for its prefill or decode leg, and the reason."""

    worker: Worker
    decision: Decision
    uncached_tokens: int  # of the prompt, to be computed there; the last token always is
    loads: Loads = NO_LOADS  # of the prompt, to be loaded there from below its GPU


class Placement(NamedTuple):
    """The workers chosen for a request: one worker for the whole request, or one for the prefill
    and one for the decode.
    """

    decode: Choice  # without a `prefill`: for all of the request
    prefill: Choice | None = None


@record
class Held:
    """The result of a decision that found no worker, so that the request must wait.

    `leg` is the leg that has no worker, or "both" for the whole request.
    """

    leg: Role


@record
class Withheld:
    """The result of a dry run that found no worker, with the numbers that the policy read."""

    policy: str  # the policy that was asked
    details: Details  # the data that the policy saw
    limit: str = ""  # the limit that keeps the request from being sent, whatever the policy says
