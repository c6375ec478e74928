"""`warmroute-engine serve DIR`: a worker that computes with the model in a folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.capacity import MAX_INSTANCES, Capacity, CapacityError, Limits, Measured, readable
from engine.cli.options import (
    BriefParser,
    CommandFailed,
    add_common,
    announce_of,
    computing,
    print_ready,
    run_worker,
    scheduler_settings,
    start_logging,
    worker_settings,
)
from engine.instances import Addresses, addresses_of, end_with, supervise
from engine.model.backends import BACKENDS, TORCH
from engine.model.config import KV_DTYPES, WEIGHTS, Quantization
from engine.scheduler.types import SchedulerSettings
from engine.server import WorkerSettings
from engine.server.announcer import Announce
from engine.server.settings import ServedModel

if TYPE_CHECKING:
    from engine.runner.load import Loaded
    from engine.runner.needs import LoadSettings, Needs


FAILED_WHILE_RUNNING = 3
MAX_RANKS = 64
WITHIN = (
    ("threads", 1024),
    ("tensor_parallel_size", MAX_RANKS),
    ("pipeline_parallel_size", MAX_RANKS),
    ("instances", MAX_INSTANCES),
    ("memory_bytes", 1 << 50),
    ("max_model_len", 2**31 - 1),
)
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

DESCRIPTION = """\
Serve the model in a Hugging Face folder (Llama 3, Qwen2, Qwen3) over OpenAI's HTTP API.

The engine first prints how many KV blocks, tokens and requests fit into memory, and what limits
them. If no request fits, the engine does not start. Then the engine reads the weights and prints
one line: ready URL model=...
"""
EPILOG = """\
exit codes: 0: stopped by a signal; 1: could not start; 2: wrong flags; 3: several steps in a row
failed, or the process lost the GPU: start a new process (--instances does so)
"""


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    start_logging(flags)
    try:
        limits, scheduler = _limits(flags), scheduler_settings(flags)
        settings, announce = _settings(flags, scheduler), announce_of(flags)
        _check_instances(flags)
        for name, most in WITHIN:
            if (size := getattr(flags, name)) is not None and not 1 <= size <= most:
                raise ValueError(f"--{name.replace('_', '-')} must be 1..{most}, got {size}")
    except ValueError as error:
        parser.error(str(error))
    if flags.instances > 1:
        return _serve_several(flags, arguments)
    if flags.lifeline is not None:
        end_with(flags.lifeline)
    with computing():
        if flags.measure:
            return _measure(flags, limits)
        loaded = _load(flags, limits, scheduler)
    settings = replace(settings, kv_tokens=loaded.capacity.tokens, scheduler=loaded.scheduler)
    loaded = replace(loaded, report=_print_progress)
    return _serve(settings, loaded, announce)


def _check_instances(flags: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other."""
    if flags.instances > 1 and flags.tensor_parallel_size * flags.pipeline_parallel_size > 1:
        raise ValueError(
            "--instances shares one device and --tensor-parallel-size or --pipeline-parallel-size "
            "takes several: give one of them"
        )
    if flags.instances > 1:
        _addresses(flags)
        if ",url=" in (flags.announce or ""):
            raise ValueError(
                "--instances announces each at its own port; leave out url of --announce"
            )


def _serve_several(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a supervisor and its instances; return the exit code."""
    each = [*arguments, "--instances", "1"]
    if flags.device == "cpu" and flags.threads is None:
        # One thread a core in each of them would have them wait for each other.
        each += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // flags.instances))]
    try:
        return supervise(each, _addresses(flags), flags.memory_bytes, flags.grace_s)
    except CapacityError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"cannot start an instance: {error}") from error


def _measure(flags: argparse.Namespace, limits: Limits) -> int:
    """Print the memory that one instance needs, and the memory that the device has. Raises the
    errors of loading the model.
    """
    # With torch, so not before it is known to be there.
    from engine.model.config import read_config
    from engine.runner.needs import needs_of

    needs = needs_of(read_config(flags.model), _load_settings(flags, limits))
    measured = Measured(needs.memory_bytes, needs.footprint, needs.limits, flags.device)
    print(msgspec.json.encode(measured).decode())
    return 0


def _addresses(flags: argparse.Namespace) -> list[Addresses]:
    return addresses_of(flags.instances, flags.port, flags.events_port, flags.replay_port)


def _load_settings(flags: argparse.Namespace, limits: Limits) -> LoadSettings:
    """Return the settings for loading the model that the flags give. Raises ImportError if torch is
    not installed.
    """
    from engine.runner.needs import LoadSettings, StepSettings

    return LoadSettings(
        flags.model,
        limits,
        flags.device,
        flags.dtype,
        Quantization(flags.quantize, flags.kv_dtype),
        flags.tensor_parallel_size,
        flags.pipeline_parallel_size,
        flags.attention_backend,
        flags.int8_backend,
        StepSettings(flags.overlap, flags.cuda_graphs, flags.kernel_costs),
        flags.threads,
        flags.memory_bytes,
        flags.kv_transport == "shm",
    )


def _load(flags: argparse.Namespace, limits: Limits, scheduler: SchedulerSettings) -> Loaded:
    """Load the model. Raises the errors of `load`, and ImportError if torch is not installed."""
    from engine.runner.load import load

    # One of several instances: the supervisor has printed the capacity.
    if flags.lifeline is not None:
        return load(_load_settings(flags, limits), scheduler)
    return load(_load_settings(flags, limits), scheduler, _print_capacity)


def _serve(settings: WorkerSettings, loaded: Loaded, announce: Announce | None) -> int:
    """Serve until a signal; return the exit code."""
    from engine.runner.runner import EngineFailed

    try:
        run_worker(settings, loaded.tokenizer, print_ready, served(loaded), announce)
    except ExceptionGroup as failures:
        failed = failures.subgroup(EngineFailed)
        if failed is None:
            raise
        raise CommandFailed(str(failed.exceptions[0]), FAILED_WHILE_RUNNING) from failures
    finally:
        loaded.model.close()
    return 0


def _print_capacity(capacity: Capacity, needs: Needs) -> None:
    """Print what fits on standard error, which is for people; standard output is for programs."""
    print(f"{capacity.report()}\nattention: {needs.attention}", file=sys.stderr)
    if needs.host_bytes:
        tokens = capacity.host_blocks * capacity.block_size
        print(
            f"evicted KV: {tokens:,} tokens in host memory, {readable(needs.host_bytes)}",
            file=sys.stderr,
        )
    if needs.int8:
        print(f"INT8 weights: {needs.int8}", file=sys.stderr)
    if capacity.warning:
        print(f"warning: {capacity.warning}", file=sys.stderr)


def _print_progress(line: str) -> None:
    """Print a line of progress for people."""
    print(line, file=sys.stderr, flush=True)


def served(loaded: Loaded) -> ServedModel:
    """Return the model that a worker serves: its tokenizer, end tokens and defaults."""
    sampling = loaded.config.sampling

    def backends() -> dict[str, tuple[str, str]]:
        choices = {"attention": loaded.attention, "int8": loaded.int8}
        told = {part: (one.backend, one.why) for part, one in choices.items() if one}
        return told | {part: (TORCH, why) for part, why in loaded.model.fell_back.items()}

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(sampling, name) for name in names}
    return ServedModel(
        make_runner=loaded.runner,
        computes=True,
        end_of_text=frozenset(loaded.config.eos_ids),
        defaults={name: value for name, value in given.items() if value is not None},
        backends=backends,
        store=loaded.kv,
    )


def _limits(flags: argparse.Namespace) -> Limits:
    default = Limits()
    return Limits(
        block_size=flags.block_size,
        max_num_tokens=flags.max_num_tokens,
        max_batch_size=flags.max_batch_size,
        max_model_tokens=flags.max_model_len or default.max_model_tokens,
        must_fit=flags.max_model_len is not None,
        kv_cache_free_gpu_mem_fraction=flags.kv_cache_free_gpu_mem_fraction,
        max_tokens_in_paged_kv_cache=flags.max_tokens_in_paged_kv_cache,
        expected_input_tokens=flags.expected_input_tokens,
        expected_output_tokens=flags.expected_output_tokens,
        host_kv_tokens=flags.host_kv_tokens,
    )


def _settings(flags: argparse.Namespace, scheduler: SchedulerSettings) -> WorkerSettings:
    """Return the worker settings, except the number of KV tokens that fit, which only the loaded
    model knows.
    """
    return worker_settings(
        flags,
        scheduler,
        profile_name=None,
        kv_tokens=flags.block_size,
        host_kv_tokens=flags.host_kv_tokens,
        model_name=flags.model_name or flags.model.resolve().name,
    )


def _parser() -> argparse.ArgumentParser:
    parser = BriefParser(
        prog="warmroute-engine serve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", type=Path, metavar="DIR", help="folder with config.json, weights and tokenizer"
    )
    _add_model(parser)
    _add_instances(parser)
    _add_cache(parser)
    add_common(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and of how it computes."""
    add = parser.add_argument_group("the model").add_argument
    add("--device", default="cpu", metavar="D", help="device: cpu, cuda or cuda:N (default: cpu)")
    add(
        "--dtype", choices=DTYPES, default="auto",
        help="data type of the computing; auto: float32 on a CPU, else as stored",
    )  # fmt: skip
    add(
        "--quantize", choices=WEIGHTS, default="none",
        help="how weights are quantized; int8-all: also the embedding",
    )  # fmt: skip
    add(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="number of devices that share each layer (default: 1)",
    )  # fmt: skip
    add(
        "--pipeline-parallel-size", type=int, default=1, metavar="N",
        help="number of pipeline stages (default: 1)",
    )  # fmt: skip
    add(
        "--threads", type=int, metavar="N",
        help="threads for matrix products on a CPU (default: torch chooses)",
    )  # fmt: skip
    add(
        "--overlap", action=argparse.BooleanOptionalAction,
        help="schedule the next step while a step computes (default: on a GPU)",
    )  # fmt: skip
    add(
        "--cuda-graphs", action=argparse.BooleanOptionalAction,
        help="replay decode steps of fixed sizes as CUDA graphs (default: on a GPU)",
    )  # fmt: skip
    add(
        "--attention-backend", choices=BACKENDS, default="auto",
        help="attention kernels; auto: kvkernels on a GPU if they support the model, else torch",
    )  # fmt: skip
    add(
        "--kernel-costs", type=Path, metavar="FILE",
        help="kernel costs that calibrate-kernels has written",
    )  # fmt: skip
    add(
        "--int8-backend", choices=BACKENDS, default="auto",
        help="kernels for INT8 weights; auto: as with --attention-backend",
    )  # fmt: skip
    add(
        "--model-name", metavar="M",
        help="name of the model in requests (default: the folder's name)",
    )  # fmt: skip
    add(
        "--max-model-len", type=int, metavar="T",
        help="maximum number of tokens of a prompt and its output (default: the model's limit)",
    )  # fmt: skip


def _add_instances(parser: argparse.ArgumentParser) -> None:
    """Add the flags of several workers on one device."""
    add = parser.add_argument_group("several workers on one device").add_argument
    add(
        "--instances", type=int, default=1, metavar="N",
        help="number of workers, on consecutive ports from --port on (default: 1)",
    )  # fmt: skip
    add(
        "--measure", action="store_true",
        help="print in JSON how much memory the model takes, and end",
    )  # fmt: skip
    # A descriptor; the process ends when it is closed.
    add("--lifeline", type=int, help=argparse.SUPPRESS)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the KV cache."""
    limits = Limits()
    add = parser.add_argument_group("the KV cache").add_argument
    add(
        "--block-size", type=int, default=limits.block_size, metavar="B",
        help="number of tokens of a KV block (default: 16)",
    )  # fmt: skip
    add(
        "--kv-dtype", choices=KV_DTYPES, default="auto",
        help="data type of the KV cache; auto: the type that the model computes in",
    )  # fmt: skip
    add(
        "--kv-cache-free-gpu-mem-fraction", type=float, metavar="X",
        default=limits.kv_cache_free_gpu_mem_fraction, help="share of the memory beside the "
            "weights that the KV cache gets (default: 0.8)",
    )  # fmt: skip
    add(
        "--max-tokens-in-paged-kv-cache", type=int, metavar="T",
        help="maximum number of tokens of the KV cache (default: 65536 on a CPU, else no limit)",
    )  # fmt: skip
    add(
        "--host-kv-tokens", type=int, default=0, metavar="T",
        help="maximum number of evicted KV tokens that stay in host memory (default: 0)",
    )  # fmt: skip
    add(
        "--memory-bytes", type=int, metavar="B",
        help="device memory that the worker may use (default: all available memory)",
    )  # fmt: skip
    add(
        "--expected-input-tokens", type=int, default=1024, metavar="T",
        help="mean prompt length, for the reported number of requests (default: 1024)",
    )  # fmt: skip
    add(
        "--expected-output-tokens", type=int, default=256, metavar="T",
        help="mean output length, for the reported number of requests (default: 256)",
    )  # fmt: skip
