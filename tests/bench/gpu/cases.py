"""The measured cases: shapes, the bytes and FLOPs that they need, and the bounds that they must
meet.

This module needs no GPU, so that the cases can be read and tested without one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from kvkernels.ops.relayout import PoolLayout

L2_BYTES = 60 << 20  # that of an H100; on a GPU, the device's own is used
TIMES_L2, LEAST_POOLS = 10, 4
QUANTIZED = ("int8", "float8_e4m3fn")
Beside = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Bar:
    """A bound on a figure of a case."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_most is None else '<='} {self.wanted:g}"

    @property
    def wanted(self) -> float:
        return self.at_most if self.at_most is not None else self.at_least or 0.0

    def met(self, figures: dict[str, float]) -> bool | None:
        """Return whether the bound is met, or None if the figure was not measured."""
        found = figures.get(self.figure)
        if found is None:
            return None
        return found <= self.wanted if self.at_most is not None else found >= self.wanted


@dataclass(frozen=True)
class Attention:
    """Attention of requests of one length over pages; the first `prefix` tokens of all are on the
    same pages.
    """

    requests: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    prefix: int = 0
    new: int = 1  # query tokens of each request, its last ones
    stored: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's K and V in one layer, scales included."""
        if self.stored == "bfloat16":
            return self.kv_heads * 2 * self.dim * 2
        return self.kv_heads * 2 * (self.dim + 4)

    @property
    def query_bytes(self) -> int:
        """The bytes of queries read and outputs written."""
        return 2 * self.requests * self.new * self.heads * self.dim * 2

    @property
    def plain_bytes(self) -> int:
        """The bytes that move if each request reads its own whole context."""
        return self.requests * self.context * self.token_bytes + self.query_bytes

    @property
    def shared_bytes(self) -> int:
        """The bytes that move if the shared prefix is read once for all requests."""
        own = self.requests * (self.context - self.prefix)
        return (self.prefix + own) * self.token_bytes + self.query_bytes

    def ideal_us(self, stream: float, matmul: float) -> float:
        """Return the ideal microseconds of a decode that reads the prefix once, multiplies it
        meanwhile at full speed, and then reads each request's own context. `stream` is in bytes/s,
        `matmul` in FLOP/s.
        """
        prefix_bytes = self.prefix * self.token_bytes
        products = 4 * self.requests * self.prefix * self.heads * self.dim
        prefix_s = max(prefix_bytes / stream, products / matmul)
        return 1e6 * (prefix_s + (self.shared_bytes - prefix_bytes) / stream)

    @property
    def flops(self) -> int:
        """The FLOPs of both matrix products over the keys that each causal query sees."""
        seen = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.requests * seen * self.heads * self.dim

    @property
    def pages(self) -> int:
        """The number of physical pages, with the prefix's pages counted once."""
        own = ceil(self.context / self.page) - self.prefix // self.page
        return self.prefix // self.page + self.requests * own


@dataclass(frozen=True)
class Linear:
    """A product of [rows, inputs] with INT8 weights."""

    rows: int
    channels: int
    inputs: int


@dataclass(frozen=True)
class Blocks:
    """A copy of a pool's blocks: gathered into one layout, or from shards of `source_heads` of 8
    heads and other page sizes.
    """

    blocks: int
    heads: int = 8
    layers: int = 32
    page: int = 16
    target_page: int = 16
    target_heads: int = 8
    row_bytes: int = 256

    @property
    def copied_bytes(self) -> int:
        """The bytes of all heads that source and target have in common."""
        heads = min(self.heads, self.target_heads)
        return self.blocks * heads * self.layers * 2 * self.page * self.row_bytes

    def layout(self, heads: int, page: int, blocks: int) -> PoolLayout:
        """Return the layout of a pool with these layers."""
        return PoolLayout(range(self.layers), range(heads), blocks, page, self.row_bytes)


@dataclass(frozen=True)
class Case:
    """One line of the table. `bytes` is what must be read and written, `flops` what must be
    computed.

    `of_ceiling` is a share of the measured ceiling that `ceiling` names: stream (a read), copy or
    matmul. `beside` names other cases; the time of each over this one's is the figure times_NAME.
    """

    name: str
    kernel: str  # decode, shared, prefill (what the device takes), prefill_mma..., w8a16, copy
    shape: Attention | Linear | Blocks
    bytes: int
    flops: int
    ceiling: str
    pool_bytes: int  # bytes of one of the inputs used in turn
    bars: tuple[Bar, ...] = ()
    beside: Beside = ()

    def pools(self, l2_bytes: int = L2_BYTES) -> int:
        """Return how many inputs are used in turn, so that none is in L2 when its turn comes."""
        return max(LEAST_POOLS, TIMES_L2 * l2_bytes // self.pool_bytes + 1)


def attention(name: str, kernel: str, shape: Attention, *bars: Bar, **more: Beside) -> Case:
    is_prefill = kernel.startswith("prefill")
    read = shape.shared_bytes if kernel == "shared" else shape.plain_bytes
    ceiling = "matmul" if is_prefill else "copy"
    pool = shape.pages * shape.page * shape.token_bytes
    return Case(name, kernel, shape, read, shape.flops, ceiling, pool, bars, **more)


def decode_cases() -> list[Case]:
    """Return the decode cases; the bound of 8 us is for a step of one request, which latency
    limits.
    """
    big, name = Attention(requests=64, context=2042), "decode, 64 x 2k, G 4"
    fast, peer = Bar("of_ceiling", 0.85), Bar("times_flashinfer", 1.0)
    return [
        attention(name, "decode", big, fast, peer),
        attention("decode, 64 x 2k, G 8", "decode", replace(big, heads=64), fast, peer),
        attention("decode, 1 x 32k", "decode", Attention(1, 32_763), Bar("of_ceiling", 0.70)),
        attention("decode, 1 x 1k", "decode", Attention(1, 1_019), Bar("us", at_most=8.0)),
        *(
            attention(
                *(f"decode, 64 x 2k, {stored}", "decode", replace(big, stored=stored)),
                Bar("times_bf16", 1.6),
                beside=(("bf16", name),),
            )
            for stored in QUANTIZED
        ),
    ]


def shared_cases() -> list[Case]:
    """Return the shared-prefix cases, each followed by the same batch with a plan that shares
    nothing.

    Bounds are shares of the ideal time for these bytes and products on this device, without regard
    to what its L2 holds.
    """
    cases = []
    shapes = [(2_048, 256, 32), (4_096, 256, 64), (4_096, 512, 128), (16_384, 512, 64)]
    for prefix, own, batch in shapes:
        for stored in ("bfloat16", *QUANTIZED):
            shape = Attention(batch, prefix + own, prefix=prefix, stored=stored)
            name = f"shared prefix {prefix}, own {own}, batch {batch}"
            beside = (("plain", f"{name}, plain"),)
            bars = Bar("of_ideal", 0.6), Bar("times_plain", 1.0), Bar("times_flashinfer", 1.3)
            if stored != "bfloat16":
                if batch != 64 or prefix != 4_096:
                    continue
                beside = (("plain", f"{name}, {stored}, plain"), ("bf16", name))
                bars = Bar("times_plain", 1.0), Bar("times_bf16", 1.3)
                name = f"{name}, {stored}"
            cases.append(attention(name, "shared", shape, *bars, beside=beside))
            cases.append(attention(f"{name}, plain", "decode", shape))
    return cases


# Shares of the device's own bf16 product, as published for the H100 SXM5 beside a product of 798
# TFLOP/s: FlashAttention-2 reaches 0.42 there, FlashAttention-3 0.75 (Shah et al. 2024).
OF_MATMUL = {"prefill_mma": 0.38, "prefill_wgmma": 0.65}


def prefill_cases() -> list[Case]:
    """Return cases of both prefill kernels, over 16-bit pages and over quantized ones."""
    peers = Bar("times_cudnn", 0.95), Bar("times_flashinfer", 0.95)
    shapes = {
        "prefill, 1 x 8k, G 4": Attention(1, 8_192, new=8_192),
        "prefill, 4 x 2k, G 8": Attention(4, 2_048, heads=64, new=2_048),
        "prefill, 2k after 14k, G 4": Attention(1, 16_384, new=2_048),
        "prefill, 64 after 8k, G 4": Attention(1, 8_256, new=64),
        "prefill, 128 after 32k, G 4": Attention(1, 32_896, new=128),
    }
    cases = []
    for name, shape in shapes.items():
        for kernel, least in OF_MATMUL.items():
            bars = (Bar("of_ceiling", least),) if shape.new >= 2_048 else ()
            bars += peers if kernel == "prefill_wgmma" else ()
            cases.append(attention(f"{name}, {kernel[8:]}", kernel, shape, *bars))
    long = "prefill, 2k after 14k"
    for stored in QUANTIZED:  # as many products, but the tiles are widened
        shape = replace(shapes[f"{long}, G 4"], stored=stored)
        for kernel in OF_MATMUL:
            way = kernel.removeprefix("prefill_")
            beside, bar = ((way, f"{long}, G 4, {way}"),), Bar(f"times_{way}", 0.8)
            name = f"{long}, {stored}, {way}"
            cases.append(attention(name, kernel, shape, bar, beside=beside))
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


def speed_cases() -> list[Case]:
    """Return all speed cases in the table's order."""
    return [*decode_cases(), *shared_cases(), *prefill_cases(), *other_cases()]


def small_cases() -> list[Case]:
    """Return each kernel's small cases, which a CPU checks in float64 within seconds; Hopper's
    kernels last.
    """
    decode = Attention(3, 1_101, heads=8, kv_heads=2)
    shared = replace(decode, requests=9, prefix=512)
    prefill = Attention(2, 333, heads=8, kv_heads=2, new=150)
    shapes: list[tuple[str, Attention | Linear | Blocks]] = [
        ("append", replace(prefill, requests=1, new=333)),
        ("append", replace(prefill, requests=1, new=333, dim=64, page=64)),
        *(("decode", shape) for shape in _varied(decode)),
        *(("shared", shape) for shape in _varied(shared)),
        ("shared", replace(shared, requests=2)),
        *(("prefill", shape) for shape in _varied(prefill) if shape.stored != "bfloat16"),
        *(("w8a16", Linear(rows, 512, 256)) for rows in (1, 16, 64)),
        ("copy", Blocks(8, layers=2)),
        ("copy", Blocks(8, layers=2, target_heads=4)),
        ("copy", Blocks(8, layers=2, target_page=64)),
        *(
            (kernel, shape)
            for kernel in OF_MATMUL
            for shape in (*_varied(prefill), replace(prefill, requests=1, new=9))
        ),
    ]
    return [Case(_named(kernel, shape), kernel, shape, 1, 0, "", 1) for kernel, shape in shapes]


def _varied(shape: Attention) -> list[Attention]:
    """Return shapes of attention, each of which differs in one of head dims, groups, pages and
    stored type.
    """
    changes: list[dict[str, Any]] = [
        *({}, {"dim": 64}, {"heads": 14}, {"page": 64}),
        *({"stored": stored} for stored in QUANTIZED),
        *({"stored": stored, "dim": 64} for stored in QUANTIZED),
    ]
    return [replace(shape, **change) for change in changes]


def _named(kernel: str, shape: Attention | Linear | Blocks) -> str:
    """Return a case's name: the kernel and the fields of the shape that differ from the
    defaults.
    """
    plain = {name: field.default for name, field in shape.__dataclass_fields__.items()}
    told = {name: value for name, value in vars(shape).items() if value != plain[name]}
    return f"{kernel}, " + " ".join(f"{name} {value}" for name, value in told.items())
