"""The pace at which the router sends a model's waiting requests to its first workers."""

from __future__ import annotations

import math


class Pace:
    """Limits how many waiting requests are sent in each second, so that a new worker is not
    flooded.

    In the first second after the first worker joined, `per_s` requests may be sent for each ready
    worker, in the next second twice as many, then three times, and so on, spread evenly over each
    second. What is not used of a second is lost, so that no crowd of requests follows a pause of
    this program. Lifetime: from the first worker of a model until none of its requests waits.
    """

    def __init__(self, since_s: float) -> None:
        """Start the first second at `since_s`, when the model's first worker was seen."""
        self._since_s = since_s
        self._second = 0
        self._sent = 0  # in this second

    def room(self, per_s: int, workers: int, now_s: float) -> int:
        """Return how many more requests may be sent to workers at the time `now_s`."""
        second, part = divmod(max(now_s - self._since_s, 0.0), 1.0)
        if int(second) != self._second:
            self._second, self._sent = int(second), 0
        return max(math.ceil(self._most(per_s, workers) * part) - self._sent, 0)

    def count_request(self) -> None:
        """Count one request that is sent to a worker."""
        self._sent += 1

    def _most(self, per_s: int, workers: int) -> int:
        """Return how many requests in all may be sent in the present second."""
        return per_s * workers * (self._second + 1)
