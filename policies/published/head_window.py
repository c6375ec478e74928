"""How often the heads of the latest prompts came: DualMap's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class HeadWindow:
    """Heads of the latest requests, each at several depths."""

    size: int  # requests, at most
    requests: deque[Sequence[int]] = field(default_factory=deque)
    counts: dict[int, int] = field(default_factory=dict)  # head -> requests that have it

    def add(self, heads: Sequence[int]) -> None:
        """One request's heads; the oldest request goes when the window is full."""
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
        """The first of `heads` whose share is not above `hot_share`, else the last."""
        hot = hot_share * len(self.requests)
        return next((head for head in heads if self.counts.get(head, 0) <= hot), heads[-1])
