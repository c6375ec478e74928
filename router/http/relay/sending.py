"""A request's bytes on their way to a worker, no more of them at once than it takes."""

from __future__ import annotations

from router.http.relay.connection import Connection


class Sending:
    """Lifetime: request."""

    def __init__(self, connection: Connection, step_bytes: int) -> None:
        """`step_bytes`: of the body, written before waiting for the worker."""
        self._connection = connection
        self._step_bytes = step_bytes
        self._unsent: list[memoryview] = []  # what goes next stands last

    @property
    def done(self) -> bool:
        """All was written."""
        return not self._unsent

    @property
    def can_go_on(self) -> bool:
        """Something is left, and the worker takes more now."""
        return bool(self._unsent) and self._connection.can_write

    def begin(self, head: bytes, body: bytes) -> None:
        """Write the head and as much of the body as needs no waiting; note the rest."""
        if self._connection.closing:
            return  # its end has been told or will be
        step = self._step_bytes
        if len(body) <= step:
            self._connection.transport.writelines((head, body) if body else (head,))
            return
        view = memoryview(body)
        self._unsent = [view[at : at + step] for at in range(0, len(body), step)]
        self._unsent.reverse()
        self._connection.transport.write(head)

    def go_on(self) -> None:
        """Write the next part."""
        self._connection.transport.write(self._unsent.pop())
