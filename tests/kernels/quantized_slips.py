"""Slips in kernels over quantized pages and weights: (what stands there once, what it becomes)."""

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
