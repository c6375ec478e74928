"""How positions turn queries and keys: the rotary settings of a configuration, checked."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.json_file import AGAIN, Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings; names as in transformers. What a kind has no use for keeps its default."""

    kind: str  # one of KINDS
    theta: float
    factor: float = 1.0
    original_positions: int = 0  # positions that the model was trained with
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def read_rope(fields: Fields, max_positions: int, head_dim: int) -> RopeConfig:
    """The settings of either schema; raises ModelError for kinds that are not built."""
    if fields.has("rope_parameters"):
        rope = fields.within("rope_parameters")
        theta = rope if rope.has("rope_theta") else fields
    else:
        rope = fields.within("rope_scaling")
        theta = fields if fields.has("rope_theta") else rope
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.refuse("rope_parameters", "differs by layer type", "serve another model")
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(name, "default")
    if kind not in KINDS:
        raise rope.refuse(name, f"{kind!r:.40} is not built", f"built are {', '.join(KINDS)}")
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise holder.refuse(
                "partial_rotary_factor", "below 1 is not built", "serve another model"
            )
    base = theta.number("rope_theta", 2.0, 1e12, 10000.0)
    if kind == "default":
        return RopeConfig("default", base, original_positions=max_positions)
    number = rope.number
    # Dynamic scaling counts from max_position_embeddings, whatever else is written there.
    trained = max_positions if kind in ("dynamic", "linear") else rope.integer(
        "original_max_position_embeddings", 1, 1 << 27, max_positions
    )  # fmt: skip
    config = RopeConfig(
        kind=kind,
        theta=base,
        factor=number("factor", 1.0, MAX_FACTOR),
        original_positions=trained,
        low_freq_factor=number("low_freq_factor", 1e-3, MAX_FACTOR, 1.0),
        high_freq_factor=number("high_freq_factor", 1e-3, MAX_FACTOR, 4.0),
        beta_fast=number("beta_fast", 1e-3, MAX_FACTOR, 32.0),
        beta_slow=number("beta_slow", 1e-3, MAX_FACTOR, 1.0),
        attention_factor=(
            number("attention_factor", 1e-3, MAX_FACTOR) if rope.has("attention_factor") else None
        ),
        mscale=number("mscale", 0.0, MAX_FACTOR, 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0, MAX_FACTOR, 0.0),
        truncate=rope.flag("truncate", True),
    )
    if kind == "llama3" and config.high_freq_factor <= config.low_freq_factor:
        raise rope.refuse("high_freq_factor", "must be above low_freq_factor", AGAIN)
    if kind == "dynamic" and head_dim < 4:
        raise rope.refuse("rope_type", f"dynamic needs a head_dim above 2, not {head_dim}", AGAIN)
    return config
