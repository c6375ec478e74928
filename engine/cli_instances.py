"""Flags of `serve --instances N`, and what it says of a model before it loads it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import msgspec

from engine.capacity import Limits
from engine.instances.places import Place, places
from engine.instances.shares import Measured
from engine.instances.supervisor import supervise
from engine.model.quantization import Quantization


def add_shared(add: Callable[..., object]) -> None:
    """Declare them with `add`, the `add_argument` of a group."""
    add("--instances", type=int, default=1, metavar="N", help="on ports from those given on (1)")
    add("--measure", action="store_true", help="say in JSON what the model takes, and end")
    add("--lifeline", type=int, help=argparse.SUPPRESS)  # a descriptor; what is started ends by it


def check_shared(flags: argparse.Namespace) -> None:
    """Raises ValueError for flags that cannot go together."""
    if flags.instances > 1 and flags.tensor_parallel_size * flags.pipeline_parallel_size > 1:
        raise ValueError(
            "--instances shares one device and --tensor-parallel-size or --pipeline-parallel-size "
            "takes several: give one of them"
        )
    if flags.instances > 1:
        _places(flags)
        if ",url=" in (flags.announce or ""):
            raise ValueError(
                "--instances announces each at its own port; leave out url of --announce"
            )


def serve_several(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a supervisor and its instances; its exit code."""
    each = [*arguments, "--instances", "1"]
    if flags.device == "cpu" and flags.threads is None:
        # One thread a core in each of them would have them wait for each other.
        each += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // flags.instances))]
    return supervise(each, _places(flags), flags.memory_bytes, flags.grace_s)


def measure(flags: argparse.Namespace, limits: Limits) -> int:
    """Print what one instance needs and what memory there is. Raises what loading raises."""
    # With torch, so not before it is known to be there.
    from engine.model.config import read_config
    from engine.runner.load import StepSettings
    from engine.runner.needs import needs_of

    needs = needs_of(
        read_config(flags.model),
        flags.model,
        limits,
        flags.device,
        flags.dtype,
        Quantization(flags.quantize, flags.kv_dtype),
        flags.tensor_parallel_size,
        flags.pipeline_parallel_size,
        flags.attention_backend,
        flags.int8_backend,
        StepSettings(flags.overlap, flags.cuda_graphs).has_graphs,
    )
    measured = Measured(needs.memory_bytes, needs.footprint, needs.limits, flags.device)
    print(msgspec.json.encode(measured).decode())
    return 0


def _places(flags: argparse.Namespace) -> list[Place]:
    return places(flags.instances, flags.port, flags.events_port, flags.replay_port)
