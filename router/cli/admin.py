"""A client of the admin port that the commands of `warmroute` use, and the command `warmroute
workers`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

ROLES = ("both", "prefill", "decode")  # as in `router.engines.worker_spec`, not imported for them
_MAX_KEY_CHARS = 4_096
_SHOWN_BYTES = 2_000  # of an answer that is an error
_MOST_BYTES = 64 << 20
_TIMEOUT_S = 10.0
_ADVICE = "is the router there? --admin URL names its admin port"


class AdminError(Exception):
    """Raised if the admin port does not answer, or refuses a request; the text says what, where,
    and what to do.
    """


class AdminClient:
    """An HTTP client of the admin port. Lifetime: command."""

    def __init__(self, url: str, key: str | None, advice: str = _ADVICE) -> None:
        """Make a client of the admin port at `url`. `advice` is shown to the user if nobody answers
        at the URL. Raises AdminError for an invalid URL.
        """
        self.url = url.rstrip("/")
        self._advice = advice
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if not self.url.startswith(("http://", "https://")):
            raise AdminError(f"{url!r} is no URL; give one such as http://127.0.0.1:8081")

    def text(self, path: str) -> str:
        """Return the answer to a GET of `path` as text. Raises AdminError if the request fails."""
        return self._request("GET", path, None).decode(errors="replace")

    def data(self, path: str, most_bytes: int) -> bytes:
        """Return the answer to a GET of `path` as bytes. Raises AdminError if the request fails or
        the answer has more than `most_bytes`.
        """
        return self._request("GET", path, None, most_bytes)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request with a JSON body, and return the JSON answer. Raises AdminError if the
        request fails.
        """
        data = self._request(method, path, None if body is None else json.dumps(body).encode())
        try:
            return json.loads(data)
        except ValueError as error:
            raise AdminError(
                f"{method} {self.url}{path}: no JSON came back; is this the admin port?"
            ) from error

    def _request(
        self, method: str, path: str, body: bytes | None, most_bytes: int = _MOST_BYTES
    ) -> bytes:
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        where = f"{method} {self.url}{path}"
        try:
            request = Request(self.url + path, body, headers, method=method)
            with urlopen(request, timeout=_TIMEOUT_S) as reply:
                data: bytes = reply.read(most_bytes + 1)
        except HTTPError as error:
            raise AdminError(f"{where}: {error.code}: {_why(error)}") from error
        except (URLError, OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise AdminError(f"{where}: {why}; {self._advice}") from error
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
    if error.code == 404 and "is not served at the client port" in message:
        return f"{message.partition('; served:')[0]}; give the admin port's address by --admin URL"
    return message + more


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the admin port's address and key."""
    parser.add_argument(
        "--admin", metavar="URL", default="http://127.0.0.1:8081",
        help="URL of the router's admin port (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--admin-key-file", metavar="FILE", help="file whose first line is a key of the admin port"
    )


def admin_of(args: argparse.Namespace) -> AdminClient:
    """Return the admin client for the flags of `add_admin_flags`. Raises AdminError if a flag is
    invalid.
    """
    return AdminClient(args.admin, key_of(args.admin_key_file))


def key_of(path: str | None) -> str | None:
    """Return the key in the file of `--admin-key-file`, or None if no file is given. Raises
    AdminError if the file cannot be used.
    """
    if path is None:
        return None
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline(_MAX_KEY_CHARS).strip()
    except OSError as error:
        raise AdminError(f"--admin-key-file {error.filename}: {error.strerror}") from error


ABOUT = """\
List or change the workers of a running router by the router's admin port.

  warmroute workers
  warmroute workers add http://127.0.0.1:8003,max_requests=64
  warmroute workers drain 2
  warmroute workers undrain http://127.0.0.1:8003
  warmroute workers remove 2 --force
  warmroute workers role 2 decode

WORKER is a worker's number, or a URL, which stands for all ranks of an engine. Exit status:
0 done, 1 not done.
"""
_NAMED_BY = "named by"
_ACTIONS = ("list", "add", "drain", "undrain", "remove", "role")


def add_workers_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute workers`."""
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list")
    parser.add_argument("worker", nargs="?", metavar="WORKER", help="number or URL of a worker")
    parser.add_argument("role", nargs="?", choices=ROLES, help="role that the worker gets")
    parser.add_argument(
        "--force", action="store_true",
        help="remove the worker at once, together with its running requests",
    )  # fmt: skip
    add_admin_flags(parser)


def workers_command(args: argparse.Namespace) -> int:
    """Run `warmroute workers`, and return its exit status."""
    try:
        if args.action != "list" and args.worker is None:
            raise AdminError(f"`workers {args.action}` needs a worker: its number or its URL")
        if (args.action == "role") != (args.role is not None):
            raise AdminError("`workers role WORKER ROLE` changes a role; ROLE: " + ", ".join(ROLES))
        print(_table(_done(admin_of(args), args)))
    except AdminError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _done(admin: AdminClient, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Carry out the command, and return the rows of the workers that the command named or changed.
    Raises AdminError if the router refuses.
    """
    action, worker = args.action, args.worker
    if action == "list":
        answer = admin.request("GET", "/workers")
    elif action == "add":
        answer = admin.request("POST", "/workers", worker)
    else:
        one = "" if "://" in worker else f"/{quote(worker, safe='')}"
        query = [] if one else [f"url={quote(worker, safe='')}"]
        if action == "remove":
            query += ["force=true"] if args.force else []
            method, path = "DELETE", f"/workers{one}"
        else:
            method, path = "POST", f"/workers{one}/{action}"
        body = None if args.role is None else {"role": args.role}
        answer = admin.request(method, path + ("?" + "&".join(query) if query else ""), body)
    rows: list[dict[str, Any]] = answer.get("workers", [answer])
    return rows


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with one line for each worker. The source comes before the URL, because the
    URL may be long.
    """
    rows = list(rows)
    several = len({row["revision"] for row in rows if row.get("revision")}) > 1
    width = max([len(_NAMED_BY), *(len(row.get("named_by", "")) for row in rows)])
    lines = [f"worker  state     requests  {_NAMED_BY:<{width}}  url"]
    for row in rows:
        state = "leaving" if row.get("leaving") else row.get("state", "")
        url = row.get("url", "")
        if row.get("rank") is not None:
            url += f"#{row['rank']}"
        why = f"  ({row['trouble']})" if row.get("trouble") else ""
        if row.get("role", "both") != "both":
            why = f"  role {row['role']}{why}"
        if several and row.get("revision"):
            why = f"  revision {row['revision']}{why}"
        if row.get("role_to_be"):
            why += f"  (to be {row['role_to_be']})"
        if row.get("events_from") not in (None, "read here"):
            why += f"  (events {row['events_from']})"
        requests = row.get("inflight_requests", "")
        by = row.get("named_by", "")
        lines.append(
            f"{row['id']:>6}  {state:<8}  {requests:>8}  {by:<{width}}  {url}{why}".rstrip()
        )
    return "\n".join(lines)
