"""Which requests are traced, and their traces on the way to a collector (OTLP over HTTP)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.config.schema import Tracing, traces_url
from router.record.log_files import Background

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from router.record.request_record import RequestRecord
    from router.tracing.spans import SpanMaker

log = logging.getLogger(__name__)

_WAITING = 2_048  # traces
_WAITING_BYTES = 64 << 20
_TRACE_BYTES = 8_192  # what a trace keeps alive besides its chains, roughly
_POST_S = 3.0  # with what the library tries again
_CLOSE_S = 4.0  # a collector that hangs must not keep the router from ending
_MEANINGS = (  # what a part of the library's words means
    ("Connection refused", "the connection is refused: does a collector listen there?"),
    ("Name or service not known", "its host's name has no address"),
    ("timed out", "no answer in time"),
)
_LIBRARY = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # its logger


class Exporter:
    """Lifetime: process."""

    def __init__(self, url: str, posting: OTLPSpanExporter, maker: SpanMaker) -> None:
        self._sink = _Posting(url, posting, maker)
        self._posting = posting
        self._background = Background("traces", self._sink, _WAITING, _WAITING_BYTES)
        self._no_room = 0

    @property
    def exported(self) -> int:
        """Traces that the collector took so far."""
        return self._sink.exported

    @property
    def lost(self) -> int:
        """Traces lost so far, for want of room in the queue or of a collector that takes them."""
        return self._no_room + self._sink.lost

    def put(self, record: RequestRecord) -> None:
        """A traced request is over. Never waits."""
        size_bytes = _TRACE_BYTES
        if record.arrival is not None:
            size_bytes += sum(chain.nbytes for chain in record.arrival.chains.values())
        if not self._background.put(record, size_bytes):
            self._no_room += 1

    def close(self) -> None:
        """Post what waits. Takes up to four seconds, after which the rest is lost."""
        left = self._background.close(_CLOSE_S)
        self._posting.shutdown()  # type: ignore[no-untyped-call]
        if left:
            self._no_room += left
            log.error("tracing: %d traces were not exported before the end", left)


class _Posting:
    """Makes spans of traces and posts them, in the thread of the queue. Lifetime: process."""

    def __init__(self, url: str, posting: OTLPSpanExporter, maker: SpanMaker) -> None:
        self.exported = 0
        self.lost = 0
        self._url = url
        self._posting = posting
        self._maker = maker
        self._trouble = 0  # traces lost since the collector last took some
        self._said = _Said()

    def write(self, items: Sequence[RequestRecord]) -> None:
        """See `Sink`."""
        spans = [span for record in items for span in self._maker.spans(record)]
        if self._posting.export(spans).name == "SUCCESS":
            self.exported += len(items)
            if self._trouble:
                message = "tracing: %s takes spans again, %d traces lost"
                log.warning(message, self._url, self._trouble)
            self._trouble = 0
            return
        self.lost += len(items)
        if not self._trouble:
            log.error("tracing: traces are lost: %s: %s", self._url, self._said.last)
        self._trouble += len(items)

    def reopen(self) -> None:
        """See `Sink`."""

    def close(self) -> None:
        """See `Sink`."""


class _Said(logging.Handler):
    """Keeps what the library would log of each post: one line of ours says it once."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"
        library = logging.getLogger(_LIBRARY)
        library.propagate = False
        library.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        said = record.getMessage()
        if "max retries" not in said:  # which says that it gave up, and not why
            told = (meaning for part, meaning in _MEANINGS if part in said)
            self.last = next(told, said[:300])


def exporter(terms: Tracing) -> Exporter | None:
    """As configured; None: tracing is off. Loads OpenTelemetry, which is an extra of its own."""
    if terms.endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from router.tracing.spans import SpanMaker

    url = traces_url(terms.endpoint)
    maker = SpanMaker(terms.service_name, time.time() - time.monotonic())
    return Exporter(url, OTLPSpanExporter(url, timeout=_POST_S), maker)
