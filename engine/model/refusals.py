"""What a configuration may ask for and the model does not have, each refused by its name."""

from __future__ import annotations

from engine.model.json_file import Fields

OTHER = "serve a model without it, or another engine"


def refuse_what_is_not_built(fields: Fields, arch: str) -> None:
    """Raise ModelError for quantized weights, experts, sliding windows, other activations."""
    if fields.has("quantization_config"):
        method = fields.within("quantization_config").text("quant_method", "unknown")
        raise fields.refuse(
            "quantization_config", f"asks for {method} weights", "serve the unquantized checkpoint"
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.has(name):
            raise fields.refuse(name, "asks for a mixture of experts", OTHER)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.refuse("hidden_act", f"is {activation!r:.40}, only silu is built", OTHER)
    _refuse_sliding(fields, arch)


def _refuse_sliding(fields: Fields, arch: str) -> None:
    """Sliding layers as transformers 5.23 finds them: by name, else behind `max_window_layers`."""
    listed = fields.values.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or set(map(str, listed)) - {"full_attention"}:
            raise fields.refuse("layer_types", "names other than full_attention", OTHER)
        return
    if arch == "llama":
        is_sliding = fields.has("sliding_window")
    else:
        layers = fields.integer("num_hidden_layers", 1, 1 << 20)
        first = fields.integer("max_window_layers", 0, 1 << 20, 28)
        is_sliding = (
            fields.flag("use_sliding_window", False)
            and fields.has("sliding_window")
            and first < layers
        )
    if is_sliding:
        raise fields.refuse("sliding_window", "asks for sliding-window attention", OTHER)
