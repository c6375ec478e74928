"""TensorRT-LLM's conversation router: each conversation stays with its worker, whatever its load.

Source: NVIDIA/TensorRT-LLM, `serve` router of kind conversation, 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.homes import SessionHomes, check_max_sessions
from policies.published.order import places


@dataclass(frozen=True, slots=True)
class TrtLlmConversation:
    """Prefers the worker of the session, else of the prefix; else the worker with the fewest
    tokens.

    1. A request whose session was served before goes to the worker that served it last.
    2. A request without a session goes to the workers with the longest match, if that is at least
       `match_threshold` of the prompt, both counted beyond the first `skip_tokens` tokens. Set
       `skip_tokens` to the length of a system prompt that all share; else all requests would
       become one conversation.
    3. Otherwise, and among equals, the worker with the fewest tokens of unfinished requests wins
       (queued prefill and resident context of this router's own requests; the source estimates
       them from the text).

    The source matches the prompts that it has sent; here the index gives the prefixes that are
    still cached. If KV events are missing, the known hits are used.

    Spill depth: a session never leaves its worker. For a shared prompt: 0 if requests have
    sessions, or if it lies within `skip_tokens`; unlimited if they have none and it is
    `match_threshold` of the prompt.
    """

    match_threshold: float = 0.75
    skip_tokens: int = 0
    max_sessions: int = 100_000

    def __post_init__(self) -> None:
        if not 0.0 < self.match_threshold <= 1.0:
            raise ValueError(f"match_threshold is {self.match_threshold}; it must be in (0, 1]")
        if self.skip_tokens < 0:
            raise ValueError(f"skip_tokens is {self.skip_tokens}; it must be 0 or more")
        check_max_sessions(self.max_sessions)

    def initial_state(self) -> SessionHomes:
        return SessionHomes(self.max_sessions)

    def observe(self, fact: Fact, state: SessionHomes) -> SessionHomes:
        state.observe(fact)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: SessionHomes) -> Floats:
        tokens: Floats = fleet.queued_prefill_tokens + fleet.context_tokens
        if request.session is not None:
            first = state.rows(request, fleet)
        else:
            first = self._matching(request, fleet)
        return tokens if first is None else places(~first, tokens)

    def _matching(self, request: RequestView, fleet: FleetView) -> Bools | None:
        """Return True for the workers with the longest cached prefix, bool[rows].

        Return None if the prefix is shorter than `match_threshold` of the prompt. The first
        `skip_tokens` tokens of both do not count.
        """
        beyond = request.prompt_tokens - self.skip_tokens
        longest = int(fleet.hit_tokens.max(initial=0))
        matched = min(longest, request.prompt_tokens) - self.skip_tokens
        if beyond <= 0 or matched < self.match_threshold * beyond:
            return None
        rows: Bools = np.equal(fleet.hit_tokens, longest)
        return rows
