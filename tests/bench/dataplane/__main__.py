"""CPU time and added latency of the data plane, other routers and plain proxies, in one run.

    python -m tests.bench.dataplane [--only ROW ...] [--peers PYTHON] [--runs 3] [--json]

Compiled dummy engines and the load generator share one core; the router has the other. CPU times
are those of the router's whole process tree, from the kernel. Rounds are interleaved over routers
and medians are shown; compare figures only within a run. `routers.py` says how to install the other
routers.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys

from tests.bench.dataplane import light, memory, replicas, requests, split, streams
from tests.bench.dataplane.measured import Bench, run, table
from tests.bench.dataplane.programs import Cores
from tests.bench.dataplane.routers import subjects

ROWS = (
    *requests.ROWS,
    *streams.ROWS,
    *light.ROWS,
    *memory.ROWS,
    *replicas.ROWS,
    *split.ROWS,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--only", action="append", choices=names, help="rows, repeated")
    parser.add_argument("--subject", action="append", help="routers by name, repeated")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--runs", type=int, default=3, help="rounds a median is taken over")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured of each load")
    parser.add_argument(
        "--quiet",
        type=float,
        default=math.inf,
        metavar="CORES",
        help="measure again, up to five times, while others keep more cores busy than this",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    options = parser.parse_args()
    # When this program is told to end, it also ends the programs that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = [
        s for s in subjects(options.peers) if options.subject is None or s.name in options.subject
    ]
    bench = Bench(Cores.of_this_machine(), options.runs, options.seconds, chosen, options.quiet)
    results = [run(row, bench) for row in ROWS if options.only is None or row.name in options.only]
    if options.json:
        print(json.dumps({r.row.name: r.values for r in results}, indent=2))
    else:
        print(table(results, chosen))


if __name__ == "__main__":
    main()
