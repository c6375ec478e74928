"""The engine's overhead: host time in a step, tokens/s against a plain loop, and the gain of a hit.

    python -m tests.bench.engine [--runs 3] [--core 0] [--device cuda] [--dtype bfloat16]
        [--models tiny,small] [--batch 32]

`batch` requests of 128 prompt tokens and 64 output tokens are there at once. They run alternately
through the scheduler, cache and runner that serve HTTP (without HTTP), and through a plain loop on
torch's SDPA (`sdpa_loop.py`), on one thread. The bench prints medians over the runs: the part of a
decode step of the whole batch that is not the model's (choosing the batch and laying it out, taking
tokens in, publishing blocks), and the ratio of tokens a second (of CPU time, on a CPU). Both must
produce the same tokens except after ties.

Then it sends prompts of nearly the model's greatest length, one at a time, and prints the time to
the first token of a new prompt, and of one whose first 95 % are in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.capacity import Limits
from engine.model.checkpoint import Checkpoint
from engine.model.config import read_config
from engine.model.tiny import TinySettings, make_tiny
from engine.runner.load import Loaded, load
from engine.runner.needs import LoadSettings
from engine.runner.runner import RealRunner
from engine.scheduler.request import Request
from engine.scheduler.types import Output, SchedulerSettings, Step
from tests.bench.sdpa_loop import SdpaLoop

Clock = Callable[[], float]
PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 128, 64, 16
HIT = 0.95  # cached share of a long prompt
MODELS = {
    "tiny": TinySettings(),
    "small": TinySettings(
        layers=6, hidden_size=256, intermediate_size=768, heads=8, kv_heads=4, max_positions=512
    ),
    "8b": TinySettings(
        layers=32, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8,
        max_positions=8448, dtype="bfloat16",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The result of one run of the engine. Lifetime: bench."""

    seconds: float
    said: list[list[int]]
    host_s: float  # of a decode step of the whole batch, median
    step_s: float  # the same step, all of it


def on_failed(requests: Sequence[Request], why: str) -> None:
    raise RuntimeError(f"{len(requests)} requests failed: {why}")


async def until(told: asyncio.Event, running: asyncio.Task[None]) -> None:
    """Wait for the event `told`; raise the runner's error if the task `running` ends before."""
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait([running])


def run_engine(model: Loaded, prompts: np.ndarray, clock: Clock) -> Run:
    """Run all prompts through scheduler, cache, model and sampler."""
    said: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    steps: list[tuple[float, float]] = []
    done = asyncio.Event()
    left = len(prompts) * OUTPUT_TOKENS

    def on_step(step: Step, outputs: list[Output], now_s: float) -> None:
        nonlocal left
        for request, token, _ in outputs:
            said[request.request_id].append(token)
        left -= len(outputs)
        if step.decode_seqs == len(prompts):
            split = runner.split
            steps.append((split.schedule_s + split.complete_s, runner.step_s))
        pool.drain_events()
        if not left:
            done.set()

    pool = BlockPool(model.capacity.blocks, BLOCK_SIZE)
    runner: RealRunner = model.runner(pool, on_step, on_failed)

    async def serve() -> float:
        begun_s = clock()
        for number, prompt in enumerate(prompts):
            runner.submit(Request(number, prompt, OUTPUT_TOKENS))
        running = asyncio.create_task(runner.run())
        await until(done, running)
        seconds = clock() - begun_s
        await stop(running)
        return seconds

    seconds = asyncio.run(serve())
    host_s = median(host for host, _ in steps)
    return Run(seconds, list(said.values()), host_s, median(step for _, step in steps))


def first_tokens(model: Loaded, prompts: Sequence[np.ndarray], clock: Clock) -> list[float]:
    """Return the seconds to the first token of each prompt, one after another with one cache."""
    told = asyncio.Event()

    def on_step(step: Step, outputs: list[Output], now_s: float) -> None:
        pool.drain_events()
        if outputs:
            told.set()

    pool = BlockPool(model.capacity.blocks, BLOCK_SIZE)
    runner: RealRunner = model.runner(pool, on_step, on_failed)

    async def serve() -> list[float]:
        running, seconds = asyncio.create_task(runner.run()), []
        for number, prompt in enumerate(prompts):
            told.clear()
            begun_s = clock()
            runner.submit(Request(number, prompt, 1))
            await until(told, running)
            seconds.append(clock() - begun_s)
        await stop(running)
        return seconds

    return asyncio.run(serve())


def hit_and_miss(
    model: Loaded, tokens: int, runs: int, vocab: int, clock: Clock
) -> tuple[float, float]:
    """Return the median seconds to the first token of prompts of `tokens`, with a hit and
    without.
    """
    rng = np.random.default_rng(1)
    prompts = []
    for _ in range(runs + 1):  # the first pair warms up
        new, tail = rng.integers(0, vocab, (2, tokens), dtype=np.int32)
        known = int(HIT * tokens)
        prompts += [new, np.concatenate((new[:known], tail[known:]))]
    seconds = first_tokens(model, prompts, clock)
    return median(seconds[3::2]), median(seconds[2::2])


def run_loop(loop: SdpaLoop, prompts: np.ndarray, clock: Clock) -> tuple[float, list[list[int]]]:
    """Run the same prompts through the plain loop; return (seconds, tokens)."""
    begun_s = clock()
    said = loop.generate(torch.from_numpy(prompts.astype(np.int64)), OUTPUT_TOKENS)
    return clock() - begun_s, said.tolist()


def same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of prompts whose first tokens agree; after a tie later tokens may differ."""
    return float(np.mean([one[0] == other[0] for one, other in zip(ours, theirs, strict=True)]))


def measure(name: str, args: argparse.Namespace) -> None:
    # On a CPU, its own seconds in one thread, so that other programs do not count.
    clock = process_time if args.device == "cpu" else perf_counter
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_tiny(directory, MODELS[name])
        long = MODELS[name].max_positions - BLOCK_SIZE
        kv_tokens = max(2 * long, args.batch * (PROMPT_TOKENS + OUTPUT_TOKENS + 64))
        limits = Limits(
            block_size=BLOCK_SIZE,
            max_batch_size=args.batch,
            max_tokens_in_paged_kv_cache=kv_tokens,
            expected_input_tokens=PROMPT_TOKENS,
            expected_output_tokens=OUTPUT_TOKENS,
        )
        settings = SchedulerSettings(max_batch_size=args.batch)
        model = load(LoadSettings(directory, limits, args.device, args.dtype, threads=1), settings)
        config = read_config(directory)
        with Checkpoint(directory) as checkpoint:
            loop = SdpaLoop(config, checkpoint, args.device, getattr(torch, args.dtype))
        rng = np.random.default_rng(0)
        runs: list[tuple[Run, float]] = []
        for turn in range(args.runs + 1):  # the first one warms up
            shape = (args.batch, PROMPT_TOKENS)
            prompts = rng.integers(0, config.vocab, shape, dtype=np.int32)
            ours = run_engine(model, prompts, clock)
            seconds, said = run_loop(loop, prompts, clock)
            share = same(ours.said, said)
            assert share >= 0.9, f"only {share:.0%} of the first tokens agree"
            if turn:
                runs.append((ours, seconds))
        hit_s, miss_s = hit_and_miss(model, long, args.runs, config.vocab, clock)
    tokens = args.batch * OUTPUT_TOKENS
    host_ms = 1e3 * median(ours.host_s for ours, _ in runs)
    step_ms = 1e3 * median(ours.step_s for ours, _ in runs)
    host_share = median(ours.host_s / ours.step_s for ours, _ in runs)
    ratio = median(seconds / ours.seconds for ours, seconds in runs)
    print(
        f"{name:>5} on {args.device}, {args.dtype}, batch {args.batch}: host {host_ms:.2f} of "
        f"{step_ms:.2f} ms a decode step ({host_share:.1%}); "
        f"{median(tokens / ours.seconds for ours, _ in runs):,.0f} tokens/s, "
        f"the loop {median(tokens / seconds for _, seconds in runs):,.0f}: {ratio:.2f} of it; "
        f"{long} prompt tokens: {1e3 * miss_s:.1f} ms to the first token, {1e3 * hit_s:.1f} with "
        f"{HIT:.0%} of them in the cache"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--core", type=int, default=0, help="core to stay on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--models", default="tiny,small", help=", ".join(MODELS))
    args = parser.parse_args()
    if args.device == "cpu":
        os.sched_setaffinity(0, {args.core})
        torch.set_num_threads(1)
    for name in args.models.split(","):
        measure(name, args)


if __name__ == "__main__":
    main()
