"""Costs of the kernels' plans as measured on a device: a file, written once and read at starts.

Without one plans go by predictions. A file is good for the device and the library that it was
measured with, and refused for others.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import torch

from engine.model.errors import ModelError
from kvkernels.ops.calibration import Calibration
from kvkernels.ops.operator import cuda_library
from kvkernels.ops.shared_costs import Costs

MAX_BYTES = 1 << 16
LARGEST = 1e15  # nanoseconds of a unit, above which nothing would be


class Timed(msgspec.Struct, frozen=True):
    """One step of the grid, in microseconds of one layer."""

    requests: int
    groups: int
    prefix_tokens: int
    own_tokens: int
    plain_us: float
    shared_us: float


class CostsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says, as JSON."""

    device: str
    library: str
    costs: dict[str, float]
    is_wary: bool  # runs have to gain more than was fitted, for what was measured slower
    measured: list[Timed]


def place_of(device: str) -> tuple[str, str]:
    """The device's name, and its kernels'."""
    if device == "cpu":
        return "cpu", "operators"
    return torch.cuda.get_device_name(device), cuda_library().path.name


def write_costs(path: Path, made: Calibration, device: str) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    rows = [Timed(*one.mix, one.plain_ns / 1e3, one.shared_ns / 1e3) for one in made.measured]
    said = CostsFile(*place_of(device), made.costs._asdict(), made.is_wary, rows)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_costs(path: Path, device: str) -> Costs:
    """The costs in the file. Raises ModelError for one that is none, or another device's, OSError
    where it cannot be read."""
    again = "measure again: warmroute-engine calibrate-kernels"
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ModelError(path, f"has more than {MAX_BYTES} bytes", again)
    try:
        said = msgspec.json.decode(data, type=CostsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(path, f"is no file of kernel costs: {error}", again) from error
    if set(said.costs) != set(Costs._fields):
        raise ModelError(path, f"has costs {', '.join(said.costs)[:200]}", again)
    for name, value in said.costs.items():
        if not (math.isfinite(value) and 0 <= value <= LARGEST):
            raise ModelError(path, f"says {value} for {name}", again)
    if (said.device, said.library) != (here := place_of(device)):
        found = f"{said.device:.80} with {said.library:.80}"
        raise ModelError(path, f"was measured on {found}, this is {' with '.join(here)}", again)
    return Costs(**said.costs)
