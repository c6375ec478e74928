"""Writes the small model (tests/engines/model.py) in llama.cpp's file format.

    python tests/engines/llamacpp_model.py FOLDER FILE

It runs in llama.cpp's environment, which has the package `gguf`, and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Names of the layers' tensors with us and with llama.cpp.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main(folder: Path, file: Path) -> None:
    """Read the model in the folder and write the file."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, folder)
    for name, values in _tensors(folder / "model.safetensors"):
        writer.add_tensor(_named(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, folder: Path) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = made["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {one["content"] for one in made["added_tokens"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # how ByteLevel of `tokenizers` splits
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    merges = made["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(vocabulary[config["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(config["chat_template"])


def _tensors(path: Path) -> list[tuple[str, Any]]:
    """Return (name, float32 values) of a safetensors file in bfloat16, which numpy lacks."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    read = []
    for name, about in json.loads(raw[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = (begin + offset for offset in about["data_offsets"])
        halves = np.frombuffer(raw[first:last], dtype="<u2").astype("<u4")
        read.append((name, (halves << 16).view("<f4").reshape(about["shape"])))
    return read


def _named(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in OUTSIDE:
        return f"{OUTSIDE[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
