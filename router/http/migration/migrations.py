"""Who gives each streamed request what it takes to go on at another worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from policies.facts import Arrival
from router.http.local_desk import LocalDesk
from router.http.migration.plan import plan_of
from router.http.migration.room import AnyRoom, room_of_streams
from router.http.migration.stream import Stream
from router.http.migration.told import Told
from router.http.scan import Tokens

log = logging.getLogger(__name__)

_MODELS = 1_024


@dataclass(frozen=True, slots=True)
class MigrationTerms:
    """Bounds of migration. Lifetime: process, replaced on reload."""

    moves: int = 0  # of one stream; 0: none goes on elsewhere
    stream_tokens: int = 1 << 17  # kept of a stream, prompt and answer
    tokens: int = 1 << 25  # kept of all


class Migrations:
    """Lifetime: process."""

    def __init__(self, desk: LocalDesk, told: Told, terms: Callable[[], MigrationTerms]) -> None:
        self.room: AnyRoom = room_of_streams()
        self._desk = desk
        self._told = told
        self._terms = terms
        self._distrusted: set[str] = set()  # models, until the end of the process
        told.watch(lambda: self.room.taken)

    @contextmanager
    def stream(
        self, body: bytes, path: str, arrival: Arrival, encoded: Sequence[Tokens] = ()
    ) -> Iterator[Stream | None]:
        """The stream of a request; None where it stays with the worker that begins it.

        `encoded`: the ids that were made here of its prompts.
        """
        terms = self._terms()
        if not terms.moves:
            yield None
            return
        if arrival.model in self._distrusted:
            self._told.stays("miscounted")
            yield None
            return
        plan = plan_of(body, path, arrival.max_output_tokens, encoded)
        if isinstance(plan, str):
            self._told.stays(plan)
            yield None
            return
        self.room.stream_tokens, self.room.tokens = terms.stream_tokens, terms.tokens
        stream = Stream(plan, arrival, self.room, terms.moves, self._told, self._desk)
        try:
            yield stream
        finally:
            if stream.miscounted:
                self._distrust(arrival.model)
            stream.close()

    def _distrust(self, model: str) -> None:
        """Rests that were built of such ids would be wrong without anybody's noticing."""
        if model not in self._distrusted and len(self._distrusted) < _MODELS:
            self._distrusted.add(model)
            log.warning("streams of model %r stay with their workers: ids are missing", model)
