"""What a decision turned out to have cost against its runner-up: measured when its end is known.

The runner-up is the cheapest worker besides the chosen one, by the same policy at the same moment.
"""

from __future__ import annotations

from router.core.actions import Candidate, Decision

SECONDS = "s"  # the unit of policies whose costs are the seconds until the first token


def runner_up(decision: Decision) -> Candidate | None:
    """The cheapest other worker; None where no other could take the request."""
    return decision.candidates[1] if len(decision.candidates) > 1 else None


def regret_s(decision: Decision, first_token_s: float | None) -> float | None:
    """Seconds from dispatch to the first token beyond the runner-up's cost.

    Above 0: by the decision's own estimate the runner-up would have been faster than the chosen
    one really was. None where the policy's unit is not seconds, or either is unknown.
    """
    other = runner_up(decision)
    if decision.unit != SECONDS or other is None or first_token_s is None:
        return None
    return first_token_s - other.cost


def regret_hit_tokens(decision: Decision, cached_tokens: int | None) -> int | None:
    """Tokens that the runner-up was expected to hold beyond those really cached; 0 or more.

    None where it is not known, or the prompt was read as text: the worker counts other tokens then.
    """
    other = runner_up(decision)
    if other is None or cached_tokens is None or decision.approximate:
        return None
    return max(other.hit_tokens - cached_tokens, 0)
