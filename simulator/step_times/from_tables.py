"""Fits a derived profile to an engine's kernel tables, if they know the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from engine.profiles import Profile
from simulator.step_times.catalogue import CPU, CPU_SOURCE
from simulator.step_times.compare import Comparison, compare
from simulator.step_times.derive import Deployment
from simulator.step_times.kernel_fit import fit_kernels
from simulator.step_times.tables import Experts, Instance, Tables

ENGINES = ("vllm", "sglang", "trtllm")
_TABLES = {  # of a GPU, as `aiconfigurator-core` names it
    "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm",
    "gb200": "gb200", "l40s": "l40s",
}  # fmt: skip


def from_tables(
    derived: Profile, config: Path, on: Deployment, gpu: str, engine: str, seed: int = 0
) -> tuple[Profile, Comparison]:
    """Return `derived` with step times that are fitted to the tables of `engine` on `gpu`, and the
    errors of the fit.

    `config` is the model's config.json or its folder, which also says the formats of weights and
    KV. Raises TableError if the tables do not have the architecture, and ModuleNotFoundError if
    they are not installed.
    """
    with TemporaryDirectory() as folder:
        copyfile(config / "config.json" if config.is_dir() else config, Path(folder, "config.json"))
        experts: Experts = "spread" if on.whole_experts else "split"
        instance = Instance(folder, _TABLES[gpu], engine, on.gpus, experts)
        tables = Tables(instance)
        rows, source = tuple(tables.rows()), tables.source()
    found = fit_kernels(rows, derived.step_time.expert_share, seed, CPU)
    made = replace(derived, step_time=found.step_time)
    errors = compare(made, source, rows)
    worst = max(kind.worst for kind in errors.kinds if kind.kind != "mixed")
    provenance = (
        f"kernels fitted to the tables of {source}, worst row {worst:.1%} off; KV capacity by the "
        f"model's config.json; {CPU_SOURCE}"
    )
    return replace(made, provenance=provenance), errors
