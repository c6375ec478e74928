"""The shape of a transformer: layers by kind, heads, experts, and the weights that follow."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.step_times.storage import Stored


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention whose KV heads have keys and values of their own."""

    query: int
    kv: int
    key_width: int
    value_width: int
    gated: bool = False  # a gate as wide as the queries

    def weights(self, hidden: int) -> int:
        """Return the number of weights of one layer's projections."""
        queries = self.query * self.key_width * (2 if self.gated else 1)
        kv = self.kv * (self.key_width + self.value_width)
        return hidden * (queries + kv + self.query * self.value_width)

    @property
    def kv_values(self) -> int:
        """The number of values that one token stores in the KV cache of one layer."""
        return self.kv * (self.key_width + self.value_width)

    @property
    def pair_flops(self) -> int:
        """The FLOPs of attention between one query and one key, in prefill and decode alike."""
        return 2 * self.query * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2), which computes keys and values from one short
    vector.
    """

    query: int
    query_rank: int  # 0: queries are projected at once
    kv_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    index_heads: int = 0  # of an indexer that picks the keys (sparse attention)
    index_width: int = 0
    index_keys: int = 0  # that it picks at most

    def weights(self, hidden: int) -> int:
        """Return the number of weights of one layer's projections and of its indexer."""
        queries = self.query * (self.nope_width + self.rope_width)
        first = hidden if self.query_rank == 0 else self.query_rank
        total = first * queries + hidden * self.query_rank
        total += hidden * (self.kv_rank + self.rope_width)
        total += self.kv_rank * self.query * (self.nope_width + self.value_width)
        total += self.query * self.value_width * hidden
        indexer = first * self.index_heads * self.index_width
        indexer += hidden * (self.index_width + self.index_heads)
        return total + (indexer if self.index_heads else 0)

    @property
    def kv(self) -> int:
        """The number of heads over which KV can be split."""
        return 1

    @property
    def latent_values(self) -> int:
        """The number of values in one token's latent vector in one layer."""
        return self.kv_rank + self.rope_width

    @property
    def kv_values(self) -> int:
        """The number of values that one token stores in the KV cache of one layer, with those of
        the indexer.
        """
        return self.latent_values + self.index_width

    @property
    def pair_flops(self) -> int:
        """The FLOPs of attention between one query and one key in prefill, where keys and values
        are computed first.
        """
        return 2 * self.query * (self.nope_width + self.rope_width + self.value_width)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that determine the times of its steps.

    Layers are counted by kind. A layer of `state_layers` (linear attention, Mamba) keeps a state of
    fixed size and no KV.
    """

    architecture: str
    hidden: int
    attention: Heads | Latent
    window_attention: Heads | Latent  # of the layers with a window
    full_layers: int
    window_layers: int
    window: int  # keys that a query of such a layer sees at most; 0 without such layers
    state_layers: int
    state_weights: int  # of one such layer
    dense_layers: int
    dense_width: int
    expert_layers: int
    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int  # of all shared experts of a layer together
    mlp_matrices: int  # 3 with a gate, 2 without
    vocabulary: int
    tied: bool
    stored: Stored
    kv_fp8: bool
    assumed: tuple[str, ...]

    @property
    def attention_layers(self) -> int:
        """Number of layers with a KV cache."""
        return self.full_layers + self.window_layers

    @property
    def mixing_layers(self) -> int:
        """Number of layers in which tokens see each other."""
        return self.attention_layers + self.state_layers

    @property
    def mlp_layers(self) -> int:
        """Number of feed-forward layers of both kinds."""
        return self.dense_layers + self.expert_layers

    @property
    def attention_weights(self) -> int:
        """Number of weights in all attention and state layers."""
        return (
            self.full_layers * self.attention.weights(self.hidden)
            + self.window_layers * self.window_attention.weights(self.hidden)
            + self.state_layers * self.state_weights
        )

    @property
    def dense_weights(self) -> int:
        """Number of weights in all dense layers, shared experts and routers."""
        shared = self.expert_layers * self.mlp_matrices * self.hidden * self.shared_width
        routers = self.expert_layers * self.hidden * self.experts
        dense = self.dense_layers * self.mlp_matrices * self.hidden * self.dense_width
        return dense + shared + routers

    @property
    def expert_weights(self) -> int:
        """Number of weights in all routed experts."""
        one = self.mlp_matrices * self.hidden * self.expert_width
        return self.expert_layers * self.experts * one

    @property
    def embedding_weights(self) -> int:
        """Number of weights in the embeddings; the output projection has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all weights except norms and biases."""
        tables = self.embedding_weights * (1 if self.tied else 2)
        return tables + self.attention_weights + self.dense_weights + self.expert_weights

    @property
    def expert_share(self) -> float:
        """Share of the routed experts that one token visits."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def active_parameters(self) -> float:
        """Number of weights that are used for one token."""
        return self.parameters - self.expert_weights * (1.0 - self.expert_share)
