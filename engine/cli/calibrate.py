"""`warmroute-engine calibrate-kernels DIR`: measures what kernel plans cost on this device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cli.options import computing

DESCRIPTION = """\
Time attention that shares prefixes, and attention that does not, for the heads of the model in a
folder, and write what plans cost on this device: for `warmroute-engine serve DIR --kernel-costs
FILE`. Takes seconds on a GPU; the device should be idle. Without it plans go by predictions.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the program; its exit code: 0 written, 1 it could not be, 2 bad flags."""
    parser = argparse.ArgumentParser("warmroute-engine calibrate-kernels", description=DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--device", default="cuda", metavar="D", help="cuda, cuda:N or cpu (cuda)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    flags = parser.parse_args(arguments)
    with computing():
        _calibrate(flags.model, flags.device, flags.tensor_parallel_size, flags.out)
    return 0


def _calibrate(folder: Path, device: str, tp_size: int, out: Path) -> None:
    """Raises what reading the model, the device and writing raise."""
    import torch

    from engine.model.config import PLAIN, Shard, read_config
    from engine.model.kernel_choice import KVKERNELS, choose_attention
    from engine.runner.kernel_costs import DecodeTimer, write_costs
    from kvkernels.ops.calibration import PAGE, calibrate
    from kvkernels.ops.shared_costs import AttentionShape

    config, shard = read_config(folder), Shard(0, tp_size)
    config.check_shard(shard)
    dtype = "float32" if device == "cpu" else config.dtype
    choose_attention(KVKERNELS, config, shard, device, dtype, PLAIN, PAGE)  # says what is missing
    heads, kv_heads = shard.part(config.heads), shard.kv_heads(config.kv_heads)
    counts = heads.stop - heads.start, kv_heads.stop - kv_heads.start
    wide: torch.dtype = getattr(torch, dtype)
    shape = AttentionShape(*counts, config.head_dim, wide.itemsize)
    made = calibrate(shape, DecodeTimer(shape, wide, device), tell=_print_progress)
    write_costs(out, made, device)
    for one in made.measured:
        mix, gain = one.mix, one.plain_ns / one.shared_ns
        print(
            f"{mix.requests:>4} requests, {mix.groups:>2} prefixes of {mix.prefix_tokens:>5}, own "
            f"{mix.own_tokens:>5}: {one.plain_ns / 1e3:10.1f} us, shared {gain:.2f} times as fast"
        )
    print(f"costs: {made.costs._asdict()}; written to {out}")


def _print_progress(done: int, all_: int) -> None:
    print(f"timing {done} of {all_}", file=sys.stderr, flush=True)
