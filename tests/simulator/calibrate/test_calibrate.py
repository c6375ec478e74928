"""Tests of calibration: step logs are read or refused, constants are recovered, and a live engine
is measured.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.console import Console

from engine.profiles import PROFILES, profile, read_profile, write_profile
from simulator.calibrate.fit import (
    COLUMNS,
    ComputedLoad,
    Observation,
    ObservationError,
    calibrate,
    constants_table,
    errors_table,
    fit,
    prefill_loads,
    read_step_log,
)
from simulator.calibrate.probe import Course, Endpoint, probe
from simulator.live.processes import Programs
from tests.simulator.measurements import REPRESENTATIVE, observed, stalled

HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    "name",
    [
        name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.full)
        for name in sorted(PROFILES)
    ],
)
def test_the_fit_explains_the_steps_of_every_profile(name: str) -> None:
    truth = profile(name).step_time
    found = fit(observed(truth, noise=0.0), like=truth)
    # The exponent of the soft maximum is one of six, and the true one lies between two of them.
    assert found.errors[-1].p90 < 0.02
    assert found.step_time.pair_s == pytest.approx(truth.pair_s, rel=0.05)
    assert found.step_time.context_s == pytest.approx(truth.context_s, rel=0.05)


def test_experts_are_not_fitted_well_without_a_similar_profile() -> None:
    truth = profile("qwen3-30b-a3b-h100-tp2").step_time
    rows = observed(truth, noise=0.0)
    assert fit(rows).errors[-1].worst > 2 * fit(rows, like=truth).errors[-1].worst


def test_noise_and_stalls_do_not_distort_the_fit() -> None:
    truth = profile("llama-3.1-8b-h100").step_time
    found = fit(stalled(truth))
    assert found.step_time.linear_s == pytest.approx(truth.linear_s, rel=0.05)
    assert found.errors[-1].median < 0.04
    assert found.errors[-1].worst > 0.5  # the errors show the stalls


@pytest.mark.parametrize("name", ["deepseek-r1-gb200-ep8", "deepseek-r1-gb200-ep16"])
def test_rows_in_another_order_give_the_same_step_times(name: str) -> None:
    """A fit to shuffled rows predicts the same step times. Shuffled sums round otherwise, as they
    do on another processor.
    """
    rows = observed(profile(name).step_time, noise=0.03, steps=300)
    expected = fit(rows).step_time
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows, len(rows))
        found = fit(shuffled).step_time
        for row in rows:
            assert found.seconds(row.loads[0]) == pytest.approx(
                expected.seconds(row.loads[0]), rel=1e-9
            )


def test_a_faster_clock_gives_constants_in_its_own_unit() -> None:
    rows = observed(profile("deepseek-r1-gb200-ep8").step_time, noise=0.03, steps=300)
    slow = fit([row._replace(seconds=1e4 * row.seconds) for row in rows]).step_time
    assert slow.linear_s == pytest.approx(1e4 * fit(rows).step_time.linear_s, rel=1e-9)


def test_constants_that_explain_the_data_equally_share_it() -> None:
    """If two constants explain the data equally, they share it: batches of one size cannot tell the
    overhead from the weights, so the fit gives each half of the constant time.
    """
    loads = [ComputedLoad(0, 0, 8, 8 * context) for context in range(100, 4000, 100)]
    found = fit([Observation((load,), 0.010 + 1e-7 * load.decode_ctx_tokens) for load in loads])
    step_time = found.step_time
    assert step_time.linear_s == 0.0
    assert step_time.weights_s == pytest.approx(0.005, rel=1e-6)
    assert step_time.overhead_s == pytest.approx(0.005, rel=1e-6)


def test_constants_without_measurements_are_reported_as_undetermined() -> None:
    truth = profile("llama-3.1-8b-h100").step_time
    rows = [row for row in observed(truth, 0.0) if not row.loads[0].prefill_tokens]
    found = fit(rows)
    assert found.undetermined == ("pair_s",)
    assert found.step_time.pair_s == 0.0


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ObservationError, match="5 measurements cannot fix 6 constants"):
        fit(observed(profile("llama-3.1-8b-h100").step_time, 0.0, steps=5))


def test_a_prompt_is_cut_into_chunks() -> None:
    assert prefill_loads(20, 8) == (
        ComputedLoad(8, 1, attention_pairs=32.0),
        ComputedLoad(8, 1, attention_pairs=96.0),
        ComputedLoad(4, 1, attention_pairs=72.0),
    )


def test_a_step_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"extra,{HEADER}\nx,10,1,2,300,50.5,0.25\n")
    assert read_step_log(path) == [Observation((ComputedLoad(10, 1, 2, 300, 50.5),), 0.25)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: no column prefill_tokens"),
        ("prefill_tokens,seconds\n1,2\n", "line 1: no column prefill_seqs"),
        (f"{HEADER}\n1,1,0,0,1,0\n", "line 2: seconds: 0 is not above 0"),
        (f"{HEADER}\n0,0,0,0,0,1\n", "line 2: a step of no tokens"),
        (f"{HEADER}\n1.5,1,0,0,1,1\n", "line 2: prefill_tokens: '1.5' is not a whole number"),
        (f"{HEADER}\n1,1,0,0,1,1\n1,1,0,0,nan,1\n", "line 3: attention_pairs: 'nan'"),
        (f"{HEADER}\n1,1\n", "line 2: decode_seqs: None"),
        (f"{HEADER}\n1,1,0,-4,1,1\n", "line 2: decode_ctx_tokens: '-4'"),
    ],
)
def test_the_error_for_a_wrong_step_log_names_the_line(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ObservationError, match=says):
        read_step_log(path)


def test_a_missing_or_binary_step_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="cannot be read"):
        read_step_log(tmp_path / "missing.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ObservationError, match="not a CSV file"):
        read_step_log(binary)


def test_a_calibrated_profile_can_be_kept_and_used(tmp_path: Path) -> None:
    rows = observed(profile("llama-3.1-8b-h100").step_time, 0.01)
    found = calibrate(rows, "mine", 100_000, "a test")
    path = tmp_path / "mine.json"
    write_profile(found.profile, path)
    assert profile(str(path)) == read_profile(path) == found.profile
    assert "calibrated on 1500 measurements of a test" in found.profile.provenance
    console = Console(width=120, record=True, quiet=True)
    console.print(constants_table(found), errors_table(found))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "truncated"),
        ('{"name": "x"}', "step_time"),
        ('{"name": "x", "step_time": {"linear_s": -1}}', "pair_s"),
    ],
)
def test_the_error_for_a_wrong_profile_file_names_the_field(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"profile .*mine.json: .*{says}"):
        profile(str(path))


@pytest.mark.alone
async def test_a_live_engine_is_measured(tmp_path: Path) -> None:
    """A few measurements of a live engine in real time give its prefill rate, and its step log
    agrees.
    """
    name = "llama-3.1-8b-h100"
    log = tmp_path / "steps.csv"
    course = Course((256, 1024, 2048, 4096), 2, ((1, 128), (4, 512), (8, 1024)), 80)
    async with Programs(tmp_path / "logs") as programs:
        arguments = ["--port", "0", "--timed", name, "--model-name", "m", "--step-log", str(log)]
        engine = await programs.start("worker", "engine", arguments)
        done: list[int] = []
        rows = await probe(
            Endpoint(engine.url, "m"), 1, lambda count, of: done.append(count), course
        )
        assert done == list(range(1, 12))
        with pytest.raises(ObservationError, match="HTTP 404"):
            await probe(Endpoint(engine.url, "other"), 1)
    truth = profile(name).step_time
    assert fit(rows).step_time.linear_s == pytest.approx(truth.linear_s, rel=0.5)
    assert fit(rows).errors[-1].median < 0.2
    logged = read_step_log(log)
    assert len(logged) > 100
    assert fit(logged).errors[-1].median < 0.2


async def test_the_error_for_an_unreachable_endpoint_names_it() -> None:
    with pytest.raises(ObservationError, match=r"127\.0\.0\.1:9"):
        await probe(Endpoint("http://127.0.0.1:9", "m"), 1)


def test_a_measurement_that_took_no_time_is_refused() -> None:
    observations = observed(profile("llama-3.1-8b-h100").step_time, noise=0.0, steps=50)
    with pytest.raises(ObservationError, match="took no time"):
        fit([*observations, Observation(observations[0].loads, 0.0)])
