"""Tests of INT8 weights and KV: errors stay within their bounds, and refusals name the reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main as cli
from engine.model.attention import attend, write
from engine.model.batch import Piece, flat_batch
from engine.model.config import ModelError, Quantization, read_config
from engine.model.kv_cache import KvCache, dequantize, quantize
from engine.model.layers import Int8Weight, Linear, quantize_rows, read_rows
from engine.model.tiny import TinySettings, make_tiny
from tests.effort import examples
from tests.engine.real import loaded as served
from tests.engine.tiny_models import written

WHOLE = torch.float64
NEARLY = 1 + 1e-5  # scales are float32


def drawn(seed: int, *shape: int, spread: float = 1.0) -> torch.Tensor:
    """Return random numbers whose rows differ in magnitude by powers of ten, up to `spread`."""
    made = torch.Generator().manual_seed(seed)
    sizes = 10 ** (spread * torch.randn(shape[0], *[1] * (len(shape) - 1), generator=made))
    return torch.randn(shape, generator=made) * sizes


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40),
    spread=st.sampled_from((0.0, 1.0, 8.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_a_quantized_weight_is_off_by_half_a_scale_at_most(
    seed: int, outputs: int, inputs: int, spread: float, dtype: torch.dtype
) -> None:
    rows = drawn(seed, outputs, inputs, spread=spread).to(dtype)
    rows[seed % outputs] = 0
    q, scales = quantize_rows(rows)
    half = scales.to(WHOLE).unsqueeze(-1) / 2
    assert q.dtype == torch.int8
    assert bool(((rows.to(WHOLE) - q.to(WHOLE) * 2 * half).abs() <= half * NEARLY).all())
    assert bool((scales.to(WHOLE) <= rows.to(WHOLE).abs().amax(-1) / 127 * NEARLY + 2e-38).all())
    assert not q[seed % outputs].any()


def test_weights_read_in_pieces_equal_parts_of_the_full_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = drawn(3, 50, 20)
    q, scales = quantize_rows(whole)
    monkeypatch.setattr("engine.model.layers.MAX_READ", 60)
    found = read_rows(lambda rows: whole[rows], slice(10, 41), 20, slice(5, 10))
    assert torch.equal(found[0], q[10:41, 5:10])
    assert torch.equal(found[1], scales[10:41])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_are_off_by_the_weights_errors_at_most(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products with INT8 weights differ by at most the weights' errors, also if computed in pieces
    of output channels, as for large matrices.
    """
    # Not spread far: float16 ends at 65504.
    weight, bias = drawn(1, 70, 96, spread=0.3), drawn(4, 70, spread=0.3).to(dtype)
    x = drawn(2, 33, 96, spread=0.3).to(dtype)
    q, scales = quantize_rows(weight)
    monkeypatch.setattr("engine.model.layers.MAX_WIDENED", 960)
    kept = scales.double() if dtype == WHOLE else scales
    made = Linear(Int8Weight(q, kept, dtype), bias)(x).to(WHOLE)
    assert made.shape == (33, 70)
    exact = x.to(WHOLE) @ weight.to(WHOLE).T + bias.to(WHOLE)
    bound = x.to(WHOLE).abs().sum(-1, keepdim=True) * scales.to(WHOLE) / 2
    sizes = x.to(WHOLE).abs() @ weight.to(WHOLE).abs().T + bias.to(WHOLE).abs()
    rounding = 4 * torch.finfo(dtype).eps * sizes
    off = (made - exact).abs()
    assert bool((off <= bound * NEARLY + rounding).all())
    assert bool((off > 0).any())


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from((0.0, 1.0, 8.0)),
    storage=st.sampled_from((torch.int8, torch.float8_e4m3fn)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_a_quantized_cache_value_is_within_its_error_bound(
    seed: int, spread: float, storage: torch.dtype, dtype: torch.dtype
) -> None:
    x = drawn(seed, 6, 3, 16, spread=spread).to(dtype)
    x[0, 0] = 0
    values, scales = quantize(x, storage)
    assert values.dtype == storage
    off = (x.to(WHOLE) - dequantize(values, scales, WHOLE)).abs()
    unit = scales.to(WHOLE).unsqueeze(-1)
    # e4m3 has three bits of fraction, and steps of 2**-9 below 2**-6.
    bound = unit / 2 if storage == torch.int8 else (x.to(WHOLE).abs() / 16).clamp_min(unit / 1024)
    assert bool((off <= bound * NEARLY).all())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
def test_nan_and_infinity_stay_so_after_quantization(broken: float, storage: torch.dtype) -> None:
    """NaN and infinity stay so after quantization, so that a failed request ends instead of
    continuing with other numbers.
    """
    x = torch.ones(2, 16)
    x[0, 3] = broken
    made = dequantize(*quantize(x, storage), torch.float32)
    assert not bool(made[0].isfinite().any())
    assert bool(made[1].isfinite().all())


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 1 << 30), tokens=st.integers(1, 150), loud=st.sampled_from((0.3, 1, 3)))
def test_attention_over_int8_is_within_its_error_bound(
    seed: int, tokens: int, loud: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Attention over INT8 stays within its error bound: a score differs by at most e, so a weight
    by a factor exp(2 e), and V by half a scale.
    """
    config = read_config(written(tmp_path_factory.mktemp("model"), TinySettings()))
    blocks = tokens // 16 + 1
    batch = flat_batch([Piece([0] * tokens, 0, range(blocks))], 16)
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, n, 16, generator=made, dtype=WHOLE) for n in (4, 2, 2))
    q *= loud
    outs = []
    for kv in ("auto", "int8"):
        layer = KvCache(config, blocks, 16, dtype=WHOLE, kv=kv).layer(1)
        write(k, v, layer, batch.slots)
        outs.append(attend(q, layer, batch))
    half_k, half_v = (quantize(x, torch.int8)[1].to(WHOLE).amax() / 2 for x in (k, v))
    score = q.abs().sum(-1, keepdim=True) * 16**-0.5 * half_k
    bound = ((2 * score).exp() - 1) * v.abs().max() + half_v
    off = (outs[1] - outs[0]).abs()
    assert bool((off <= bound * NEARLY).all())
    assert float(off.max()) > 1e-6


@pytest.mark.parametrize(
    ("values", "said"),
    [({"weights": "int4"}, "quantize must be one of none, int8"), ({"kv": "fp4"}, "kv_dtype must")],
)
def test_unknown_settings_are_rejected(values: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Quantization(**values)


def test_a_cache_dtype_that_the_device_lacks_is_rejected(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, TinySettings()))
    with pytest.raises(ModelError, match=r"kv_dtype fp8: torch has no .* on mps"):
        KvCache(config, 2, 16, device="mps", kv="fp8")
    with pytest.raises(ValueError, match="kv_dtype 'fp4'"):
        KvCache(config, 2, 16, kv="fp4")


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_unaligned_heads_are_refused_before_weights_are_read(
    kv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path, TinySettings(hidden_size=48, heads=2))
    assert cli.main(["serve", str(tmp_path), "--kv-dtype", kv]) == 1
    said = capsys.readouterr().err
    assert f"head_dim 24 is no multiple of 16, which kv_dtype {kv} needs" in said
    assert "serve it with kv_dtype auto" in said
    assert "blocks" not in said


@pytest.mark.parametrize("flags", [["--quantize", "int3"], ["--kv-dtype", "fp16"]])
def test_unknown_flags_are_rejected(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path), *flags])
    assert ended.value.code == 2


@pytest.mark.parametrize("weights", ["none", "int8", "int8-all"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_the_memory_report_counts_weights_and_kv_as_stored(
    weights: str, kv: str, tmp_path: Path
) -> None:
    make_tiny(tmp_path)
    plain = served(tmp_path).capacity
    model = served(tmp_path, quantization=Quantization(weights, kv))
    capacity, kv_cache = model.capacity, model.model.kv
    assert capacity.weights_bytes == model.model._transformer.weights_bytes
    assert capacity.kv_bytes == kv_cache.nbytes // (kv_cache.blocks + 1) * kv_cache.blocks
    hidden, wide, vocab = 64, 192, model.config.vocab
    inside = 2 * (hidden * (64 + 2 * 32 + 64) + 3 * hidden * wide)
    channels = 2 * (64 + 2 * 32 + 64 + 2 * wide + hidden)
    saved = {"none": 0, "int8": 3 * inside - 4 * channels}
    saved["int8-all"] = saved["int8"] + 2 * (3 * vocab * hidden - 4 * vocab)
    assert plain.weights_bytes - capacity.weights_bytes == saved[weights]
    # 16 elements of float32, or of a byte with a scale.
    assert capacity.kv_bytes / plain.kv_bytes == (20 / 64 if kv == "int8" else 1)
