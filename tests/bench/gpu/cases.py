"""What is measured: shapes, the bytes and FLOPs that they need, and the bars they are held to.

What a GPU would be asked to do can be read and tested where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kvkernels.ops.relayout import PoolLayout

L2_BYTES = 60 << 20  # an H200's; a device's own is asked where there is one
TIMES_L2, LEAST_POOLS = 10, 4
QUANTIZED = ("int8", "float8_e4m3fn")


@dataclass(frozen=True)
class Bar:
    """A figure and what it is to reach."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_most is None else '<='} {self.wanted:g}"

    @property
    def wanted(self) -> float:
        return self.at_most if self.at_most is not None else self.at_least or 0.0

    def met(self, figures: dict[str, float]) -> bool | None:
        """None where the figure was not measured."""
        found = figures.get(self.figure)
        if found is None:
            return None
        return found <= self.wanted if self.at_most is not None else found >= self.wanted


@dataclass(frozen=True)
class Attention:
    """Requests of one length over pages; `prefix` tokens of each are the same pages."""

    requests: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    prefix: int = 0
    new: int = 1  # query tokens a request: its last ones
    stored: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer, scales included."""
        if self.stored == "bfloat16":
            return self.kv_heads * 2 * self.dim * 2
        return self.kv_heads * 2 * (self.dim + 4)

    @property
    def query_bytes(self) -> int:
        """Queries read and outputs written."""
        return 2 * self.requests * self.new * self.heads * self.dim * 2

    @property
    def plain_bytes(self) -> int:
        """Each request reads its own context."""
        return self.requests * self.context * self.token_bytes + self.query_bytes

    @property
    def shared_bytes(self) -> int:
        """The prefix is read once."""
        own = self.requests * (self.context - self.prefix)
        return (self.prefix + own) * self.token_bytes + self.query_bytes

    def ideal_gain(self, stream: float, matmul: float) -> float:
        """How much faster decode can be that reads the prefix once, then at matmul's speed.

        `stream` in bytes/s, `matmul` in FLOP/s.
        """
        prefix_bytes = self.prefix * self.token_bytes
        products = 4 * self.requests * self.prefix * self.heads * self.dim
        prefix_s = max(prefix_bytes / stream, products / matmul)
        shared_s = prefix_s + (self.shared_bytes - prefix_bytes) / stream
        return self.plain_bytes / stream / shared_s

    @property
    def flops(self) -> int:
        """Two products over what each causal query sees."""
        seen = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.requests * seen * self.heads * self.dim

    @property
    def pages(self) -> int:
        """Physical pages, the prefix's counted once."""
        own = ceil(self.context / self.page) - self.prefix // self.page
        return self.prefix // self.page + self.requests * own


@dataclass(frozen=True)
class Linear:
    """rows x inputs times INT8 weights."""

    rows: int
    channels: int
    inputs: int


@dataclass(frozen=True)
class Blocks:
    """Copies of a pool's blocks: gathered, or from `source_heads` of 8 a shard and other pages."""

    blocks: int
    heads: int = 8
    layers: int = 32
    page: int = 16
    target_page: int = 16
    target_heads: int = 8
    row_bytes: int = 256

    @property
    def copied_bytes(self) -> int:
        """Of all heads that both have."""
        heads = min(self.heads, self.target_heads)
        return self.blocks * heads * self.layers * 2 * self.page * self.row_bytes

    def layout(self, heads: int, page: int, blocks: int) -> PoolLayout:
        """A pool of these layers."""
        return PoolLayout(range(self.layers), range(heads), blocks, page, self.row_bytes)


@dataclass(frozen=True)
class Case:
    """One line of the table. `bytes` is what has to be read and written, `flops` computed."""

    name: str
    kernel: str
    shape: Attention | Linear | Blocks
    bytes: int
    flops: int
    ceiling: str  # stream, copy or matmul: which of the measured ones `of_ceiling` is a share of
    pool_bytes: int  # what one of the rotated inputs holds
    bars: tuple[Bar, ...]

    def pools(self, l2_bytes: int = L2_BYTES) -> int:
        """How many inputs are used in turn, so that none is in L2 when its turn comes."""
        return max(LEAST_POOLS, TIMES_L2 * l2_bytes // self.pool_bytes + 1)


def decode(name: str, shape: Attention, *bars: Bar, kernel: str = "decode") -> Case:
    read = shape.shared_bytes if kernel == "shared" else shape.plain_bytes
    pool = shape.pages * shape.page * shape.token_bytes
    return Case(name, kernel, shape, read, shape.flops, "stream", pool, bars)


def decode_cases() -> list[Case]:
    big = Attention(requests=64, context=2042)
    stream, peer = Bar("of_ceiling", 0.85), Bar("times_flashinfer", 1.0)
    quantized = Bar("times_bf16", 1.6)
    return [
        decode("decode, 64 x 2k, G 4", big, stream, peer),
        decode("decode, 64 x 2k, G 8", replace(big, heads=64), stream, peer),
        decode("decode, 1 x 32k", Attention(1, 32_763), Bar("of_ceiling", 0.70)),
        decode("decode, 1 x 1k", Attention(1, 1_019), Bar("us", at_most=8.0)),
        *(
            decode(f"decode, 64 x 2k, {stored}", replace(big, stored=stored), quantized)
            for stored in QUANTIZED
        ),
    ]


def shared_cases() -> list[Case]:
    """The shapes of which the ideal gain is 7.2, 12.6, 7.7 and 19.4."""
    bars = Bar("of_ideal_gain", 0.6), Bar("times_flashinfer", 1.3), Bar("times_plain", 1.0)
    cases = []
    for prefix, own, batch in (
        (2_048, 256, 32),
        (4_096, 256, 64),
        (4_096, 512, 128),
        (16_384, 512, 64),
    ):
        shape = Attention(batch, prefix + own, prefix=prefix)
        name = f"shared prefix {prefix}, own {own}, batch {batch}"
        cases.append(decode(name, shape, *bars, kernel="shared"))
    # Against plain decode of the same bytes; bf16 beside it.
    quantized = Bar("times_plain", 1.0), Bar("times_bf16", 1.3)
    for stored in QUANTIZED:
        shape = Attention(64, 4_096 + 256, prefix=4_096, stored=stored)
        name = f"shared prefix 4096, own 256, batch 64, {stored}"
        cases.append(decode(name, shape, *quantized, kernel="shared"))
    return cases


WIDENED = (Bar("times_bf16", 0.8),)  # products are as many, and tiles are widened


def prefill_cases() -> list[Case]:
    cases, long = [], Attention(1, 16_384, new=2_048)
    fast = Bar("tflops", 350.0), Bar("tflops_wgmma", 550.0)
    for name, shape, bars in (
        ("prefill, 1 x 8k, G 4", Attention(1, 8_192, new=8_192), fast),
        ("prefill, 4 x 2k, G 8", Attention(4, 2_048, heads=64, new=2_048), fast),
        ("prefill, 2k after 14k, G 4", long, fast),
        *(
            (f"prefill, 2k after 14k, {stored}", replace(long, stored=stored), WIDENED)
            for stored in QUANTIZED
        ),
    ):
        moved = shape.requests * shape.context * shape.token_bytes + shape.query_bytes
        pool = shape.pages * shape.page * shape.token_bytes
        cases.append(Case(name, "prefill", shape, moved, shape.flops, "matmul", pool, bars))
    return cases


def other_cases() -> list[Case]:
    tokens, bars = 8_192, (Bar("of_ceiling", 0.75),)
    new = Attention(1, tokens, new=tokens)
    row = 2 * (new.heads + 2 * new.kv_heads) * new.dim * 2
    cases = [Case("append, 8k tokens", "append", new, tokens * row, 0, "copy", tokens * row, bars)]
    for channels, rows in ((4_096, 1), (4_096, 16), (14_336, 1), (14_336, 16), (14_336, 64)):
        linear = Linear(rows, channels, 4_096)
        weights = channels * 4_096
        moved = weights + 2 * rows * (channels + 4_096) + 4 * channels
        name, held = f"w8a16, {rows} x 4096 x {channels}", bars if rows <= 16 else ()
        flops = 2 * rows * weights
        cases.append(Case(name, "w8a16", linear, moved, flops, "stream", weights, held))
    for name, blocks in (
        ("gather of 256 blocks", Blocks(256)),
        ("half of the heads", Blocks(256, target_heads=4)),
        ("page 16 to 64", Blocks(256, target_page=64)),
    ):
        copied = blocks.copied_bytes
        held = (Bar("of_ceiling", 0.80),)
        cases.append(Case(f"copy, {name}", "copy", blocks, 2 * copied, 0, "copy", copied, held))
    return cases


def all_cases() -> list[Case]:
    """In the order of the table."""
    return [*decode_cases(), *shared_cases(), *prefill_cases(), *other_cases()]
