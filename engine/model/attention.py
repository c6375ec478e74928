"""Paged attention in plain torch: used on CPUs, and as the reference of the kernels' tests.

`attend` makes scores in tiles of KEYS keys from the first token on, whatever the block size, and
adds the tiles' sums in order. `attend_fused` is for GPUs without the kernels: it gathers pages, and
torch's fused attention does the rest in the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.model.batch import FlatBatch, placed
from engine.model.kv_cache import LayerKv, dequantize, quantize
from engine.model.layers import WIDTHS, HeadNorms, attention_widths, cuts, is_exact, rms_norm
from engine.model.rope import Rotary, rotate

BUILT_FOR_GPUS = torch.version.cuda is not None
if BUILT_FOR_GPUS:
    # It brings torch's compiler: two seconds of each start, for a mask that a CPU gets written out.
    from torch.nn.attention.bias import causal_lower_right

KEYS = 64  # keys of a tile
MAX_GATHERED = 1 << 24  # elements of K that are gathered at once


def write(k: torch.Tensor, v: torch.Tensor, layer: LayerKv, slots: torch.Tensor) -> None:
    """Write `k` and `v` [T, kv heads, head_dim] into these slots of the cache; a slot of -1 means
    the scratch block.
    """
    block_size = layer.k.shape[1]
    # Floor division takes -1 to block -1, the last.
    blocks, offsets = slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size)
    for x, kept, scales in ((k, layer.k, layer.k_scales), (v, layer.v, layer.v_scales)):
        if scales is None:
            kept[blocks, offsets] = x.to(kept.dtype)
        else:
            values, scales[blocks, offsets] = quantize(x, kept.dtype)
            # As bytes: not every device can index FP8.
            kept.view(torch.uint8)[blocks, offsets] = values.view(torch.uint8)


def attend(q: torch.Tensor, layer: LayerKv, batch: FlatBatch) -> torch.Tensor:
    """Return causal attention of `q` [T, heads, head_dim] over each request's own tokens, in the
    same shape.

    The batch's K and V must have been written before. Rows of padding have no meaning: they are
    zeros after the last request's rows, and in a fixed batch they are the result of the first token
    of block 0.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = layer.k.shape[2]
    group = heads // kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    widths = attention_widths(head_dim, KEYS, wide) if is_exact(q) else WIDTHS
    scaled = (q.to(wide) * head_dim**-0.5).view(-1, kv_heads, group, head_dim)
    if batch.is_fixed:
        return _fixed(scaled, layer, batch, widths).view(-1, heads, head_dim).to(q.dtype)
    out = torch.zeros_like(scaled)
    singles = [row for row, (_, tokens, _) in enumerate(batch.spans) if tokens == 1]
    for rows in _bounded(singles, batch, kv_heads * head_dim):
        at = placed([batch.spans[row][0] for row in rows], torch.int64, q.device)
        stops = placed([batch.spans[row][2] for row in rows], torch.int64, q.device)
        longest = max(batch.spans[row][2] for row in rows)
        table = batch.page_table[placed(rows, torch.int64, q.device)]
        k, v = _gather(layer, table, stops, longest, wide)
        seen = stops[:, None].expand(-1, group)
        out[at] = _tiles(scaled[at], k, v, seen, widths)
    for row, (first, tokens, stop) in enumerate(batch.spans):
        if tokens == 1:
            continue
        stops = placed([stop], torch.int64, q.device)
        k, v = _gather(layer, batch.page_table[row : row + 1], stops, stop, wide)
        done = first
        # Rows of a tile: tokens times the query heads of one KV head.
        for width in cuts(tokens, tuple(max(1, width // group) for width in widths)):
            count = min(width, first + tokens - done)
            seen = torch.arange(count, device=q.device) + (stop - tokens + done - first + 1)
            rows_of = scaled[done : done + count].transpose(0, 1).reshape(
                1, kv_heads, count * group, head_dim
            )  # fmt: skip
            keys = -(-int(stop - tokens + done - first + count) // KEYS) * KEYS
            made = _tiles(
                rows_of, k[:, :, :keys], v[:, :, :keys],
                seen.repeat_interleave(group)[None], widths,
            )  # fmt: skip
            out[done : done + count] = made.view(kv_heads, count, group, head_dim).transpose(0, 1)
            done += count
    return out.view(-1, heads, head_dim).to(q.dtype)


def attend_fused(q: torch.Tensor, layer: LayerKv, batch: FlatBatch) -> torch.Tensor:
    """Return the same attention as `attend`, computed by torch's scaled_dot_product_attention in
    q's dtype.
    """
    if batch.is_fixed:
        kv_heads, block_size = layer.k.shape[2], layer.k.shape[1]
        keys = batch.page_table.shape[1] * block_size
        at_once = max(1, MAX_GATHERED // ((keys + KEYS) * kv_heads * q.shape[2]))
        parts = (torch.split(x, at_once) for x in (q, batch.page_table, batch.context_tokens))
        done = [
            _one_row_each(rows, layer, table, stops.long(), keys)
            for rows, table, stops in zip(*parts, strict=True)
        ]
        return torch.cat(done)
    out = torch.zeros_like(q)
    attend_part(q, layer, batch, out, range(len(batch.spans)))
    return out


def attend_part(
    q: torch.Tensor,
    layer: LayerKv,
    batch: FlatBatch,
    out: torch.Tensor,
    which: range,
) -> None:
    """Write the rows of `out` that belong to the requests `which`, as `attend_fused` computes them.
    The batch must not be a fixed one.
    """
    heads, kv_heads = q.shape[1], layer.k.shape[2]
    _singles(q, layer, batch, out, [row for row in which if batch.spans[row][1] == 1])
    for row in which:
        first, tokens, stop = batch.spans[row]
        if tokens == 1:
            continue
        stops = placed([stop], torch.int64, q.device)
        k, v = _gather(layer, batch.page_table[row : row + 1], stops, stop, q.dtype)
        is_whole = tokens == stop  # which more of torch's kernels have
        made = functional.scaled_dot_product_attention(
            q[first : first + tokens].transpose(0, 1)[None],
            *(k[:, :, :stop], v[:, :, :stop]),
            attn_mask=None if is_whole else _lower_right(tokens, stop),
            is_causal=is_whole,
            enable_gqa=heads != kv_heads,
        )
        out[first : first + tokens] = made[0].transpose(0, 1)


def _lower_right(tokens: int, stop: int) -> torch.Tensor:
    """Return a mask bool[tokens, stop] of the keys that each of the last `tokens` tokens sees: all
    keys up to the token itself.
    """
    if BUILT_FOR_GPUS:
        return causal_lower_right(tokens, stop)
    return torch.ones(tokens, stop, dtype=torch.bool).tril(stop - tokens)


def _singles(
    q: torch.Tensor,
    layer: LayerKv,
    batch: FlatBatch,
    out: torch.Tensor,
    singles: list[int],
) -> None:
    """Write the rows of `out` for the requests `singles`, which have one row each, several requests
    at a time.
    """
    for rows in _bounded(singles, batch, layer.k.shape[2] * q.shape[2]):
        at = placed([batch.spans[row][0] for row in rows], torch.int64, q.device)
        table = batch.page_table[placed(rows, torch.int64, q.device)]
        longest = max(batch.spans[row][2] for row in rows)
        stops = placed([batch.spans[row][2] for row in rows], torch.int64, q.device)
        out[at] = _one_row_each(q[at], layer, table, stops, longest)


def _one_row_each(
    q: torch.Tensor, layer: LayerKv, table: torch.Tensor, stops: torch.Tensor, longest: int
) -> torch.Tensor:
    """Return attention of `q` [R, heads, head_dim] over the first `stops` tokens of each request.
    The heads of a group are the rows of one product, so that K and V are read once for all of them.
    """
    k, v = _gather(layer, table, stops, longest, q.dtype)
    seen = torch.arange(k.shape[2], device=q.device) < stops.clamp_min(1)[:, None]
    k = k.masked_fill(~seen[:, None, :, None], 0.0)  # a masked NaN is still one
    rows = q.view(len(q), k.shape[1], -1, q.shape[2])
    made = functional.scaled_dot_product_attention(rows, k, v, attn_mask=seen[:, None, None])
    return made.reshape(q.shape)


def _bounded(rows: list[int], batch: FlatBatch, per_token: int) -> list[list[int]]:
    """Return `rows` ordered by the length of their contexts, in groups whose padded K has at most
    MAX_GATHERED elements.
    """
    groups: list[list[int]] = []
    for row in sorted(rows, key=lambda row: batch.spans[row][2]):
        padded = batch.spans[row][2] + KEYS
        if groups and (len(groups[-1]) + 1) * padded * per_token <= MAX_GATHERED:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _fixed(
    q: torch.Tensor, layer: LayerKv, batch: FlatBatch, widths: tuple[int, ...]
) -> torch.Tensor:
    """Return attention of one row of `q` [R, kv heads, group, head_dim] for each request. It reads
    lengths only on the device, so it gathers as many keys for each request as the page table has
    room for.
    """
    pages, block_size = batch.page_table.shape[1], layer.k.shape[1]
    kv_heads, group, head_dim = q.shape[1:]
    at_once = max(1, MAX_GATHERED // ((pages * block_size + KEYS) * kv_heads * head_dim))
    done = []
    for rows, table, context in zip(
        torch.split(q, at_once),
        torch.split(batch.page_table, at_once),
        torch.split(batch.context_tokens, at_once),
        strict=True,
    ):
        stops = context.long()
        k, v = _gather(layer, table, stops, pages * block_size, q.dtype)
        done.append(_tiles(rows, k, v, stops[:, None].expand(-1, group), widths))
    return torch.cat(done)


def _gather(
    layer: LayerKv, table: torch.Tensor, stops: torch.Tensor, longest: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of requests, [requests, kv heads, keys, head_dim], with keys a multiple of
    KEYS.

    `table` [requests, pages] has their pages, for at least `longest` tokens. V beyond a request's
    tokens is zero, because a weight of zero times an old NaN would be NaN.
    """
    block_size = layer.k.shape[1]
    keys = -(-longest // KEYS) * KEYS
    pages = table[:, : -(-longest // block_size)].long()
    k, v = (
        functional.pad(x.flatten(1, 2), (0, 0, 0, 0, 0, max(0, keys - x.shape[1] * block_size)))[
            :, :keys
        ]
        .to(wide)
        .transpose(1, 2)
        for x in (
            _pages(layer.k, layer.k_scales, pages, wide),
            _pages(layer.v, layer.v_scales, pages, wide),
        )
    )
    beyond = torch.arange(keys, device=k.device) >= stops[:, None]
    return k, v.masked_fill(beyond[:, None, :, None], 0.0)


def _pages(
    kept: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    """Return the blocks that `pages` names, [requests, pages, token, head, head_dim], dequantized
    if they were quantized.
    """
    if scales is None:
        return kept[pages]
    return dequantize(kept.view(torch.uint8)[pages].view(kept.dtype), scales[pages], wide)


def _tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, widths: tuple[int, ...]
) -> torch.Tensor:
    """Return attention of q [B, kv heads, N, D] over k, v [B, kv heads, keys, D]; row n sees the
    first seen[B, n] keys.
    """
    many, kv_heads, count, head_dim = q.shape
    width = next((w for w in widths if w >= count), widths[-1])
    chunks = -(-count // width)
    padding = chunks * width - count
    tiles = k.shape[2] // KEYS
    shape = (many, kv_heads, chunks, tiles)
    rows = functional.pad(q, (0, 0, 0, padding)).view(many, kv_heads, chunks, 1, width, head_dim)
    rows = rows.expand(*shape, width, head_dim).reshape(-1, width, head_dim)
    k, v = (
        x.reshape(many, kv_heads, 1, tiles, KEYS, head_dim)
        .expand(*shape, KEYS, head_dim)
        .reshape(-1, KEYS, head_dim)
        for x in (k, v)
    )
    scores = torch.bmm(rows, k.transpose(1, 2)).view(*shape, width, KEYS)
    limits = functional.pad(seen, (0, padding), value=1).view(many, 1, chunks, 1, width, 1)
    at = torch.arange(tiles * KEYS, device=q.device).view(1, 1, 1, tiles, 1, KEYS)
    scores = scores.masked_fill(at >= limits, float("-inf"))
    weights = (scores - scores.amax((3, 5), keepdim=True)).exp()
    sums = weights.sum(-1)
    mixed = torch.bmm(weights.view(-1, width, KEYS), v).view(*shape, width, head_dim)
    total, out = sums[:, :, :, 0].clone(), mixed[:, :, :, 0].clone()
    for tile in range(1, tiles):
        total += sums[:, :, :, tile]
        out += mixed[:, :, :, tile]
    out /= total[..., None]
    return out.view(many, kv_heads, chunks * width, head_dim)[:, :, :count]


class StepAttention(Protocol):
    """The attention of one step, for all layers. Lifetime: step; worker if the step is captured."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: HeadNorms,
        layer: LayerKv,
    ) -> torch.Tensor:
        """Norm and rotate q and k, write K and V into `layer`, and return attention in q's shape.

        q [T, heads, head_dim], k and v [T, kv heads, head_dim], as projected. Rows of padding have
        no meaning.
        """


class Attention(Protocol):
    """A way to compute attention on the model's device. Lifetime: model."""

    @property
    def fell_back(self) -> str:
        """The reason why torch now computes in place of this backend; "" if it does not."""

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """Return the attention of the step that computes `batch`, which is on the model's device.
        The method does not wait for the device.
        """


class TorchAttention:
    """Attention in plain torch: exact in float32 and float64 on CPUs, and torch's fused attention
    on GPUs.
    """

    fell_back = ""

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        cos, sin = rotary.rows(batch.positions)

        def attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            norms: HeadNorms,
            layer: LayerKv,
        ) -> torch.Tensor:
            if norms.q is not None and norms.k is not None:
                q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
            write(rotate(k, cos, sin), v, layer, batch.slots)
            q = rotate(q, cos, sin)
            if q.is_cuda:
                return attend_fused(q, layer, batch)
            return attend(q, layer, batch)

        return attention
