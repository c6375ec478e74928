"""Keys of the section `tracing`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Spans of requests, told to a collector."""

    endpoint: Annotated[
        str | None, Meta(description="OTLP/HTTP collector, http://HOST:4318/v1/traces; none: off")
    ] = None
    sample: Annotated[
        float, Meta(ge=0.0, le=1.0, description="share traced where the caller does not decide")
    ] = 0.01
    service_name: Annotated[
        str, Meta(min_length=1, max_length=255, description="what spans are said to be of")
    ] = "warmroute"


def check_endpoint(url: str) -> None:
    """Raises ValueError that says what is wrong with a collector's address, or missing for it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is no http(s) URL; give one such as http://127.0.0.1:4318")
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ValueError("OpenTelemetry is not installed: pip install 'warmroute[otel]'")


def traces_url(endpoint: str) -> str:
    """Where traces are posted: `endpoint`, with OTLP's own path where it has none."""
    parts = urlsplit(endpoint)
    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return parts._replace(path=path).geturl()
