"""`warmroute-engine make-tiny DIR`: a checkpoint to try the engine with, without a download."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cli.options import CommandFailed
from engine.model.tiny import ARCHS, DTYPES, TinySettings, make_tiny


def main(arguments: Sequence[str]) -> int:
    """Write it; the exit code. Raises CommandFailed where it could not be written."""
    parser = argparse.ArgumentParser(
        prog="warmroute-engine make-tiny",
        description="Write a small random checkpoint (weights, tokenizer, chat template).",
    )
    own = TinySettings()
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="made if need be; what is there is kept")
    add("--arch", choices=ARCHS, default=own.arch, help=f"({own.arch})")
    add("--seed", type=int, default=own.seed, metavar="N", help="of the weights (0)")
    add("--layers", type=int, default=own.layers, metavar="L", help="(2)")
    add("--max-positions", type=int, default=own.max_positions, metavar="T", help="tokens (2048)")
    add("--dtype", choices=DTYPES, default=own.dtype, help=f"({own.dtype})")
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
