"""`warmroute workers`: who is in the pool; add, drain, undrain, remove."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from router.admin_client import AdminClient, AdminError, add_admin_flags, admin_of

ABOUT = """\
Look at the workers of a running router, or change them, by its admin port.

  warmroute workers
  warmroute workers add http://127.0.0.1:8003,max_requests=64
  warmroute workers drain 2
  warmroute workers undrain http://127.0.0.1:8003
  warmroute workers remove 2 --force

WORKER is a number, or a URL: all ranks of that engine. Exit status: 0 done, 1 not.
"""
_NAMED_BY = "named by"
_ACTIONS = ("list", "add", "drain", "undrain", "remove")


def add_workers_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `warmroute workers`."""
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list")
    parser.add_argument("worker", nargs="?", metavar="WORKER", help="number or URL")
    parser.add_argument("--force", action="store_true", help="remove at once what runs there, too")
    add_admin_flags(parser)


def workers_command(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    try:
        if args.action != "list" and args.worker is None:
            raise AdminError(f"`workers {args.action}` needs a worker: its number or its URL")
        print(_table(_done(admin_of(args), args)))
    except AdminError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _done(admin: AdminClient, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that it is about. Raises AdminError."""
    action, worker = args.action, args.worker
    if action == "list":
        answer = admin.ask("GET", "/workers")
    elif action == "add":
        answer = admin.ask("POST", "/workers", worker)
    else:
        one = "" if "://" in worker else f"/{quote(worker, safe='')}"
        query = [] if one else [f"url={quote(worker, safe='')}"]
        if action == "remove":
            query += ["force=true"] if args.force else []
            method, path = "DELETE", f"/workers{one}"
        else:
            method, path = "POST", f"/workers{one}/{action}"
        answer = admin.ask(method, path + ("?" + "&".join(query) if query else ""))
    rows: list[dict[str, Any]] = answer.get("workers", [answer])
    return rows


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line a worker; who named it stands before its URL, which may be long."""
    rows = list(rows)
    width = max([len(_NAMED_BY), *(len(row.get("named_by", "")) for row in rows)])
    lines = [f"worker  state     requests  {_NAMED_BY:<{width}}  url"]
    for row in rows:
        state = "leaving" if row.get("leaving") else row.get("state", "")
        url = row.get("url", "")
        if row.get("rank") is not None:
            url += f"#{row['rank']}"
        why = f"  ({row['trouble']})" if row.get("trouble") else ""
        if row.get("events_from") not in (None, "read here"):
            why += f"  (events {row['events_from']})"
        requests = row.get("inflight_requests", "")
        by = row.get("named_by", "")
        lines.append(
            f"{row['id']:>6}  {state:<8}  {requests:>8}  {by:<{width}}  {url}{why}".rstrip()
        )
    return "\n".join(lines)
