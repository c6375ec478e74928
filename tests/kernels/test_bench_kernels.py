"""The kernels' bench without a GPU: its counts, its tables, and its runs in small on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.bench.gpu import ours
from tests.bench.gpu.cases import L2_BYTES, Attention, Bar, Blocks, Linear, all_cases, decode
from tests.bench.gpu.cases import shared_cases as shared
from tests.bench.gpu.table import Result, as_json, markdown

CEILINGS = {"stream": 4e12, "copy": 4e12, "matmul": 8e14}
SMALL = Attention(3, 45, heads=8, kv_heads=2, dim=64)


def test_ideal_gains_are_those_of_the_bytes() -> None:
    gains = []
    for case in shared():
        assert isinstance(case.shape, Attention)
        if case.shape.stored == "bfloat16":
            gains.append(case.shape.ideal_gain(4.3e12, 7.9e14))
    # Worked out by hand for one layer of Llama-8B, without queries and outputs.
    assert gains == pytest.approx([7.2, 12.6, 7.7, 19.4], rel=0.03)
    batch, prefix, own = 32, 2_048, 256
    shape = shared()[0].shape
    assert isinstance(shape, Attention)
    assert shape.shared_bytes - shape.query_bytes == (prefix + batch * own) * 8 * 2 * 128 * 2
    assert shape.plain_bytes - shape.query_bytes == batch * (prefix + own) * 8 * 2 * 128 * 2


def test_flops_count_what_causal_queries_see() -> None:
    shape = Attention(2, 50, heads=4, dim=64, new=7)
    seen = sum(50 - 7 + query + 1 for query in range(7))
    assert shape.flops == 2 * 4 * 64 * 4 * seen
    assert Attention(1, 50, heads=4, dim=64).flops == 4 * 64 * 4 * 50


def test_quantized_tokens_have_their_scales() -> None:
    assert replace(SMALL, stored="int8").token_bytes == 2 * 2 * (64 + 4)
    assert SMALL.token_bytes == 2 * 2 * 64 * 2


def test_inputs_in_turn_do_not_fit_into_l2() -> None:
    for case in all_cases():
        assert case.pools() >= 4
        assert case.pools() * case.pool_bytes > 10 * L2_BYTES
        assert case.pools() * case.pool_bytes < 16 << 30


def test_every_required_row_is_there() -> None:
    bars = {(case.kernel, bar.figure, bar.wanted) for case in all_cases() for bar in case.bars}
    assert bars >= {
        ("decode", "of_ceiling", 0.85),
        ("decode", "times_flashinfer", 1.0),
        ("decode", "of_ceiling", 0.70),
        ("decode", "us", 8.0),
        ("decode", "times_bf16", 1.6),
        ("shared", "of_ideal_gain", 0.6),
        ("shared", "times_flashinfer", 1.3),
        ("shared", "times_plain", 1.0),
        ("prefill", "tflops", 350.0),
        ("prefill", "tflops_wgmma", 550.0),
        ("prefill", "times_bf16", 0.8),
        ("shared", "times_bf16", 1.3),
        ("append", "of_ceiling", 0.75),
        ("w8a16", "of_ceiling", 0.75),
        ("copy", "of_ceiling", 0.80),
    }
    large = [case for case in all_cases() if Bar("of_ceiling", 0.85) in case.bars]
    assert all(case.bytes >= 256 << 20 for case in large)


def test_verdicts() -> None:
    bars = Bar("of_ceiling", 0.85), Bar("us", at_most=8.0), Bar("times_flashinfer", 1.0)
    case = decode("a case", SMALL, *bars)
    seconds = case.bytes / 4e12 / 0.9
    result = Result(case, seconds * 1e6, 2e-3)
    assert result.figures(CEILINGS)["of_ceiling"] == pytest.approx(0.9)
    assert list(result.verdicts(CEILINGS).values()) == ["met", "met", "not measured", "met"]
    result.others["flashinfer"] = result.us * 0.9 if result.us else 0
    result.error = float("nan")
    assert list(result.verdicts(CEILINGS).values()) == ["met", "met", "MISSED", "MISSED"]
    nothing = Result(case, notes=["no kernel"])
    assert set(nothing.verdicts(CEILINGS).values()) == {"not measured"}


def test_gains_are_shares_of_the_ideal_one() -> None:
    case = shared()[1]
    result = Result(case, 100.0, None, {"plain": 600.0, "flashinfer": 120.0})
    figures = result.figures(CEILINGS)
    assert isinstance(case.shape, Attention)
    assert figures["of_ideal_gain"] == pytest.approx(6 / case.shape.ideal_gain(4e12, 8e14))
    assert result.verdicts(CEILINGS)["times_flashinfer >= 1.3"] == "MISSED"


def test_ways_of_prefill_have_their_own_rates() -> None:
    case = next(case for case in all_cases() if case.kernel == "prefill")
    result = Result(case, case.flops / 4e14 * 1e6, None, {"wgmma": case.flops / 6e14 * 1e6})
    assert result.figures(CEILINGS)["tflops_wgmma"] == pytest.approx(600)
    assert set(result.verdicts(CEILINGS).values()) == {"met"}
    result.others.clear()
    assert result.verdicts(CEILINGS)["tflops_wgmma >= 550"] == "not measured"


def test_tables_have_a_row_a_case() -> None:
    results = [Result(case, 10.0, 1e-3) for case in all_cases()]
    results[0].notes.append("flex: RuntimeError: none here")
    lines = markdown(results, CEILINGS, "a device").splitlines()
    assert len(lines) == 4 + len(results)
    assert all(line.count("|") == 9 for line in lines[2:])
    assert "flex: RuntimeError: none here" in lines[4]
    rows = json.loads(as_json(results, CEILINGS, "a device"))["rows"]
    assert [row["case"] for row in rows] == [case.name for case in all_cases()]


def test_page_tables_share_the_prefix_only() -> None:
    shape = Attention(4, 80, prefix=32)
    table = ours.table_of(shape, torch.Generator().manual_seed(1))
    assert (table[:, :2] == table[0, :2]).all()
    used = torch.cat((table[0, :2], table[:, 2:].flatten()))
    assert sorted(used.tolist()) == list(range(shape.pages))


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("prefix", [0, 32])
def test_decode_runs_and_is_checked(stored: str, prefix: int) -> None:
    batch = ours.batch_of(replace(SMALL, stored=stored, prefix=prefix), 1, "cpu")
    ours.decode_run(batch)()
    assert ours.decode_error(batch) < 1e-2
    batch.out[1, 3, 5] += 1
    assert ours.decode_error(batch) > 1e-2


def test_prefill_runs_and_is_checked() -> None:
    batch = ours.batch_of(replace(SMALL, new=9), 1, "cpu")
    ours.prefill_run(batch)()
    assert not batch.out.isnan().any()
    assert ours.prefill_error(batch) < 1e-2
    batch.out[8] = 0
    assert ours.prefill_error(batch) > 1e-2


def test_the_others_run_and_are_checked() -> None:
    assert ours.append_run(Attention(1, 40, 8, 2, 64, new=40), 1, "cpu")[1] < 1e-2
    assert ours.linear_run(Linear(3, 20, 64), 1, "cpu")[1] < 1e-2
    for shape in (
        Blocks(8, layers=2, row_bytes=32),
        Blocks(8, layers=2, row_bytes=32, target_heads=4),
        Blocks(8, layers=2, row_bytes=32, target_page=64),
    ):
        assert ours.copy_run(shape, 1, "cpu")[1] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_shows_its_plan() -> None:
    command = [sys.executable, "-m", "tests.bench.kernels", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    lines = done.stdout.splitlines()
    assert "no CUDA device" in lines[0]
    assert len(lines) == 1 + len(all_cases())
