"""From observations to a profile, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from engine.profile import Profile
from simulator.calibrate.fit import Fit, fit
from simulator.calibrate.observation import Observation

UNITS = {  # constant -> (factor, unit, what it is)
    "linear_s": (1e6, "µs per new token", "matrix work"),
    "pair_s": (1e12, "ps per query-key pair", "prefill attention"),
    "weights_s": (1e3, "ms per step", "one read of the weights"),
    "context_s": (1e9, "ns per KV token read", "decode attention"),
    "overhead_s": (1e3, "ms per step", "launch, scheduling, sampling"),
    "seq_s": (1e6, "µs per sequence", "batch book-keeping"),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile and how well it explains what was measured."""

    profile: Profile
    fit: Fit


def calibrate(
    observations: Sequence[Observation], name: str, kv_tokens: int, origin: str
) -> Calibration:
    """A profile called `name` for an engine of `kv_tokens`; `origin` says what was measured.

    Raises `ObservationError` when there is too little to fit.
    """
    found = fit(observations)
    total = found.errors[-1]
    provenance = (
        f"calibrated on {total.observations} measurements of {origin}; relative error: median "
        f"{total.median:.1%}, p90 {total.p90:.1%}, worst {total.worst:.1%}"
    )
    return Calibration(Profile(name, found.step_time, kv_tokens, 0, provenance), found)


def constants_table(calibration: Calibration) -> Table:
    """The constants, for people."""
    table = Table("constant", "value", "unit", "what", title=calibration.profile.name)
    for name, (factor, unit, what) in UNITS.items():
        value = f"{getattr(calibration.profile.step_time, name) * factor:.4g}"
        if name in calibration.fit.undetermined:
            value, what = "0", f"{what}: these measurements do not show it"
        table.add_row(name, value, unit, what)
    if calibration.fit.round_trip_s:
        value = f"{calibration.fit.round_trip_s * 1e3:.4g}"
        table.add_row("round trip", value, "ms per request", "HTTP, not part of the profile")
    return table


def errors_table(calibration: Calibration) -> Table:
    """How far the model is from the measurements, by kind of step."""
    table = Table("steps", "measured", "median error", "p90", "worst", title="model - measured")
    for row in calibration.fit.errors:
        shares = (f"{value:.1%}" for value in (row.median, row.p90, row.worst))
        table.add_row(row.kind, f"{row.observations:,}", *shares)
    return table
