"""Times from tables of measured kernels, for comparison with computed profiles.

table_rows.csv holds the times to which shares are fitted; unseen_rows.csv holds those of other
models.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from engine.step_time import StepTime
from simulator.step_times.derive import Deployment, kind_of, step_time
from simulator.step_times.gpus import Gpu
from simulator.step_times.model_shape import ModelShape
from simulator.step_times.storage import STORAGES, Stored
from tests.simulator.step_times.configs import shape_of

ROWS = Path(__file__).with_name("table_rows.csv")
UNSEEN = Path(__file__).with_name("unseen_rows.csv")


@dataclass(frozen=True, slots=True)
class Load:
    """One row of a table: a prefill of one request or a step of decodes, and its measured
    seconds.
    """

    prefill: bool
    left: int  # new tokens of a prefill, or requests of a decode step
    right: int  # cached tokens of a prefill, or tokens of context of each request
    seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one deployment, with its rows of measured times."""

    name: str
    model: str
    shape: ModelShape
    gpu: str
    gpus: int
    whole_experts: bool
    kv_fp8: bool
    loads: tuple[Load, ...]

    def step_time(self, gpu: Gpu) -> StepTime:
        """Return the step time that is derived for this model and deployment."""
        on = Deployment(gpu, self.gpus, self.whole_experts, self.kv_fp8)
        return step_time(self.shape, on)

    def errors(self, gpu: Gpu) -> list[float]:
        """Return the relative error of the derived time for each load."""
        derived = self.step_time(gpu)
        return [seconds_of(derived, load) / load.seconds - 1 for load in self.loads]


def seconds_of(step_time: StepTime, load: Load) -> float:
    """Return the seconds that `step_time` predicts for a load, without CPU time."""
    window_s = step_time.seq_s - StepTime(0, 0, 0, 0).seq_s
    kernels = step_time.kernels
    if load.prefill:
        return kernels.prefill_s(load.left, load.right) + window_s
    return kernels.decode_step_s(load.left, load.left * load.right) + window_s * load.left


def read_cases(path: Path = ROWS) -> list[Case]:
    """Return all cases of a file."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    with TemporaryDirectory() as folder:
        return [_case(Path(folder), row) for row in csv.DictReader(lines)]


def _case(folder: Path, row: dict[str, str]) -> Case:
    shape = shape_of(folder, row["model"])
    weights = STORAGES[row["weights"]]
    stored = Stored(weights, weights, STORAGES[row["expert_weights"]])
    loads = []
    for name, text in row.items():
        mark = "+" if "+" in name else "x"
        left, found, right = name.partition(mark)
        if text and found and left.isdigit():
            loads.append(Load(mark == "+", int(left), int(right), float(text) / 1e3))
    split = "ep" if row["whole_experts"] == "1" else "tp"
    name = f"{row['model']} {row['weights']} {row['gpu']} {split}{row['gpus']} {row['engine']}"
    return Case(
        name,
        row["model"],
        replace(shape, stored=stored),
        row["gpu"],
        int(row["gpus"]),
        row["whole_experts"] == "1",
        row["kv"] == "fp8",
        tuple(loads),
    )


Errors = dict[str, list[float]]  # absolute, in percent, by the model's kind


def errors_by_kind(cases: Iterable[Case], gpu: Gpu) -> Errors:
    """Return the absolute errors in percent of the cases of a GPU, by kind of model."""
    found: Errors = {}
    for case in cases:
        if case.gpu == gpu.name:
            errors = found.setdefault(kind_of(case.shape), [])
            errors += [100 * abs(error) for error in case.errors(gpu)]
    return found


def summary(errors: list[float]) -> tuple[float, float, float]:
    """Return the median, the 90th percentile and the largest of `errors`."""
    return median(errors), quantiles(errors, n=10)[-1], max(errors)
