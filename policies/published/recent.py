"""Counts recent requests by the beginning of their prompts, to find popular prefixes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.contract import Hashes
from policies.facts import Dispatched


@dataclass(slots=True)
class HeadWindow:
    """Counts how often each prompt beginning occurs in the latest `size` requests.

    A head is the hash of a prompt's beginning. Each request has several heads, of different
    lengths.
    """

    size: int  # requests, at most
    requests: deque[Sequence[int]] = field(default_factory=deque)
    counts: dict[int, int] = field(default_factory=dict)  # head -> requests that have it

    def add(self, heads: Sequence[int]) -> None:
        """Add one request's heads; if the window is full, first remove the oldest request."""
        counts = self.counts
        if len(self.requests) == self.size:
            for head in self.requests.popleft():
                counts[head] -= 1
                if not counts[head]:
                    del counts[head]
        for head in heads:
            counts[head] = counts.get(head, 0) + 1
        self.requests.append(heads)

    def coolest(self, heads: Sequence[int], hot_share: float) -> int:
        """Return the first of `heads` whose share of recent requests is at most `hot_share`.

        If all heads are more frequent, return the last one.
        """
        hot = hot_share * len(self.requests)
        return next((head for head in heads if self.counts.get(head, 0) <= hot), heads[-1])


NO_CLASS = -1  # of a prompt that is shorter than a block; chain hashes are not negative


def class_of(chain: Hashes, blocks: int) -> int:
    """Return the class of a prompt: the chain hash of its first `blocks` blocks.

    A shorter prompt's class is the chain hash of all its blocks.
    """
    return int(chain[min(blocks, len(chain)) - 1]) if len(chain) else NO_CLASS


def hit_blocks(fact: Dispatched) -> int:
    """Return the number of the prompt's blocks that the worker held.

    The fact does not have the block size B. But the hit tokens are k * B and the prompt's n blocks
    are floor(prompt / B), so hit * n / prompt <= k < hit * (n + 1) / prompt: the two bounds are
    less than one apart, which leaves one k.
    """
    prompt_tokens = fact.hit_tokens + fact.uncached_tokens
    return -(-fact.hit_tokens * len(fact.chain) // prompt_tokens)


class HotClasses:
    """Counts the last `window` dispatches by the class of their prompts.

    Prompts with the same first blocks have the same class. `wins` counts, for each class, the
    latest dispatches in a row to workers that had these blocks cached. Lifetime: the policy's.
    """

    def __init__(self, window: int, class_blocks: int) -> None:
        self._window = window
        self._class_blocks = class_blocks
        self.recent: deque[int] = deque()  # the class of each dispatch in the window
        self.counts: dict[int, int] = {}  # class -> its dispatches in the window
        self.wins: dict[int, int] = {}  # class -> dispatches to holders since the last to another

    def dispatched(self, fact: Dispatched) -> None:
        """Count one dispatch."""
        key = class_of(fact.chain, self._class_blocks)
        self.recent.append(key)
        self.counts[key] = self.counts.get(key, 0) + 1
        if len(self.recent) > self._window:
            self._forget(self.recent.popleft())
        needed = min(self._class_blocks, len(fact.chain))
        if key != NO_CLASS and hit_blocks(fact) >= needed:
            self.wins[key] = self.wins.get(key, 0) + 1
        else:
            self.wins.pop(key, None)

    def _forget(self, key: int) -> None:
        self.counts[key] -= 1
        if not self.counts[key]:
            del self.counts[key]
            self.wins.pop(key, None)
