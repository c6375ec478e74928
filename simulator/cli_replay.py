"""The command lines of what runs on virtual time: `replay` and the options it shares."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simulator import arguments, replay_command
from simulator.replay.setup import Goodput, World
from simulator.setup_options import POLICIES, PROFILE, WORKERS

_WORLD, _GOODPUT = World(), Goodput()

EPILOG = """\
TRACE is a file (JSON lines or CSV; plain, gzip or zstd; the format is found by looking) or a
generator, as gen:sglang?groups=64 (docs/traces.md).

examples:
  warmroute-sim replay conversation.jsonl.gz
  warmroute-sim replay requests.jsonl --policy hybrid --policy kv_load --workers 12 --html r.html
  warmroute-sim replay toolagent.jsonl.gz --rate 12 --seed 0 --seed 1 --seed 2 --json r.json
  warmroute-sim replay sessions.jsonl.gz --closed-loop --kv-tokens 300k --faults faults.yaml
  warmroute-sim replay gen:llmd --group count=6,profile=qwen3-32b-h100-tp2 \\
      --group count=2,profile=qwen3-32b-h200-tp2
"""


def add_replay(parsers: Any) -> None:
    """`warmroute-sim replay`."""
    parser = parsers.add_parser(
        "replay",
        help="what each policy would have given for a trace, on virtual time",
        description="Replays the requests of TRACE through the real decision core, policies and "
        "scheduler, with modelled step times, and prints latency, hits and balance per policy.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser)
    parser.add_argument(
        "--policy", action="append", metavar="SPEC",
        help=f"NAME?key=value&..., repeat to compare; default: {', '.join(POLICIES)}",
    )  # fmt: skip
    add_pool(parser)
    add_workload(parser)
    add_seeds(parser)
    parser.add_argument(
        "--jobs", type=arguments.count, default=1, metavar="N",
        help="replays at once, in processes of their own; default %(default)s",
    )  # fmt: skip
    add_world(parser)
    report = parser.add_argument_group("report")
    for name, what in (
        ("json", "all figures, with hashes"),
        ("html", "one page with plots"),
        ("csv", "every request, its decision and what the best choice was; one policy, one seed"),
    ):
        report.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    parser.set_defaults(command=replay_command.run)


def add_source(parser: argparse.ArgumentParser) -> None:
    """The trace."""
    parser.add_argument("trace", metavar="TRACE", help="file, or gen:NAME?key=value&...")


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Seeds."""
    parser.add_argument(
        "--seed", type=arguments.whole, action="append", metavar="N",
        help="of every draw; repeat for a mean and an interval; default 0",
    )  # fmt: skip


def add_pool(parser: argparse.ArgumentParser) -> None:
    """Options that say which workers there are."""
    group = parser.add_argument_group("pool").add_argument
    group("--workers", type=arguments.count, metavar="N", help=f"how many; default {WORKERS}")
    group(
        "--profile", metavar="P",
        help=f"model and GPUs, or a calibrated .json file; default {PROFILE}",
    )  # fmt: skip
    group(
        "--kv-tokens", type=arguments.count, metavar="T",
        help="KV tokens a worker holds (300k is understood); default: the profile's",
    )  # fmt: skip
    group(
        "--prefix-wait-tokens", type=arguments.whole, metavar="N",
        help="least prefix for which a request waits while its worker computes it for another; "
        "0: never, as in vLLM and SGLang; default: as in our engine, 256",
    )  # fmt: skip
    group(
        "--group", action="append", metavar="key=value,...",
        help="workers that are alike, instead of the four above; repeat for a mixed pool: "
        "count, profile, kv_tokens, speed, max_num_tokens, max_batch_size, max_model_tokens, "
        "prefix_wait_tokens, max_requests, max_queued_tokens, max_kv_fraction",
    )  # fmt: skip
    group(
        "--plain", action="store_true", help="the plain Python scheduler, to check the native one"
    )
    group(
        "--block-size", type=arguments.count, metavar="B",
        help="tokens a KV block of the workers; default: the trace's",
    )  # fmt: skip


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Options that say which requests come, and when."""
    group = parser.add_argument_group("requests")
    group.add_argument("--format", default="auto", help="of TRACE; default: found by looking")
    group.add_argument(
        "--block-tokens", type=arguments.count, metavar="N",
        help="prompt tokens an id of TRACE stands for; default: as the format says",
    )  # fmt: skip
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=arguments.positive, metavar="X", help="X times as fast")
    pace.add_argument("--rate", type=arguments.positive, metavar="R", help="mean requests/s")
    group.add_argument("--requests", type=arguments.count, metavar="N", help="at most so many")
    group.add_argument(
        "--seconds", type=arguments.positive, metavar="S", help="of TRACE's start only"
    )
    group.add_argument(
        "--spread", type=arguments.positive, metavar="S",
        help="spread requests of one timestamp over S seconds (Mooncake: 3)",
    )  # fmt: skip
    group.add_argument(
        "--closed-loop", action="store_true",
        help="a session's next turn waits for the answer before it, and the pause between",
    )  # fmt: skip
    group.add_argument(
        "--strict", action="store_true",
        help="stop at the first wrong line; default: leave it out, count it, say so",
    )  # fmt: skip


def add_world(parser: argparse.ArgumentParser) -> None:
    """Options of the world around, and of what a good answer is."""
    group = parser.add_argument_group("the world around").add_argument
    for name, what in (
        ("network", "one way between router and worker"),
        ("event-lag", "from a step's end to its KV events' arrival"),
        ("report-every", "between load reports; 0: none"),
        ("report-lag", "how old a load report is when it arrives"),
    ):
        default = getattr(_WORLD, f"{name.replace('-', '_')}_ms")
        group(
            f"--{name}-ms", type=arguments.not_negative, default=default, metavar="MS",
            help=f"{what}; default %(default)s",
        )  # fmt: skip
    group(
        "--event-loss", type=arguments.share, default=_WORLD.event_loss, metavar="SHARE",
        help="of KV event batches that never arrive; default %(default)s",
    )  # fmt: skip
    group("--no-events", action="store_true", help="workers publish no KV events")
    group("--faults", metavar="FILE", help="timeline of faults (docs/simulator.md)")
    limits = parser.add_argument_group("a good answer").add_argument
    limits(
        "--good-ttft-ms", type=arguments.positive, default=_GOODPUT.ttft_ms, metavar="MS",
        help="first token within; default %(default)s",
    )  # fmt: skip
    limits(
        "--good-tpot-ms", type=arguments.positive, default=_GOODPUT.tpot_ms, metavar="MS",
        help="mean time per further token within; default %(default)s",
    )  # fmt: skip
