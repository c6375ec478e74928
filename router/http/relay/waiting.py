"""A request that the relay's thread has, as the event loop waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import kvkernels


class Waiting:
    """A request that the thread has. Lifetime: request."""

    __slots__ = ("_on_first_byte", "_on_progress", "end", "told")

    def __init__(
        self,
        end: asyncio.Future[kvkernels.RelayEnd],
        on_first_byte: Callable[[float], None] | None,
        on_progress: Callable[[float, int], None] | None,
    ) -> None:
        self.end = end
        self.told: kvkernels.RelayEnd | None = None  # of the thread, whoever waits for it or not
        self._on_first_byte = on_first_byte
        self._on_progress = on_progress

    def tell(self, at_s: float, status: int, events: int) -> None:
        """Pass a mark on. A fault of those who asked for it is the request's."""
        try:
            if 200 <= status < 300 and self._on_first_byte is not None:
                self._on_first_byte(at_s)
            if events and self._on_progress is not None:
                self._on_progress(at_s, events)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, and told at once
            loop = self.end.get_loop()
            loop.call_exception_handler({"message": "a reply's observer", "exception": error})
            if not self.end.done():
                self.end.set_exception(error)
