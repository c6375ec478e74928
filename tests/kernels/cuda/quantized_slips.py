"""Faults to plant in kernels over quantized pages and weights, as pairs (text that the source has
once, its replacement).
"""

QUANTIZED = [
    ("char* tile = tiles.stage(number);", "char* tile = tiles.stage(number + 1);"),
    ("tiles.scales(number) + g", "tiles.scales(number + 1) + g"),
    ("g + 8 * h < left ? load_shared", "true ? load_shared"),
    ("value_at<D>(tile, l % 8 + l / 8 % 2 * 8, 2 * pair + l / 16)",
     "value_at<D>(tile, l % 8 + l / 16 * 8, 2 * pair + l / 8 % 2)"),
    ("INTERLEAVED = true;", "INTERLEAVED = false;"),
    ("q[n][k][0], q[n][k][1]);", "q[n][k][1], q[n][k][0]);"),
]  # fmt: skip
SHARED_QUANTIZED = [
    ("keys.finish(step);", ""),
    ("            keys.scale_scores(scores, step, key / TILE);\n", ""),
    ("keys.scale_weights(scores, step, key / TILE);", "keys.scale_weights(scores, step, 0);"),
]
WIDEN = [("widen<T>(stored, swap_middle_bytes(bytes), first, second);",
          "widen<T>(stored, bytes, first, second);")]  # fmt: skip
BYTE_RING = [("l % 4 * 4, left > 0", "l % 4 * 4, l < 4")]
WIDENED = [
    ("sync_warp();  // what other", "// what other"),
    ("key_at<D>(bytes, row, eighth / 2) + half", "key_at<D>(bytes, row, eighth / 2) + 8 - half"),
    ("to + TILE * D * 2, row, eighth", "to + TILE * D * 2, row, eighth ^ 1"),
    ("l >= own.end - own.token_of(step))", "l > own.end - own.token_of(step))"),
    ("own.scales(step) + TILE + l, 0.0f", "own.scales(step) + l, 0.0f"),
    ("scale(scores, step, tile, 0);", "scale(scores, step, tile, TILE);"),
    ("scale(weights, step, tile, TILE);", ""),
    ("(tile + n / 2) * OwnBytes::BYTES", "(n / 2) * OwnBytes::BYTES"),
    ("n % 2 * 8 + 2 * t;", "2 * t;"),
    ("words.w[i]) * UNIT<T>", "words.w[i])"),
    ("x[m][n][i + 2] *= by;", ""),
    ("ByteRing<D, WARPS, 1, DEPTH>", "ByteRing<D, WARPS, 1, 1>"),
    ("wide + step % DEPTH * STAGE_BYTES<D>; }", "wide; }"),
]  # fmt: skip
WGMMA_WIDENED = [
    ("WARP_ROWS + l / (2 * CHUNKS) * 2 + l / 4 % 2;", "WARP_ROWS + l / CHUNKS;"),
    ("first + own >= walk.item.end) return {0, 0};", "first + own > walk.item.end) return {0, 0};"),
    ("fill(scales.v, p.of.pages.v, block,", "fill(scales.k, p.of.pages.v, block,"),
    ("p.of.pages.k, block + 1);", "p.of.pages.k, block);"),
    ("find(walk, block + 1);", "find(walk, block);"),
    ("static_cast<unsigned>(block) % 2) * TILES", "0) * TILES"),
    ("        sync_warp();\n        if (first + own", "        if (first + own"),
    ("to.kv.wait_empty(kv_uses);", ""),
    ("        fence_async();\n        sync_warp();", "        sync_warp();"),
    ("        sync_warp();\n        if (lane() == 0) arrive", "        if (lane() == 0) arrive"),
    ("is_last ? n : first + HELD + n", "first + HELD + n"),
    ("2 * own_chunk() + half);", "2 * own_chunk() + 1 - half);"),
    ("at += pass * ROWS_AT_ONCE * ROW_BYTES;", "at += pass * ROWS_AT_ONCE * D * 2;"),
    ("k_scales + scale) * UNIT<T>", "k_scales + scale)"),
    ("if constexpr (WARPS < PRODUCER_WARPS) tile += warp() / WARPS;", ""),
]  # fmt: skip
WGMMA_SCALED = [
    ("            scale(scores, kv_uses + 2);\n", ""),
    ("        scale(scores, kv_uses);\n        from.kv.release(kv_uses);",
     "        from.kv.release(kv_uses);\n        scale(scores, kv_uses);"),
    ("        scale(scores, kv_uses);\n", ""),
    ("            from.kv.wait_full(values);\n", ""),
    ("            scale(scores, values);\n", ""),
    ("mask_and_update(walk, block, kv_uses + 3,", "mask_and_update(walk, block, kv_uses + 1,"),
    ("float_of(pair.w[i % 2])", "float_of(pair.w[i / 2])"),
    ("lane() % 4 * 2;\n            WR_UNROLL", "lane() % 4;\n            WR_UNROLL"),
]  # fmt: skip
W8A16 = [
    ("wait_async<DEPTH - 2>();", "wait_async<DEPTH - 1>();"),
    ("sync_cta();  // the stages", "// the stages"),
    ("    sync_cta();\n    for (int at", "    for (int at"),
    ("int stage = run % STAGES", "int stage = (run + 1) % STAGES"),
    ("weights[2 * m].w[word], channels[0], channels[2]);",
     "weights[2 * m].w[word], channels[0], channels[1]);"),
    ("bool keep = row < p.rows;", "bool keep = true;"),
    ("+ i / 2 * 8;", "+ i % 2 * 8;"),
    ("input < p.inputs", "true"),
]  # fmt: skip
