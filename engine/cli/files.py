"""The commands that write files: `make-tiny DIR` writes a small checkpoint to try the engine with,
without a download, and `calibrate-kernels DIR` measures what kernel plans cost on this device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cli.options import CommandFailed, computing

DESCRIPTION = """\
Time attention that shares prefixes, and attention that does not, for the heads of the model in a
folder, and write what plans cost on this device: for `warmroute-engine serve DIR --kernel-costs
FILE`. Then time steps of five shapes by each way to compute them whose numbers are right (ours,
FlashInfer's where it is installed, cuDNN's, torch's), and write the fastest. Takes seconds on a
GPU, minutes where FlashInfer is compiled first; the device should be idle. Without a file plans go
by predictions, and all steps by our kernels.
"""


def calibrate_kernels(arguments: Sequence[str]) -> int:
    """Run `calibrate-kernels`, and return its exit code: 0 if the file was written, 1 if not, 2 for
    bad flags.
    """
    parser = argparse.ArgumentParser("warmroute-engine calibrate-kernels", description=DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="DIR", help="folder with the model")
    parser.add_argument(
        "--device", default="cuda", metavar="D", help="device: cuda, cuda:N or cpu (default: cuda)"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="number of GPUs that share each layer of the model (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file that gets the measured kernel costs",
    )
    flags = parser.parse_args(arguments)
    with computing():
        _calibrate(flags.model, flags.device, flags.tensor_parallel_size, flags.out)
    return 0


def _calibrate(folder: Path, device: str, tp_size: int, out: Path) -> None:
    """Measure the kernels and write the costs to `out`. Raises the errors of reading the model, of
    using the device and of writing the file.
    """
    import torch

    from engine.model.backends import KVKERNELS
    from engine.model.config import PLAIN, Shard, read_config
    from engine.model.kernel_choice import choose_attention
    from engine.runner.kernel_costs import DecodeTimer, WayTimer, fastest, write_costs
    from kvkernels.ops.calibration import PAGE, calibrate
    from kvkernels.ops.shared_costs import AttentionShape

    config, shard = read_config(folder), Shard(0, tp_size)
    config.check_shard(shard)
    dtype = "float32" if device == "cpu" else config.dtype
    # If no backend can run the model, `choose_attention` raises an error that names the cause.
    choose_attention(KVKERNELS, config, shard, device, dtype, PLAIN, PAGE)
    heads, kv_heads = shard.part(config.heads), shard.kv_heads(config.kv_heads)
    counts = heads.stop - heads.start, kv_heads.stop - kv_heads.start
    wide: torch.dtype = getattr(torch, dtype)
    shape = AttentionShape(*counts, config.head_dim, wide.itemsize)
    made = calibrate(shape, DecodeTimer(shape, wide, device), on_progress=_print_progress)
    ways = WayTimer(config, shape, made.costs, wide, device).times()
    write_costs(out, made, device, ways)
    for one in made.measured:
        mix, gain = one.mix, one.plain_ns / one.shared_ns
        print(
            f"{mix.requests:>4} requests, {mix.groups:>2} prefixes of {mix.prefix_tokens:>5}, own "
            f"{mix.own_tokens:>5}: {one.plain_ns / 1e3:10.1f} us, shared {gain:.2f} times as fast"
        )
    taken = fastest(ways)
    for way in ways:
        told = f"not: {way.why_not}" if way.us is None else f"{way.us:10.1f} us"
        print(f"{way.shape:<13} {way.way:<13} {told}{' *' * (taken[way.shape] == way.way)}")
    print(f"costs: {made.costs._asdict()}; written to {out}")


def _print_progress(done: int, all_: int) -> None:
    print(f"timing {done} of {all_}", file=sys.stderr, flush=True)


def write_tiny(arguments: Sequence[str]) -> int:
    """Write the checkpoint, and return the exit code. Raises CommandFailed if it cannot
    be written.
    """
    from engine.model.tiny import ARCHS, DTYPES, TinySettings, make_tiny

    parser = argparse.ArgumentParser(
        prog="warmroute-engine make-tiny",
        description="Write a small random checkpoint (weights, tokenizer, chat template).",
    )
    own = TinySettings()
    add = parser.add_argument
    add(
        "directory", type=Path, metavar="DIR",
        help="folder that gets the checkpoint; the command makes a missing folder and keeps other "
            "files",
    )  # fmt: skip
    add("--arch", choices=ARCHS, default=own.arch, help=f"architecture (default: {own.arch})")
    add(
        "--seed", type=int, default=own.seed, metavar="N",
        help="seed of the random weights (default: 0)",
    )  # fmt: skip
    add("--layers", type=int, default=own.layers, metavar="L", help="number of layers (default: 2)")
    add(
        "--max-positions", type=int, default=own.max_positions, metavar="T",
        help="longest prompt and output, tokens (default: 2048)",
    )  # fmt: skip
    add(
        "--dtype", choices=DTYPES, default=own.dtype,
        help=f"data type of the weights (default: {own.dtype})",
    )  # fmt: skip
    flags = parser.parse_args(arguments)
    for name, value, least in (
        ("--seed", flags.seed, 0),
        ("--layers", flags.layers, 1),
        ("--max-positions", flags.max_positions, 1),
    ):
        if not least <= value <= 1 << 20:
            parser.error(f"{name} must be {least}..{1 << 20}, is {value}")
    directory: Path = flags.directory
    if (directory / "config.json").exists():
        raise CommandFailed(f"{directory} has a model already; name another folder")
    settings = TinySettings(
        arch=flags.arch,
        seed=flags.seed,
        layers=flags.layers,
        max_positions=flags.max_positions,
        dtype=flags.dtype,
    )
    try:
        make_tiny(directory, settings)
    except OSError as error:
        raise CommandFailed(f"cannot write {directory}: {error.strerror or error}") from error
    print(f"a {flags.arch} of {flags.layers} layers is in {directory}", file=sys.stderr)
    return 0
