"""Parses the text or mapping that describes a worker in the configuration: `URL,key=value,...`, or
a mapping of the same keys.
"""

from __future__ import annotations

import re
from typing import Any

from policies.near import did_you_mean
from router.engines.spec import KEYS, WorkerSpec, WorkerSpecError, one_of
from router.engines.table import ADAPTERS

# Requests have this path, or one below it: clients' base URLs end in it, workers' URLs do not.
_API_PATH = re.compile(r"/v1(/(chat/completions|completions|models))?/*$")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s/:@?#\[\]]+):\d+(/|$)")
MAX_SPEC_CHARACTERS = 4_096
_INTEGERS = ("block_size", "rank", "bootstrap_port")
_FLAGS = ("insecure",)
_NUMBERS = ("kv_tokens", "max_requests", "max_queued_tokens", "max_kv_fraction", "weight")


def parse_worker_spec(text: str) -> WorkerSpec:
    """Return the worker in a text that consists of a URL and any number of `,key=value`. Raises
    WorkerSpecError for an invalid text.
    """
    if len(text) > MAX_SPEC_CHARACTERS:
        raise WorkerSpecError(f"longer than {MAX_SPEC_CHARACTERS} characters")
    url, *options = (part.strip() for part in text.split(","))
    values: dict[str, Any] = {"url": url}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise WorkerSpecError(f"{option!r} is not key=value; keys: {', '.join(KEYS[1:])}")
        if key in values:
            raise WorkerSpecError(f"{key} is given twice")
        values[key] = value
    return _spec_of(values)


def worker_spec_of(value: object) -> WorkerSpec:
    """Return the worker in a text, or in a mapping (from YAML or JSON) with `url` and the same
    keys.
    """
    if isinstance(value, str):
        return parse_worker_spec(value)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        kind = type(value).__name__
        raise WorkerSpecError(f"a worker is text or a mapping of {', '.join(KEYS)}; got {kind}")
    if "url" not in value:
        raise WorkerSpecError("url is missing")
    return _spec_of({key: item for key, item in value.items() if item is not None})


def _spec_of(values: dict[str, Any]) -> WorkerSpec:
    for key, value in values.items():
        if key not in KEYS:
            hint = did_you_mean(key, KEYS)
            raise WorkerSpecError(f"unknown key {key!r}{hint}; keys: {', '.join(KEYS)}")
        values[key] = _coerce(key, value)
    spec = WorkerSpec(**values)
    one_of("kind", spec.kind, (None, *ADAPTERS))
    return spec


def worker_url(text: str) -> str:
    """Return a worker's URL from a form that people paste, such as `HOST:PORT` or a URL with
    `/v1...` at the end. A text without scheme and port is returned unchanged, and `WorkerSpec`
    rejects it.
    """
    url = _API_PATH.sub("", text.strip()).rstrip("/")
    return f"http://{url}" if _HOST_AND_PORT.match(url) else url


def url_note(given: object, url: str) -> str:
    """Return a note on the URL that the router uses, or "" if this is the URL that was given."""
    written = given.get("url") if isinstance(given, dict) else str(given).partition(",")[0]
    text = str(written).strip()
    return "" if text.rstrip("/") == url else f"the worker {text} is read as {url}"


def _coerce(key: str, value: object) -> str | int | float:
    if key in _FLAGS:
        if str(value).lower() not in ("true", "false"):
            raise WorkerSpecError(f"{key} is {str(value)[:40]!r}; allowed: true, false")
        return str(value).lower() == "true"
    if key not in _INTEGERS and key not in _NUMBERS:
        if not isinstance(value, str):
            raise WorkerSpecError(f"{key} must be text, got {type(value).__name__}")
        return worker_url(value) if key == "url" else value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise WorkerSpecError(f"{key} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise WorkerSpecError(f"{key} must be a number, got {str(value)[:40]!r}") from error
    if key not in _INTEGERS:
        return number
    if not number.is_integer():
        raise WorkerSpecError(f"{key} must be a whole number, got {number:g}")
    return int(number)
