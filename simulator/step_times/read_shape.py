"""Reads a ModelShape from a Hugging Face config.json.

Fields differ from one architecture to the next; for the architectures in `_KNOWN` they are read
with their meaning there. Any other architecture is read by the usual names, and the shape says so.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from simulator.step_times.fields import ConfigError, read_fields
from simulator.step_times.model_shape import Heads, Latent, ModelShape
from simulator.step_times.storage import Stored, read_stored

MOST_LAYERS = 2_000
MOST_HEADS = 16_384
MOST_WIDTH = 1 << 22  # of any vector
MOST_EXPERTS = 1 << 16
MOST_TOKENS = 1 << 28  # of a vocabulary, of a window
MOST_PARAMETERS = 10**15

_KNOWN = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3", "gemma3_text",
    "glm4", "glm4_moe", "glm_moe_dsa", "gpt_oss", "granite", "kimi_k2", "llama", "mimo_v2_flash",
    "minimax_m2", "mistral", "mixtral", "nemotron_h", "olmo2", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
    "qwen3_vl_text",
})  # fmt: skip
_NO_GATE = frozenset({"nemotron", "nemotron_h", "gpt2", "gpt_neox", "opt", "phi", "starcoder2"})
_NESTED = ("text_config", "llm_config", "language_config")
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "local": "window",
    "linear_attention": "state",
    "mamba": "state",
}
# Fields of models whose layers this program does not understand.
_OTHER_FORMS = (
    "block_configs", "compress_ratios", "encoder_layers", "layers_block_type", "linear_attn_config",
    "moe_latent_size",
)  # fmt: skip
_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}


def read_shape(path: Path) -> ModelShape:
    """Return the shape in the config.json at `path`, or in the folder `path`.

    Raises ConfigError, which has the file, the field and what to do.
    """
    return _Reader(path).shape()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._outer = read_fields(path)
        self._path = path / "config.json" if path.is_dir() else path
        self._assumed: list[str] = []
        self._fields = self._outer
        for name in _NESTED:
            found = self._outer.section(name)
            if found is not None:
                self._fields = found
                self._assume(f"{name} is the model; its encoders of images or sound are left out")
                break
        named = self._fields.text("model_type") or self._outer.text("model_type")
        self._type = named or ""
        self._refuse_other_forms()
        if self._type not in _KNOWN:
            self._assume(
                f"architecture {named or 'without model_type'} is unknown here: its fields are "
                "taken to mean what they mean elsewhere"
            )
        self._layers = self._fields.needed("num_hidden_layers", most=MOST_LAYERS)
        self._hidden = self._fields.needed("hidden_size", most=MOST_WIDTH)

    def shape(self) -> ModelShape:
        """Return the shape that the whole config describes."""
        full, window = self._attention()
        mixers = self._mixers()
        if not mixers.total():
            raise ConfigError(f"{self._path}: no layer in which tokens see each other")
        width = self._window() if mixers["window"] else 0
        dense_layers, expert_layers = self._mlps()
        per_token, experts, expert_width, shared = self._experts() if expert_layers else (0,) * 4
        stored, kv_fp8 = self._stored()
        found = ModelShape(
            architecture=self._type or "unknown",
            hidden=self._hidden,
            attention=full,
            window_attention=window,
            full_layers=mixers["full"],
            window_layers=mixers["window"],
            window=width,
            state_layers=mixers["state"],
            state_weights=self._state_weights() if mixers["state"] else 0,
            dense_layers=dense_layers,
            dense_width=self._dense_width() if dense_layers else 0,
            expert_layers=expert_layers,
            experts=experts,
            experts_per_token=per_token,
            expert_width=expert_width,
            shared_width=shared,
            mlp_matrices=self._mlp_matrices(),
            vocabulary=self._fields.needed("vocab_size", most=MOST_TOKENS),
            tied=self._tied(),
            stored=stored,
            kv_fp8=kv_fp8,
            assumed=tuple(self._assumed),
        )
        if found.parameters > MOST_PARAMETERS:
            raise ConfigError(
                f"{self._path}: {found.parameters:.3g} parameters; at most {MOST_PARAMETERS:.0e} "
                "are believed; correct its widths and layers"
            )
        return found

    def _assume(self, text: str) -> None:
        self._assumed.append(text)

    def _refuse_other_forms(self) -> None:
        for name in _OTHER_FORMS:
            if self._fields.has(name):
                raise ConfigError(
                    f"{self._fields.where(name)}: layers of this form are not understood; measure "
                    "this model: warmroute-sim calibrate"
                )
        if self._fields.flag("is_encoder_decoder"):
            raise ConfigError(
                f"{self._fields.where('is_encoder_decoder')}: only models without an encoder are "
                "understood; measure this model: warmroute-sim calibrate"
            )
        if (self._fields.whole("num_kv_shared_layers", most=MOST_LAYERS, least=0) or 0) > 0:
            self._assume(
                "layers that share KV (num_kv_shared_layers) are counted with KV of their own"
            )
        if (self._fields.whole("num_nextn_predict_layers", most=MOST_LAYERS, least=0) or 0) > 0:
            self._assume(
                "layers that predict further tokens (num_nextn_predict_layers) are left out"
            )

    def _attention(self) -> tuple[Heads | Latent, Heads | Latent]:
        """Return the attention of the layers that see all tokens, and of the layers with
        a window.
        """
        fields = self._fields
        query = fields.needed("num_attention_heads", most=MOST_HEADS)
        if fields.has("kv_lora_rank"):
            latent = self._latent(query)
            return latent, latent
        kv = fields.whole("num_key_value_heads", "num_kv_heads", most=MOST_HEADS) or query
        width = fields.whole("head_dim", most=MOST_WIDTH) or self._head_width(query)
        value = fields.whole("v_head_dim", most=MOST_WIDTH) or width
        gated = fields.flag("attn_output_gate") or self._type == "qwen3_next"
        self._divides("num_key_value_heads", kv, query)
        window = full = Heads(query, kv, width, value, gated)
        if fields.has("swa_num_attention_heads") or fields.has("swa_num_key_value_heads"):
            window = Heads(
                fields.whole("swa_num_attention_heads", most=MOST_HEADS) or query,
                fields.whole("swa_num_key_value_heads", most=MOST_HEADS) or kv,
                fields.whole("swa_head_dim", most=MOST_WIDTH) or width,
                fields.whole("swa_v_head_dim", most=MOST_WIDTH) or value,
            )
        if fields.has("global_head_dim") or fields.has("num_global_key_value_heads"):
            wide = fields.whole("global_head_dim", most=MOST_WIDTH) or width
            heads = fields.whole("num_global_key_value_heads", most=MOST_HEADS) or kv
            full = Heads(query, heads, wide, wide, gated)
        return full, window

    def _divides(self, name: str, kv: int, query: int) -> None:
        if query % kv:
            raise ConfigError(
                f"{self._fields.where(name)}: {kv} KV heads do not divide {query} attention heads; "
                "correct the file"
            )

    def _head_width(self, query: int) -> int:
        if self._hidden % query:
            raise ConfigError(
                f"{self._fields.where('head_dim')}: is missing, and hidden_size {self._hidden} is "
                f"no multiple of num_attention_heads {query}; add head_dim"
            )
        self._assume(f"head_dim is hidden_size / num_attention_heads = {self._hidden // query}")
        return self._hidden // query

    def _latent(self, query: int) -> Latent:
        fields = self._fields
        found = Latent(
            query=query,
            query_rank=fields.whole("q_lora_rank", most=MOST_WIDTH) or 0,
            kv_rank=fields.needed("kv_lora_rank", most=MOST_WIDTH),
            nope_width=fields.needed("qk_nope_head_dim", most=MOST_WIDTH),
            rope_width=fields.needed("qk_rope_head_dim", most=MOST_WIDTH),
            value_width=fields.needed("v_head_dim", most=MOST_WIDTH),
        )
        if not fields.has("index_topk"):
            return found
        self._assume(
            "sparse attention (index_topk): the indexer scores every key, and attention reads "
            "the keys it picks"
        )
        return Latent(
            found.query,
            found.query_rank,
            found.kv_rank,
            found.nope_width,
            found.rope_width,
            found.value_width,
            index_heads=fields.needed("index_n_heads", most=MOST_HEADS),
            index_width=fields.needed("index_head_dim", most=MOST_WIDTH),
            index_keys=fields.needed("index_topk", most=MOST_TOKENS),
        )

    def _mixers(self) -> Counter[str]:
        """Return the number of layers by the way in which their tokens see each other: full, window
        or state.
        """
        fields = self._fields
        if fields.is_list("layer_types"):
            return self._of_types(fields.texts("layer_types"), "layer_types")
        pattern = fields.text_or_none("hybrid_override_pattern")
        if pattern is not None:
            self._check_length("hybrid_override_pattern", len(pattern))
            self._assume_states()
            return Counter({"full": pattern.count("*"), "state": pattern.count("M")})
        marks = fields.wholes("hybrid_layer_pattern", most=1)
        if marks:
            self._check_length("hybrid_layer_pattern", len(marks))
            return Counter({"full": marks.count(0), "window": marks.count(1)})
        period = fields.whole("full_attention_interval", most=MOST_LAYERS)
        if period is not None:
            full = self._layers // period
            self._assume_states()
            return Counter({"full": full, "state": self._layers - full})
        return self._windows()

    def _of_types(self, types: list[str], name: str) -> Counter[str]:
        self._check_length(name, len(types))
        unknown = sorted(set(types) - set(_KINDS))
        if unknown:
            raise ConfigError(
                f"{self._fields.where(name)}: {unknown[0][:80]!r} is no kind of layer this program "
                f"knows: {', '.join(_KINDS)}; measure this model: warmroute-sim calibrate"
            )
        found = Counter(_KINDS[one] for one in types)
        if found["state"]:
            self._assume_states()
        return found

    def _assume_states(self) -> None:
        self._assume(
            "layers of linear attention or Mamba cost their matrices only, and keep no KV per token"
        )

    def _windows(self) -> Counter[str]:
        """Return the number of layers of each kind, for an architecture that says by a rule which
        layers have a window.
        """
        fields, layers = self._fields, self._layers
        period = fields.whole("sliding_window_pattern", "_sliding_window_pattern", most=MOST_LAYERS)
        period = period or _PERIOD.get(self._type)
        used = fields.flag("use_sliding_window")
        if used is None:
            used = not self._type.startswith(("qwen", "mimo"))
        if not fields.has("sliding_window") or not used:
            return Counter({"full": layers})
        if period is not None:
            full = layers // period
        elif self._type.startswith("qwen"):
            full = fields.whole("max_window_layers", most=MOST_LAYERS, least=0) or 0
        else:
            full = 0
            self._assume("every layer has the window of sliding_window")
        full = min(full, layers)
        return Counter({"full": full, "window": layers - full})

    def _check_length(self, name: str, length: int) -> None:
        if length != self._layers:
            raise ConfigError(
                f"{self._fields.where(name)}: {length} entries for {self._layers} "
                "num_hidden_layers; correct the file"
            )

    def _window(self) -> int:
        return self._fields.needed("sliding_window", "attention_chunk_size", most=MOST_TOKENS)

    def _mlps(self) -> tuple[int, int]:
        """Return the number of dense layers, and of layers with routed experts."""
        fields, layers = self._fields, self._layers
        pattern = fields.text_or_none("hybrid_override_pattern")
        if pattern is not None:
            return pattern.count("-"), pattern.count("E")
        count = self._expert_count() or 0
        if count < 2:
            return layers, 0
        routed = range(layers)
        if fields.is_list("moe_layer_freq"):
            marks = fields.wholes("moe_layer_freq", most=1)
            self._check_length("moe_layer_freq", len(marks))
            routed_layers = [i for i in routed if marks[i]]
        else:
            first = fields.whole("first_k_dense_replace", most=MOST_LAYERS, least=0) or 0
            step = (
                fields.whole("moe_layer_freq", "interleave_moe_layer_step", most=MOST_LAYERS) or 1
            )
            sparse = fields.whole("decoder_sparse_step", most=MOST_LAYERS) or 1
            dense = set(fields.wholes("mlp_only_layers", most=MOST_LAYERS))
            offset = 1 if fields.has("interleave_moe_layer_step") else 0
            routed_layers = [
                i
                for i in routed
                if i >= first
                and (i + offset) % step == 0
                and (i + 1) % sparse == 0
                and i not in dense
            ]
        return layers - len(routed_layers), len(routed_layers)

    def _expert_count(self) -> int | None:
        names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
        return self._fields.whole(*names, most=MOST_EXPERTS, least=0)

    def _experts(self) -> tuple[int, int, int, int]:
        """Return the number of experts that a token visits, the number of experts in a layer, the
        width of one, and the width of all shared experts.
        """
        fields = self._fields
        count = self._expert_count() or 0
        names = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk")
        per_token = fields.needed(*names, most=MOST_EXPERTS)
        if per_token > count:
            raise ConfigError(
                f"{fields.where('num_experts_per_tok')}: {per_token} of {count} experts; correct "
                "the file"
            )
        width = fields.whole("moe_intermediate_size", most=MOST_WIDTH)
        if width is None:
            width = fields.needed("intermediate_size", most=MOST_WIDTH)
            if self._type not in ("mixtral", "gpt_oss", "minimax_m2"):
                self._assume(f"an expert is as wide as intermediate_size says: {width}")
        shared = fields.whole(
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            most=MOST_WIDTH,
            least=0,
        )
        if shared is None:
            counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
            shared = width * (fields.whole(*counts, most=MOST_EXPERTS, least=0) or 0)
        if self._type.startswith("llama4"):
            shared = width
            self._assume("one shared expert a layer, as Llama 4 has")
        if fields.flag("enable_moe_block"):
            shared = fields.needed("intermediate_size", most=MOST_WIDTH)
        return per_token, count, width, shared

    def _dense_width(self) -> int:
        names = ("intermediate_size_mlp", "intermediate_size")
        return self._fields.needed(*names, most=MOST_WIDTH)

    def _mlp_matrices(self) -> int:
        act = self._fields.text_or_none("mlp_hidden_act") or self._fields.text_or_none("hidden_act")
        if self._type in _NO_GATE or act == "relu2":
            return 2
        if act not in (None, "silu", "gelu_pytorch_tanh", "swigluoai", "swish"):
            self._assume(
                f"feed-forward networks have a gate: three matrices (hidden_act {act[:40]!r})"
            )
        return 3

    def _state_weights(self) -> int:
        fields, hidden = self._fields, self._hidden
        if fields.has("linear_num_key_heads"):
            keys = fields.needed("linear_num_key_heads", most=MOST_HEADS)
            keys *= fields.needed("linear_key_head_dim", most=MOST_WIDTH)
            heads = fields.needed("linear_num_value_heads", most=MOST_HEADS)
            values = heads * fields.needed("linear_value_head_dim", most=MOST_WIDTH)
            return hidden * (2 * keys + 3 * values + 2 * heads)
        if fields.has("mamba_num_heads"):
            heads = fields.needed("mamba_num_heads", most=MOST_HEADS)
            inner = heads * fields.needed("mamba_head_dim", most=MOST_WIDTH)
            states = fields.needed("ssm_state_size", "mamba_d_state", most=MOST_WIDTH)
            groups = fields.whole("n_groups", most=MOST_HEADS) or 1
            return hidden * (3 * inner + 2 * groups * states + heads)
        self._assume("a layer of linear attention or Mamba has 6 hidden_size^2 weights")
        return 6 * hidden * hidden

    def _tied(self) -> bool:
        for fields in (self._outer, self._fields):
            found = fields.flag("tie_word_embeddings")
            if found is not None:
                return found
        return self._type.startswith("gemma")

    def _stored(self) -> tuple[Stored, bool]:
        for fields in (self._outer, self._fields):
            found = fields.section("quantization_config") or fields.section("compression_config")
            if found is not None:
                break
        else:
            beside = self._path.with_name("hf_quant_config.json")
            found = read_fields(beside).section("quantization") if beside.is_file() else None
            if found is None:
                return Stored(), False
            self._assume(f"weights are stored as {beside.name} beside it says")
        stored, kv_fp8, assumed = read_stored(found, self._layers)
        self._assumed += assumed
        return stored, kv_fp8
