"""The config.json of well-known models, written for these tests with only the fields that describe
a shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.step_times.model_shape import ModelShape
from simulator.step_times.read_shape import read_shape

Config = dict[str, Any]


def _dense(kind: str, layers: int, hidden: int, width: int, heads: str, more: Config) -> Config:
    query, kv = map(int, heads.split("/"))
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "tie_word_embeddings": False,
        **more,
    }


_QWEN = {
    "head_dim": 128,
    "vocab_size": 151_936,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN_EXPERTS = {
    **_QWEN,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LLAMA = {"vocab_size": 128_256}
_GPT_OSS = {
    "head_dim": 64,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    },
}


def _gpt_oss(layers: int, experts: int) -> Config:
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    more = {**_GPT_OSS, "num_local_experts": experts, "layer_types": types}
    return _dense("gpt_oss", layers, 2880, 2880, "64/8", more)


_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_DEEPSEEK = {
    "vocab_size": 129_280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": _FP8_BLOCKS,
}


def _glm(layers: int, hidden: int, width: int, experts: int, dense: int, wide: int) -> Config:
    more = {
        "head_dim": 128,
        "vocab_size": 151_552,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": wide,
        "first_k_dense_replace": dense,
    }
    return _dense("glm4_moe", layers, hidden, width, "96/8", more)


_GEMMA_TEXT = _dense(
    "gemma3_text",
    62,
    5376,
    21_504,
    "32/16",
    {"head_dim": 128, "vocab_size": 262_208, "sliding_window": 1024, "sliding_window_pattern": 6},
)

_STATES = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "attn_output_gate": True,
}

CONFIGS: Mapping[str, Config] = {
    "llama-3.1-8b": _dense("llama", 32, 4096, 14_336, "32/8", _LLAMA),
    "llama-3.1-70b": _dense("llama", 80, 8192, 28_672, "64/8", _LLAMA),
    "qwen3-8b": _dense("qwen3", 36, 4096, 12_288, "32/8", _QWEN),
    "qwen3-32b": _dense("qwen3", 64, 5120, 25_600, "64/8", _QWEN),
    "qwen3-30b-a3b": _dense(
        "qwen3_moe", 48, 2048, 6144, "32/4", {**_QWEN_EXPERTS, "moe_intermediate_size": 768}
    ),
    "qwen3-235b-a22b": _dense(
        "qwen3_moe", 94, 4096, 12_288, "64/4", {**_QWEN_EXPERTS, "moe_intermediate_size": 1536}
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _dense("deepseek_v3", 61, 7168, 18_432, "128/128", _DEEPSEEK),
    "glm-4.5": _glm(92, 5120, 12_288, 160, 3, 1536),
    "glm-4.5-air": _glm(46, 4096, 10_944, 128, 1, 1408),
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {key: v for key, v in _GEMMA_TEXT.items() if key != "tie_word_embeddings"},
        "vision_config": {"hidden_size": 1152},
    },
    "mixtral-8x7b": _dense(
        "mixtral",
        32,
        4096,
        14_336,
        "32/8",
        {"vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "llama-3.1-405b": _dense("llama", 126, 16_384, 53_248, "128/8", _LLAMA),
    "qwen3-0.6b": _dense("qwen3", 28, 1024, 3072, "16/8", {**_QWEN, "tie_word_embeddings": True}),
    "qwen3-coder-480b": _dense(
        "qwen3_moe",
        62,
        6144,
        8192,
        "96/8",
        {**_QWEN_EXPERTS, "num_experts": 160, "moe_intermediate_size": 2560},
    ),
    "minimax-m2.5": _dense(
        "minimax_m2",
        62,
        3072,
        1536,
        "48/8",
        {
            "head_dim": 128,
            "vocab_size": 200_064,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "quantization_config": _FP8_BLOCKS,
        },
    ),
    "gemma-4-26b-a4b": _dense(
        "gemma4_text",
        30,
        2816,
        2112,
        "16/8",
        {
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 2,
            "vocab_size": 262_144,
            "tie_word_embeddings": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "sliding_window": 1024,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        },
    ),
    "qwen3.5-35b-a3b": _dense(
        "qwen3_5_moe_text",
        40,
        2048,
        512,
        "16/2",
        {
            **_STATES,
            "head_dim": 256,
            "vocab_size": 248_320,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "nemotron-3-nano-30b": _dense(
        "nemotron_h",
        52,
        2688,
        1856,
        "32/2",
        {
            "head_dim": 128,
            "vocab_size": 131_072,
            "hybrid_override_pattern": "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "mlp_hidden_act": "relu2",
        },
    ),
    "llama-4-scout": {
        "model_type": "llama4",
        "text_config": _dense(
            "llama4_text",
            48,
            5120,
            8192,
            "40/8",
            {
                "head_dim": 128,
                "vocab_size": 202_048,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 16_384,
            },
        ),
    },
}


def written(folder: Path, config: object) -> Path:
    """Write `config` as a config.json in `folder`; return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def shape_of(folder: Path, name: str) -> ModelShape:
    """Return the shape of the named model of `CONFIGS`."""
    return read_shape(written(folder, CONFIGS[name]))
