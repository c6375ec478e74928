"""Sends traces to a collector (OTLP over HTTP), and defines the settings for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from router.record.log_files import QueuedLog

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from router.record.request_record import RequestRecord
    from router.record.spans import SpanMaker

log = logging.getLogger(__name__)

NO_OTEL = (
    "OpenTelemetry is not installed: pip install 'opentelemetry-sdk>=1.45,<2' "
    "'opentelemetry-exporter-otlp-proto-http>=1.45,<2' (or '.[otel]' in the checkout)"
)
_WAITING = 2_048  # traces
_WAITING_BYTES = 64 << 20
_TRACE_BYTES = 8_192  # memory of a trace besides its chains, roughly
_POST_S = 3.0  # with the library's retries
_MEANINGS = (  # what a part of the library's words means
    ("Connection refused", "the connection is refused: does a collector listen there?"),
    ("Name or service not known", "its host's name has no address"),
    ("timed out", "no answer in time"),
)
# It says that it gave up, or had no time left for another try (urllib3's words), and not why.
_NO_REASONS = ("max retries", "less than or equal to 0")
_LIBRARY = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # its logger


class Exporter(QueuedLog["RequestRecord"]):
    """Sends the spans of traced requests to a collector. `written` counts the traces that the
    collector accepted. Lifetime: process.
    """

    def __init__(self, url: str, posting: OTLPSpanExporter, maker: SpanMaker) -> None:
        super().__init__("tracing", _Posting(url, posting, maker), _WAITING, _WAITING_BYTES)
        self._posting = posting

    def put(self, record: RequestRecord) -> None:
        """Queue the record of a traced request that has ended. It never waits."""
        chains = () if record.arrival is None else record.arrival.chains.values()
        self.queue(record, _TRACE_BYTES + sum(chain.nbytes for chain in chains))

    def close(self) -> None:
        """Send the queued traces. This takes up to five seconds, after which the remaining ones are
        lost.
        """
        super().close()
        self._posting.shutdown()  # type: ignore[no-untyped-call]


class _Posting:
    """Makes spans of traces and sends them, in the thread of the queue. Lifetime: process."""

    def __init__(self, url: str, posting: OTLPSpanExporter, maker: SpanMaker) -> None:
        self.written = 0
        self.lost = 0
        self._url = url
        self._posting = posting
        self._maker = maker
        self._trouble = 0  # traces lost since the collector last took some
        self._library_log = _ExportLog()

    def write(self, items: Sequence[RequestRecord]) -> None:
        """Make spans of the records and send them to the collector."""
        spans = [span for record in items for span in self._maker.spans(record)]
        if self._posting.export(spans).name == "SUCCESS":
            self.written += len(items)
            if self._trouble:
                message = "tracing: %s takes spans again, %d traces lost"
                log.warning(message, self._url, self._trouble)
            self._trouble = 0
            return
        self.lost += len(items)
        if not self._trouble:
            log.error("tracing: traces are lost: %s: %s", self._url, self._library_log.last)
        self._trouble += len(items)

    def reopen(self) -> None:
        """Do nothing, because traces are not written to a file."""

    def close(self) -> None:
        """Do nothing, because `Exporter.close` shuts the client down."""


class _ExportLog(logging.Handler):
    """Receives OpenTelemetry's log line about each failed request to the collector, so that the
    router can log the reason once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"
        library = logging.getLogger(_LIBRARY)
        library.propagate = False
        library.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason in a log line of OpenTelemetry; see `logging.Handler`."""
        said = record.getMessage()
        if not any(part in said for part in _NO_REASONS):
            told = (meaning for part, meaning in _MEANINGS if part in said)
            self.last = next(told, said[:300])


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings for sending requests' spans to a collector."""

    endpoint: Annotated[
        str | None,
        Meta(
            description=(
                "URL of an OTLP/HTTP collector, http://HOST:4318/v1/traces; none: no spans are sent"
            )
        ),
    ] = None
    sample: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description=(
                "share of requests that the router traces, unless the caller's traceparent decides"
            ),
        ),
    ] = 0.01
    service_name: Annotated[
        str,
        Meta(min_length=1, max_length=255, description="name of the service in the router's spans"),
    ] = "warmroute"


def check_endpoint(url: str) -> None:
    """Raise ValueError if a collector's address is malformed or a library for it is missing; the
    text says which of these it is.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is no http(s) URL; give one such as http://127.0.0.1:4318")
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ValueError(NO_OTEL)


def traces_url(endpoint: str) -> str:
    """Return the URL to which traces are sent: `endpoint`, with OTLP's own path if it has
    no path.
    """
    parts = urlsplit(endpoint)
    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return parts._replace(path=path).geturl()


def exporter(terms: Tracing) -> Exporter | None:
    """Return the exporter of traces, or None if tracing is off. It imports OpenTelemetry, which is
    an optional dependency.
    """
    if terms.endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from router.record.spans import SpanMaker

    url = traces_url(terms.endpoint)
    maker = SpanMaker(terms.service_name)
    return Exporter(url, OTLPSpanExporter(url, timeout=_POST_S), maker)
