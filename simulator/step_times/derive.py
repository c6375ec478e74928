"""Derives a profile of step times from a model's shape, a GPU and a degree of parallelism.

Each constant of `engine.step_time.StepTime` is a count of FLOPs or bytes over the rate that kernels
on the GPU reach. Counts are of one GPU's part of the work; CPU time is StepTime's usual one. Work
that does not grow with a request's context (keys in a window, keys that an indexer picks) is part
of `linear_s` in prefill and of `seq_s` in decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.profiles import Profile
from engine.step_time import StepTime
from simulator.step_times.gpus import Gpu, ModelKind
from simulator.step_times.model_shape import Heads, Latent, ModelShape
from simulator.step_times.storage import BF16, Arithmetic

MEMORY_SHARE = 0.9  # of a GPU's memory that an engine takes
WORKSPACE_BYTES = 4e9  # of it, for activations, graphs and libraries
TYPICAL_CONTEXT = 8192  # tokens of a request, by which KV of layers with a window is counted
LEAST_TOKENS = 2048  # of a KV cache
MOST_GPUS = 64
BUSIEST = 1.35  # experts' work of the busiest GPU over the mean, where each has whole experts
_FITTED_WIDTH = 128  # of heads
_BF16_BYTES = 2
_STATES_ERROR = (
    "of models with layers without KV two were compared, neither fitted: median 6 and 16 %, in 9 "
    "of 10 steps below 30 %"
)
_MODELS: Mapping[ModelKind, str] = {
    "dense": "dense models",
    "experts": "models with experts",
    "latent": "models with latent attention",
}
_NORM_PASSES = 4  # over a token's vector: two read, two written


class DeploymentError(ValueError):
    """Raised for a model that cannot be run on these GPUs; the message says what would work."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The GPUs that one worker runs a model on, and how it splits experts and stores KV."""

    gpu: Gpu
    gpus: int = 1  # of tensor parallelism
    whole_experts: bool = False  # each GPU has experts of its own, not a part of each
    kv_fp8: bool = False


@dataclass(frozen=True, slots=True)
class Derived:
    """A derived profile with its memory, its assumptions and the error to expect."""

    profile: Profile
    kind: ModelKind
    weight_bytes: float  # of all GPUs together
    room_bytes: float  # for KV, of one GPU
    assumed: tuple[str, ...]
    error: str  # expected, of step times


def derived(shape: ModelShape, on: Deployment, name: str) -> Derived:
    """Return the profile of `shape` on a deployment. Raises DeploymentError if it cannot
    run there.
    """
    _check_split(shape, on)
    total = weight_bytes(shape)
    tokens = _tokens(shape, on)
    if tokens < LEAST_TOKENS:
        raise DeploymentError(_too_small(shape, on))
    assumed = (*shape.assumed, *_assumed(shape, on))
    error = _error(shape, on)
    source = f"derived from a config.json and the data sheet of {on.gpu.title}; error {error}"
    profile = Profile(
        name,
        step_time(shape, on),
        tokens,
        round(_kv_bytes(shape, on)),
        "; ".join((source, *(f"assumed: {one}" for one in assumed))),
    )
    return Derived(profile, kind_of(shape), total, _room(shape, on), assumed, error)


def kind_of(shape: ModelShape) -> ModelKind:
    """Return the kind of model by which the expected error is known."""
    if isinstance(shape.attention, Latent):
        return "latent"
    return "experts" if shape.expert_layers else "dense"


def weight_bytes(shape: ModelShape) -> float:
    """Return the bytes of all weights as they are stored."""
    tables = shape.embedding_weights * (1 if shape.tied else 2)
    return (
        BF16.bytes * tables
        + shape.stored.attention.bytes * shape.attention_weights
        + shape.stored.dense.bytes * shape.dense_weights
        + shape.stored.experts.bytes * shape.expert_weights
    )


def step_time(shape: ModelShape, on: Deployment) -> StepTime:
    """Return the step time with the derived constants."""
    shares = on.gpu.shares
    read_s = 1.0 / (on.gpus * on.gpu.bytes_s * shares.weights)  # of one byte of weights
    small_s = shares.layer_s * shape.mixing_layers
    if on.gpus > 1:
        small_s += on.gpu.all_reduce_s * _all_reduces(shape)
    return StepTime(
        linear_s=_linear_s(shape, on),
        pair_s=_pair_s(shape, on),
        weights_s=_shared_bytes(shape) * read_s + small_s,
        context_s=_growing_read_s(shape, on),
        experts_s=shape.stored.experts.bytes * shape.expert_weights * read_s,
        expert_share=shape.expert_share,
        seq_s=StepTime(0.0, 0.0, 0.0, 0.0).seq_s + _bounded_read_s(shape, on),
        softmax_p=shares.experts_p if shape.expert_layers else shares.p,
    )


def _shared_bytes(shape: ModelShape) -> float:
    """Return the bytes of the weights that every step reads."""
    return (
        BF16.bytes * shape.embedding_weights
        + shape.stored.attention.bytes * shape.attention_weights
        + shape.stored.dense.bytes * shape.dense_weights
    )


def _linear_s(shape: ModelShape, on: Deployment) -> float:
    """Return the seconds that one token takes besides attention to its whole context: matrix
    products, small kernels, all-reduces, bounded attention.
    """
    gpu, stored = on.gpu, shape.stored
    active = shape.expert_weights * shape.expert_share
    busiest = BUSIEST if on.whole_experts and on.gpus > 1 else 1.0
    products_s = (
        shape.attention_weights / gpu.gemm_flops_s(stored.attention.arithmetic)
        + shape.dense_weights / gpu.gemm_flops_s(stored.dense.arithmetic)
        + busiest * active / gpu.expert_flops_s(stored.experts.arithmetic)
    )
    total = 2 * products_s / on.gpus + _bounded_pairs_s(shape, on) + _small_kernels_s(shape, on)
    if on.gpus > 1:
        vector = shape.hidden * _BF16_BYTES
        total += _all_reduces(shape) * vector / gpu.all_reduce_bytes_s(on.gpus)
    return total


def _small_kernels_s(shape: ModelShape, on: Deployment) -> float:
    """Return the seconds of norms, which every GPU computes whole, and of activations. Both are
    limited by the bytes that they move.
    """
    norms = _NORM_PASSES * shape.hidden * (shape.mixing_layers + shape.mlp_layers)
    widths = shape.dense_layers * shape.dense_width + shape.expert_layers * shape.shared_width
    moved = norms + shape.mlp_matrices * widths / on.gpus
    return _BF16_BYTES * moved / (on.gpu.bytes_s * on.gpu.shares.weights)


def _all_reduces(shape: ModelShape) -> int:
    """Return the number of all-reduces in a step: one after each part of a layer.

    Models with latent attention and experts have two more in a layer of experts, as the tables
    count them: vectors are sent to experts and brought back.
    """
    more = 2 * shape.expert_layers if isinstance(shape.attention, Latent) else 0
    return shape.mixing_layers + shape.mlp_layers + more


def _pair_s(shape: ModelShape, on: Deployment) -> float:
    """Return the seconds of attention between one query and one key, in the layers that see all
    keys.
    """
    attention = shape.attention
    if isinstance(attention, Latent) and attention.index_keys:
        # The indexer is whole on each GPU.
        flops = 2 * attention.index_heads * attention.index_width
        return shape.full_layers * flops / on.gpu.gemm_flops_s("fp8")
    return shape.full_layers * _pair_of(attention, on)


def _bounded_pairs_s(shape: ModelShape, on: Deployment) -> float:
    """Return the seconds of attention between one query and the keys in a window, or the keys that
    an indexer picked.
    """
    total = shape.window_layers * shape.window * _pair_of(shape.window_attention, on)
    if isinstance(shape.attention, Latent):
        total += shape.full_layers * shape.attention.index_keys * _pair_of(shape.attention, on)
    return total


def _pair_of(attention: Heads | Latent, on: Deployment) -> float:
    """Return the seconds of attention between one query and one key in one layer of a prefill."""
    shares = on.gpu.shares
    if isinstance(attention, Latent):
        share = shares.latent_attention
    else:
        share = shares.attention if attention.key_width > 64 else shares.narrow_attention
    return attention.pair_flops / (on.gpus * on.gpu.flops["bf16"] * share)


def _kv_parts(attention: Heads | Latent, on: Deployment) -> int:
    """Return the number of parts into which the GPUs split a token's KV; with latent attention,
    each GPU has the whole vector.
    """
    return min(on.gpus, attention.kv)


def _read_s(values: float, attention: Heads | Latent, on: Deployment) -> float:
    """Return the seconds in which decodes read this many numbers of KV, with all GPUs together."""
    shares = on.gpu.shares
    if isinstance(attention, Latent):
        share = shares.kv_latent
    else:
        share = shares.kv_fp8 if on.kv_fp8 else shares.kv
    width = 1 if on.kv_fp8 else _BF16_BYTES
    return values * width / (_kv_parts(attention, on) * on.gpu.bytes_s * share)


def _growing_read_s(shape: ModelShape, on: Deployment) -> float:
    """Return the seconds by which a decode step grows with one more token of context."""
    attention = shape.attention
    values = attention.kv_values
    if isinstance(attention, Latent) and attention.index_keys:
        values = attention.index_width  # the indexer's; attention reads the keys that it picked
    return _read_s(shape.full_layers * values, attention, on)


def _bounded_read_s(shape: ModelShape, on: Deployment) -> float:
    """Return the seconds in which a decode reads the keys in windows, or keys that an indexer
    picked.
    """
    windowed = shape.window_layers * shape.window * shape.window_attention.kv_values
    total = _read_s(windowed, shape.window_attention, on)
    if isinstance(shape.attention, Latent):
        picked = shape.full_layers * shape.attention.index_keys * shape.attention.latent_values
        total += _read_s(picked, shape.attention, on)
    return total


def _kv_bytes(shape: ModelShape, on: Deployment) -> float:
    """Return the KV bytes of one token in a request of `TYPICAL_CONTEXT` tokens, over all GPUs,
    each part once.
    """
    seen = min(1.0, shape.window / TYPICAL_CONTEXT)
    values = shape.full_layers * shape.attention.kv_values
    windowed = shape.window_layers * shape.window_attention.kv_values * seen
    return (values + windowed) * (1 if on.kv_fp8 else _BF16_BYTES)


def _room(shape: ModelShape, on: Deployment) -> float:
    """Return the bytes of memory that remain for KV on one GPU; below 0 if the weights alone are
    too large.
    """
    return MEMORY_SHARE * on.gpu.memory_bytes - weight_bytes(shape) / on.gpus - WORKSPACE_BYTES


def _tokens(shape: ModelShape, on: Deployment) -> int:
    """Return the number of tokens whose KV fits; KV that several GPUs hold counts once."""
    per_gpu = max(1.0, _kv_bytes(shape, on) / _kv_parts(shape.attention, on))
    return max(0, int(_room(shape, on) / per_gpu))


def _degrees(shape: ModelShape, on: Deployment) -> list[int]:
    """Return the numbers of GPUs over which the heads, and whole experts, can be split."""
    return [
        gpus
        for gpus in range(1, MOST_GPUS + 1)
        if shape.attention.query % gpus == 0 and (not on.whole_experts or shape.experts % gpus == 0)
    ]


def _check_split(shape: ModelShape, on: Deployment) -> None:
    if on.whole_experts and not shape.experts:
        raise DeploymentError("the model has no experts that GPUs could have for themselves")
    degrees = _degrees(shape, on)
    if on.gpus not in degrees:
        experts = f" and {shape.experts} experts" if on.whole_experts else ""
        raise DeploymentError(
            f"{shape.attention.query} attention heads{experts} cannot be split evenly over "
            f"{on.gpus} GPUs; valid: {', '.join(map(str, degrees))}"
        )


def _too_small(shape: ModelShape, on: Deployment) -> str:
    need = LEAST_TOKENS * _kv_bytes(shape, on) / _kv_parts(shape.attention, on)
    lacking = (need - _room(shape, on)) / 1e9
    fits = [n for n in _degrees(shape, on) if _tokens(shape, replace(on, gpus=n)) >= LEAST_TOKENS]
    fits = [n for n in fits if n > on.gpus]
    advice = f"{fits[0]} GPUs would do" if fits else f"no number up to {MOST_GPUS} would do"
    return (
        f"{weight_bytes(shape) / 1e9:.1f} GB of weights do not fit on {on.gpus} x "
        f"{on.gpu.title}: each lacks {lacking:.1f} GB, of which {LEAST_TOKENS} tokens of KV take "
        f"{need / 1e9:.1f}; {advice}"
    )


def _error(shape: ModelShape, on: Deployment) -> str:
    """Return a sentence on the error to expect of the step times."""
    kind = kind_of(shape)
    if isinstance(shape.attention, Latent) and shape.attention.index_keys:
        return "sparse attention differs by engine: measured steps take 1.5 to 3 times as long"
    if shape.state_layers:
        return _STATES_ERROR
    found = on.gpu.errors.get(kind)
    if found is None:
        return f"nobody measured {_MODELS[kind]} on {on.gpu.title}: expect 30 % and more"
    return (
        f"against measured kernels, as far as they are tabled for {_MODELS[kind]}: median "
        f"{found[0]} %, in 9 of 10 steps below {found[1]} %"
    )


def _assumed(shape: ModelShape, on: Deployment) -> list[str]:
    """Return the assumptions about this deployment, each as a text."""
    found = [
        f"KV may have {MEMORY_SHARE:.0%} of memory, less weights and {WORKSPACE_BYTES / 1e9:.0f} GB"
    ]
    if shape.window_layers:
        found.append(
            f"KV of layers with a window is counted for requests of {TYPICAL_CONTEXT} tokens"
        )
    if on.whole_experts and on.gpus > 1:
        found.append(f"the busiest GPU's experts compute {BUSIEST} times the mean")
    if on.gpus > max(on.gpu.all_reduce):
        found.append(f"all-reduces are as fast as those of {max(on.gpu.all_reduce)} GPUs")
    if isinstance(shape.attention, Heads) and shape.attention.key_width > _FITTED_WIDTH:
        found.append(
            f"attention with heads of {shape.attention.key_width} reaches what heads of "
            f"{_FITTED_WIDTH} reach"
        )
    lacks = _lacking(shape, on)
    if lacks:
        found.append(f"no {on.gpu.name} multiplies {', '.join(lacks)}: products are in BF16")
    names = sorted(_used_shares(shape, on) & on.gpu.unmeasured)
    if names:
        said = ", ".join(names).replace("_", " ")
        found.append(f"not measured on {on.gpu.name}, taken from others: {said}")
    return found


def _arithmetics(shape: ModelShape) -> list[tuple[str, Arithmetic]]:
    stored = shape.stored
    found = [("gemm", stored.attention.arithmetic)]
    if shape.dense_weights:
        found.append(("gemm", stored.dense.arithmetic))
    if shape.expert_layers:
        found.append(("experts", stored.experts.arithmetic))
    return found


def _lacking(shape: ModelShape, on: Deployment) -> list[str]:
    """Return the number formats of the model's weights that the GPU cannot multiply."""
    return sorted({one for _, one in _arithmetics(shape) if on.gpu.used(one) != one})


def _used_shares(shape: ModelShape, on: Deployment) -> set[str]:
    """Return the names of the GPU's shares that this deployment's constants depend on, besides
    those that all deployments use.
    """
    found = {f"{part} {on.gpu.used(one)}" for part, one in _arithmetics(shape)}
    if isinstance(shape.attention, Latent):
        return found | {"kv_latent", "latent_attention"}
    narrow = shape.attention.key_width <= 64
    found |= {"narrow_attention"} if narrow else {"attention"}
    return found | {"kv_fp8" if on.kv_fp8 else "kv"}
