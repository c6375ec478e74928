"""The built-in profiles that are fitted to kernel tables, and the way to fit each of them again.
vLLM's tables are used first.

Tables of another engine are used if a kernel of vLLM's table jumps between sizes, so that no smooth
form fits it (`TabledProfile.why`).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.profiles import Profile
from engine.step_time import StepTime
from simulator.step_times.compare import TOLERANCE
from simulator.step_times.derive import MEMORY_SHARE, WORKSPACE_BYTES
from simulator.step_times.kernel_fit import KernelFit, fit_kernels
from simulator.step_times.tables import Instance, Tables

HELD_TOLERANCE = 0.12
# CPU time, between what vLLM's own benchmark leaves over the kernels of the tables: 32 tokens in,
# 128 out, batches of 8 on H200 (performance-benchmark 9515, 2024): Llama-3.1-8B took 833 ms for
# 627 ms of kernels, 1.6 ms a step; Llama-3-70B on four GPUs 2,078 for 1,621, 3.6 ms a step.
# Engines since then prepare a step while the one before computes, which hides a part of it.
CPU = StepTime(0.0, 0.0, 0.0, 0.0, overhead_s=0.002, seq_s=15e-6)
CPU_SOURCE = "CPU 2 ms a step and 15 us a sequence, after vLLM's benchmark 9515 (1.6 to 3.6 ms)"

_MEMORY_GB = {  # of a GPU, data sheets
    "a100_sxm": 80, "h100_sxm": 80, "h200_sxm": 141, "b200_sxm": 180, "gb200": 186, "l40s": 48,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """The memory that a model needs on a GPU, and the number of experts that a token visits."""

    weights_gb: float  # of all GPUs of an instance
    kv_bytes_per_token: int
    expert_share: float = 0.0
    kv_is_copied: bool = False  # a latent for all heads: each GPU of an instance holds all of it


_LLAMA_8B = Model(16.06, 131_072)
_LLAMA_70B = Model(141.1, 327_680)
_QWEN_8B = Model(16.4, 147_456)
_QWEN_32B = Model(65.5, 262_144)
_QWEN_30B_A3B = Model(61.1, 98_304, 8 / 128)
# Its 4 KV heads are copied where 8 GPUs share them.
_QWEN_235B_A22B = Model(470.2, 2 * 192_512, 8 / 128)
# Every other layer of gpt-oss reads a window of 128 tokens, whose blocks are freed behind it.
_GPT_OSS_20B = Model(13.8, 24_576, 4 / 32)
_GPT_OSS_120B = Model(65.2, 36_864, 4 / 128)
_DEEPSEEK = Model(688.6, 35_136, 8 / 256, kv_is_copied=True)


@dataclass(frozen=True, slots=True)
class TabledProfile:
    """A built-in profile, and the kernel table that it is fitted to."""

    name: str
    model: Model
    instance: Instance
    why: str = ""  # another engine than vLLM; or rows that lie outside `TOLERANCE`


def _llama8(gpu: str, label: str, engine: str = "vllm", why: str = "") -> TabledProfile:
    return TabledProfile(
        f"llama-3.1-8b-{label}",
        _LLAMA_8B,
        Instance("meta-llama/Meta-Llama-3.1-8B", gpu, engine),
        why,
    )


def _llama70(gpu: str, label: str, gpus: int, engine: str = "vllm", why: str = "") -> TabledProfile:
    return TabledProfile(
        f"llama-3-70b-{label}-tp{gpus}",
        _LLAMA_70B,
        Instance("meta-llama/Meta-Llama-3.1-70B", gpu, engine, gpus),
        why,
    )


def _qwen32(gpu: str, label: str, gpus: int, engine: str = "vllm", why: str = "") -> TabledProfile:
    name = f"qwen3-32b-{label}" + (f"-tp{gpus}" if gpus > 1 else "")
    return TabledProfile(name, _QWEN_32B, Instance("Qwen/Qwen3-32B", gpu, engine, gpus), why)


def _moe(
    name: str,
    model: Model,
    path: str,
    gpu: str,
    gpus: int = 1,
    engine: str = "vllm",
    why: str = "",
    spread: bool = False,
) -> TabledProfile:
    return TabledProfile(
        name, model, Instance(path, gpu, engine, gpus, "spread" if spread else "split"), why
    )


_JUMP_A100 = "vLLM's table for A100 jumps between sizes"
_JUMP_EXPERTS = "the tables' grouped GEMMs jump between sizes"
_FEW_ROWS = "the experts' GEMMs jump where each gets a few rows"

ENTRIES = (
    _llama8("a100_sxm", "a100", "trtllm", _JUMP_A100),
    _llama8("h100_sxm", "h100"),
    _llama8("h200_sxm", "h200"),
    _llama8("b200_sxm", "b200"),
    _llama8("gb200", "gb200", "trtllm", "vLLM's table for GB200 jumps between sizes"),
    _llama8("l40s", "l40s"),
    TabledProfile("llama-3.1-8b-fp8-h100", Model(9.1, 131_072), Instance(
        "meta-llama/Meta-Llama-3.1-8B", "h100_sxm", settings={"gemm_quant_mode": "fp8"})),
    TabledProfile("llama-3.1-8b-fp8-l40s", Model(9.1, 131_072), Instance(
        "meta-llama/Meta-Llama-3.1-8B", "l40s", settings={"gemm_quant_mode": "fp8"})),
    TabledProfile("llama-3.1-8b-int8-a100", Model(9.1, 131_072), Instance(
        "meta-llama/Meta-Llama-3.1-8B", "a100_sxm", "trtllm",
        settings={"gemm_quant_mode": "int8_wo"}),
        "TensorRT-LLM alone has tables of INT8 weights"),
    TabledProfile("qwen3-8b-h100", _QWEN_8B, Instance("Qwen/Qwen3-8B", "h100_sxm")),
    _qwen32("a100_sxm", "a100", 4, "trtllm", _JUMP_A100),
    _qwen32("h100_sxm", "h100", 2),
    _qwen32("h100_sxm", "h100", 4),
    _qwen32("h200_sxm", "h200", 2),
    _qwen32("b200_sxm", "b200", 1),
    _qwen32("l40s", "l40s", 4),
    TabledProfile("qwen3-32b-fp8-h100", Model(33.4, 262_144), Instance(
        "Qwen/Qwen3-32B-FP8", "h100_sxm", "sglang"),
        "vLLM's table of FP8 GEMMs jumps between sizes"),
    _llama70("a100_sxm", "a100", 4, "trtllm", _JUMP_A100),
    _llama70("h100_sxm", "h100", 4),
    _llama70("h100_sxm", "h100", 8),
    _llama70("h200_sxm", "h200", 4),
    _llama70("h200_sxm", "h200", 8),
    _llama70("b200_sxm", "b200", 2),
    TabledProfile("llama-3-70b-fp8-h100-tp2", Model(72.7, 163_840), Instance(
        "nvidia/Llama-3.1-70B-Instruct-FP8", "h100_sxm", gpus=2)),
    TabledProfile("llama-3-70b-fp8-h100-tp4", Model(72.7, 163_840), Instance(
        "nvidia/Llama-3.1-70B-Instruct-FP8", "h100_sxm", gpus=4)),
    _moe("qwen3-30b-a3b-h100", _QWEN_30B_A3B, "Qwen/Qwen3-30B-A3B", "h100_sxm", why=_FEW_ROWS),
    _moe("qwen3-30b-a3b-h100-tp2", _QWEN_30B_A3B, "Qwen/Qwen3-30B-A3B", "h100_sxm", 2),
    _moe("qwen3-30b-a3b-h200", _QWEN_30B_A3B, "Qwen/Qwen3-30B-A3B", "h200_sxm"),
    _moe("qwen3-30b-a3b-b200", _QWEN_30B_A3B, "Qwen/Qwen3-30B-A3B", "b200_sxm", why=_FEW_ROWS),
    _moe("qwen3-235b-a22b-h200-tp8", _QWEN_235B_A22B, "Qwen/Qwen3-235B-A22B", "h200_sxm", 8,
         why=_FEW_ROWS),
    _moe("qwen3-235b-a22b-fp8-h200-tp4", Model(237.0, 192_512, 8 / 128), "Qwen/Qwen3-235B-A22B-FP8",
         "h200_sxm", 4, why=_FEW_ROWS),
    _moe("gpt-oss-20b-h100", _GPT_OSS_20B, "openai/gpt-oss-20b", "h100_sxm", engine="trtllm",
         why="vLLM's table jumps more: " + _FEW_ROWS),
    _moe("gpt-oss-20b-l40s", _GPT_OSS_20B, "openai/gpt-oss-20b", "l40s", why=_FEW_ROWS),
    _moe("gpt-oss-120b-h100", _GPT_OSS_120B, "openai/gpt-oss-120b", "h100_sxm"),
    _moe("gpt-oss-120b-h100-tp2", _GPT_OSS_120B, "openai/gpt-oss-120b", "h100_sxm", 2),
    _moe("gpt-oss-120b-h200", _GPT_OSS_120B, "openai/gpt-oss-120b", "h200_sxm"),
    _moe("gpt-oss-120b-b200", _GPT_OSS_120B, "openai/gpt-oss-120b", "b200_sxm",
         why=_JUMP_EXPERTS),
    _moe("deepseek-r1-h200-tp8", _DEEPSEEK, "deepseek-ai/DeepSeek-R1", "h200_sxm", 8,
         spread=True),
    _moe("deepseek-r1-fp4-b200-tp8", Model(413.0, 35_136, 8 / 256, kv_is_copied=True),
         "nvidia/DeepSeek-V3.1-NVFP4", "b200_sxm", 8, spread=True, why=_FEW_ROWS),
    _moe("glm-5-fp4-b200-tp8", Model(434.0, 44_928, 8 / 256, kv_is_copied=True),
         "nvidia/GLM-5-NVFP4", "b200_sxm", 8, "trtllm", spread=True,
         why="its sparse attention has an index of its own, whose time follows another law"),
)  # fmt: skip
BY_NAME = {row.name: row for row in ENTRIES}


def kv_tokens(row: TabledProfile) -> int:
    """Return the number of KV tokens that fit into the memory that weights and activations leave on
    an instance.
    """
    model, gpus = row.model, row.instance.gpus
    memory = _MEMORY_GB[row.instance.gpu] * 1e9 * MEMORY_SHARE
    room = memory - model.weights_gb * 1e9 / gpus - WORKSPACE_BYTES
    return round(room * (1 if model.kv_is_copied else gpus) / model.kv_bytes_per_token / 1e3) * 1000


def fitted(row: TabledProfile, seed: int = 0) -> tuple[Profile, KernelFit]:
    """Return the profile of `row`, fitted to the installed tables. Raises TableError if the tables
    do not have the model.
    """
    tables = Tables(row.instance)
    found = fit_kernels(tuple(tables.rows()), row.model.expert_share, seed, CPU)
    return profile_of(row, found, tables.source()), found


def profile_of(row: TabledProfile, found: KernelFit, source: str) -> Profile:
    """Return the profile that a fit gives; `source` names the tables."""
    pairs = zip(found.rows, abs(found.errors).tolist(), strict=True)
    off = sorted(error for row, error in pairs if row.kind != "mixed")
    outside = sum(error > TOLERANCE for error in off)
    note = f", {outside} rows beyond {TOLERANCE:.0%} ({row.why})" if outside else ""
    if row.why and not outside:
        note = f" ({row.why})"
    provenance = (
        f"kernels fitted to the tables of {source}: {len(off)} steps, median "
        f"{off[len(off) // 2]:.1%} off, worst {off[-1]:.1%}{note}; {CPU_SOURCE}"
    )
    return Profile(
        row.name, found.step_time, kv_tokens(row), row.model.kv_bytes_per_token, provenance
    )
