"""The gain of scheduling a step while another one computes, with a random model on the CPU.

    python -m tests.bench.overlap [--runs 7] [--batch 16] [--hidden 64 512] [--stages 1]

A closed loop of `batch` requests, each with 32 prompt tokens and 64 output tokens, runs through the
runner's loop, alternately without overlap and with it. The bench prints median tokens a second, and
the median of the ratios of neighbouring runs. With `--stages` there is a pipeline of so many
processes, with one step in flight and with as many as there are stages. Nothing is pinned, because
the bench measures threads and processes that run at the same time: a machine with fewer idle cores
gives no useful figure.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from engine.block_pool import BlockPool
from engine.capacity import Limits
from engine.model.tiny import TinySettings, make_tiny
from engine.runner.load import Loaded, load
from engine.runner.needs import LoadSettings, StepSettings
from engine.scheduler.request import Request
from engine.scheduler.types import Output, SchedulerSettings, Step

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
ROUNDS = 3


async def tokens_per_s(model: Loaded, batch: int, rounds: int) -> float:
    """Return the tokens a second of one run: `rounds` requests one after another in each of `batch`
    places.
    """
    done = asyncio.Event()
    serial = said = 0

    def submit() -> None:
        nonlocal serial
        prompt = (np.arange(PROMPT_TOKENS, dtype=np.int32) * 7 + serial * 13) % 250
        runner.submit(Request(serial, prompt, OUTPUT_TOKENS))
        serial += 1

    def on_step(step: Step, outputs: list[Output], now_s: float) -> None:
        nonlocal said
        runner.scheduler.pool.drain_events()
        said += len(outputs)
        for output in outputs:
            if output.finished and serial < batch * rounds:
                submit()
        if not runner.scheduler.requests:
            done.set()

    def on_failed(requests: Sequence[Request], why: str) -> None:
        raise AssertionError(why)

    runner = model.runner(
        BlockPool(model.capacity.blocks, model.capacity.block_size), on_step, on_failed
    )
    start_s = time.perf_counter()
    for _ in range(batch):
        submit()
    async with asyncio.TaskGroup() as loops:
        running = loops.create_task(runner.run())
        await done.wait()
        running.cancel()
    return said / (time.perf_counter() - start_s)


def compare(name: str, plain: Loaded, other: Loaded, batch: int, runs: int) -> None:
    """Print the tokens a second of both models and their ratio."""
    taken = [
        tuple(asyncio.run(tokens_per_s(model, batch, ROUNDS)) for model in (plain, other))
        for _ in range(runs)
    ]
    rates = [median(run[side] for run in taken) for side in (0, 1)]
    ratios = sorted(run[1] / run[0] for run in taken)
    print(
        f"{name}: {rates[0]:8.1f} tokens/s, {rates[1]:8.1f} with; ratio {median(ratios):.3f} "
        f"({ratios[0]:.3f}..{ratios[-1]:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    args = parser.parse_args()
    plain, overlapped = StepSettings(overlap=False), StepSettings(overlap=True)
    for hidden in args.hidden:
        settings = TinySettings(
            hidden_size=hidden, intermediate_size=3 * hidden, layers=args.layers
        )
        with tempfile.TemporaryDirectory() as folder:
            make_tiny(Path(folder), settings)
            limits = Limits(max_tokens_in_paged_kv_cache=16_384, expected_input_tokens=8)
            made = LoadSettings(
                Path(folder), limits, threads=args.threads, pp_size=args.stages, steps=plain
            )
            model = load(made, SchedulerSettings())
            name = f"hidden {hidden:4d}, batch {args.batch}, stages {args.stages}"
            compare(name, model, replace(model, steps=overlapped), args.batch, args.runs)
            model.model.close()


if __name__ == "__main__":
    main()
