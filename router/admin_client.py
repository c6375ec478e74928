"""Asking the admin port, for the commands that do."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

_MAX_KEY_CHARS = 4_096
_SHOWN_BYTES = 2_000  # of an answer that is an error
_MOST_BYTES = 64 << 20


class AdminError(Exception):
    """The admin port could not be asked, or refused: says what, where, and what to do."""


class AdminClient:
    """Lifetime: command."""

    def __init__(self, url: str, key: str | None, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if not self.url.startswith(("http://", "https://")):
            raise AdminError(f"--admin {url!r} is no URL; give one such as http://127.0.0.1:8081")

    def text(self, path: str) -> str:
        """An answer as it is. Raises AdminError."""
        return self._asked("GET", path, None).decode(errors="replace")

    def data(self, path: str, most_bytes: int) -> bytes:
        """An answer's bytes. Raises AdminError, for more than `most_bytes` too."""
        return self._asked("GET", path, None, most_bytes)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """JSON for JSON. Raises AdminError."""
        data = self._asked(method, path, None if body is None else json.dumps(body).encode())
        try:
            return json.loads(data)
        except ValueError as error:
            raise AdminError(
                f"{method} {self.url}{path}: no JSON came back; is this the admin port?"
            ) from error

    def _asked(
        self, method: str, path: str, body: bytes | None, most_bytes: int = _MOST_BYTES
    ) -> bytes:
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        where = f"{method} {self.url}{path}"
        try:
            request = Request(self.url + path, body, headers, method=method)
            with urlopen(request, timeout=self._timeout_s) as reply:
                data: bytes = reply.read(most_bytes + 1)
        except HTTPError as error:
            raise AdminError(f"{where}: {error.code}: {_why(error)}") from error
        except (URLError, OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise AdminError(
                f"{where}: {why}; is the router there? --admin URL names its admin port"
            ) from error
        if len(data) > most_bytes:
            raise AdminError(f"{where}: more than {most_bytes} bytes")
        return data


def _why(error: HTTPError) -> str:
    said = error.read(_SHOWN_BYTES)
    try:
        message = str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return said.decode(errors="replace").strip() or "it says no more"
    more = "; give --admin-key-file FILE" if error.code == 401 else ""
    if error.code == 404 and "is not served here" in message:
        more = "; is this the client port? --admin URL names the admin port"
    return message + more


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """Where the admin port is, and its key."""
    parser.add_argument(
        "--admin",
        metavar="URL",
        default="http://127.0.0.1:8081",
        help="the router's admin port (%(default)s)",
    )
    parser.add_argument(
        "--admin-key-file", metavar="FILE", help="its first line is a key of the admin port"
    )


def admin_of(args: argparse.Namespace) -> AdminClient:
    """The admin port of `add_admin_flags`. Raises AdminError."""
    key = None
    if args.admin_key_file is not None:
        try:
            with open(args.admin_key_file, encoding="ascii", errors="replace") as file:
                key = file.readline(_MAX_KEY_CHARS).strip()
        except OSError as error:
            raise AdminError(f"--admin-key-file {error.filename}: {error.strerror}") from error
    return AdminClient(args.admin, key)
