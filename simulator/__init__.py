"""The simulator: replays on virtual time, load against live endpoints, reports, the demo.

Owns: trace files and generated workloads, the prompts made of them, the load generator, the rows of
outcomes and the figures computed from them, the programs that it starts for a measurement.
Gives: `warmroute-sim` (`simulator.cli`), `simulator.live.load.run_load`,
`simulator.live.outcome.summarize`.
Never imports: router.server, router.events, router.cli, engine.server, engine.cli, torch. It starts
programs as processes and sends them HTTP requests, as a user would.
Start reading at: `simulator/live/demo.py` (the story), then `replay/run.py` and `live/stack.py`.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).parent / "data"
