"""The command `warmroute doctor --routing`, which finds out why cache hits behind a router are zero
or low.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from typing import TYPE_CHECKING

from router.cli.admin import AdminError, key_of
from router.doctor.report import NOTHING, UNREADABLE, DoctorError

if TYPE_CHECKING:  # its HTTP client is loaded where it is needed
    from router.doctor.routing.findings import RoutingReport

ROUTING_ABOUT = """\
With --routing the doctor says why cache hits are zero, from a running router and its engines:

  warmroute doctor --routing http://127.0.0.1:8081
  warmroute doctor --routing http://127.0.0.1:8081 --requests bodies.jsonl
  warmroute doctor --routing http://r1:8081 --routing http://r2:8081

  warmroute doctor --routing http://engine:8000

URL is the router's admin port, or an engine without a router. The doctor only reads. Each cause has
one sentence, its evidence, and the flag to change. If you name several routers, the doctor examines
the first router; the other routers may use the same engines. With --tokenizer DIR, the router's
folder, the doctor compares the tokens of a few fixed prompts with the engines' tokens, and so
distinguishes a wrong tokenizer from a wrong chat template. docs/operations.md and
`warmroute doctor --routing URL --causes` list the causes.
"""
_NOT_WITH_ROUTING = ("servers", "router", "log", "probe", "measure")


def routing_command(args: argparse.Namespace) -> int:
    """Run `warmroute doctor --routing`, and return its exit status."""
    if args.causes:
        from router.doctor.routing.catalogue import ALL_ROUTING_CAUSES

        for cause in ALL_ROUTING_CAUSES:
            print(f"{cause.name:<20}{cause.about}")
        return NOTHING
    try:
        report = asyncio.run(_examined(args))
    except (DoctorError, AdminError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREADABLE
    except KeyboardInterrupt:
        print("error: stopped before the end", file=sys.stderr)
        return UNREADABLE
    print(json.dumps(report.shown(), indent=2) if args.json else report.text())
    return report.status


async def _examined(args: argparse.Namespace) -> RoutingReport:
    """Return the report on the cache hits behind a router. Raises DoctorError or AdminError if a
    server cannot be examined.
    """
    from router.doctor.routing.examine import RoutingOptions, examine_routing

    for flag in _NOT_WITH_ROUTING:
        if getattr(args, flag):
            name = "URL" if flag == "servers" else f"--{flag.replace('_', '-')}"
            raise DoctorError(f"{name} is nothing for --routing, which knows the engines itself")
    words = [word for url in args.routing for word in ("--routing", url)]
    words += ["--requests", str(args.requests)] if args.requests else []
    words += ["--admin-key-file", args.admin_key_file] if args.admin_key_file else []
    words += ["--tokenizer", str(args.tokenizer)] if args.tokenizer else []
    options = RoutingOptions(
        seconds=args.seconds,
        timeout_s=args.timeout,
        key=key_of(args.admin_key_file),
        requests=args.requests,
        tokenizer=args.tokenizer,
        again=shlex.join(["warmroute", "doctor", *words]),
    )
    return await examine_routing(args.routing, options)
