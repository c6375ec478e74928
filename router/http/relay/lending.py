"""What sinks lend the relay's thread: a client's socket, and how a stream's events are read.

Where nothing is lent a word says why Python relays: `off` (by the configuration, or not built),
`worker_tls`, `client_tls`, `http_1_0`, `unsent` (bytes wait for the client), `client_gone`,
`judged` (a path that not every engine has: its answer may have to be asked for elsewhere), `moved`
(a stream goes on at another worker), `ids` (its client sees token ids), `files` (none is left),
`worker_gone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import kvkernels
from router.http.client_reply import ClientReply
from router.http.relay.reply import ReplySink


class LendingSink(ABC):
    """A `ReplySink` of a stream that may go on at another worker, from where the thread left it."""

    @abstractmethod
    def lend(self) -> tuple[ClientReply, kvkernels.RelayJournalTerms] | str:
        """The client's reply and how to read events; a word where Python has to.

        `taken_back` follows where the thread took them, unless the request is given up.
        """

    @abstractmethod
    def taken_back(self, end: kvkernels.RelayEnd) -> None:
        """The client's reply stands as `end` says, and is written to here from now on."""


def lent_by(
    sink: ReplySink,
) -> tuple[ClientReply | str, LendingSink | None, kvkernels.RelayJournalTerms | None]:
    """The reply that the thread may write to, or why there is none; of a stream the others."""
    if isinstance(sink, ClientReply):
        return sink, None, None
    if not isinstance(sink, LendingSink):
        return "judged", None, None
    lent = sink.lend()
    return (lent, None, None) if isinstance(lent, str) else (lent[0], sink, lent[1])
