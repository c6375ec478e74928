"""Tests that the emulator's tests notice faults in kernels: each source with a planted fault must
fail its case.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkernels.cuda import library as build
from kvkernels.cuda.library import KernelLibrary, LaunchError
from tests.kernels import shared_cases as shared
from tests.kernels.cuda import append_cases as append
from tests.kernels.cuda import prefill_cases as prefill
from tests.kernels.cuda import w8a16_cases as w8a16
from tests.kernels.cuda.decoding import in_one_piece
from tests.kernels.cuda.quantized_slips import (
    BYTE_RING,
    QUANTIZED,
    SHARED_QUANTIZED,
    W8A16,
    WGMMA_SCALED,
    WGMMA_WIDENED,
    WIDEN,
    WIDENED,
)
from tests.kernels.emulated import needs_compiler, relative_error
from tests.kernels.quantized import STORED

SEEDS = range(1, 5)
BOUND = 1e-2

# No sanitizer is needed: a mutant shows in its results.
QUICK = build.EMULATOR._replace(
    compile_flags=("-std=c++20", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", "-x", "c++"),
    link_flags=("-shared",),
)

BUILT = Path(__file__).parents[3] / "build" / "slips"  # kept: a slip is named by its sources

# (text that the source has once, the slip in its place)
DECODE = [
    ("l % 16, 2 * k + l / 16", "l % 16, 2 * k + 1 - l / 16"),
    ("l % 8 + l / 16 * 8, 2 * m", "l % 16, 2 * m"),
    ("i / 2 * 8 < left", "i / 2 * 8 <= left"),
    ("char* tile = tiles.stage(number);", "char* tile = tiles.stage(number + 1);"),
    ("wait_async<Tiles::AHEAD - 1>();", ""),
    ("wait_async<Tiles::AHEAD - 1>();", "wait_async<Tiles::AHEAD>();"),
    ("sync_warp();  // this tile", "// this tile"),
    ("sync_cta();  // the rings", "// the rings"),
    ("sync_cta();\n    return all;", "return all;"),
    ("out[n][m][h + 2] *= kept;", ""),
    ("weights[n][0] = transpose(pack<T>(scores[n][0], scores[n][1]))",
     "weights[n][0] = pack<T>(scores[n][0], scores[n][1])"),
    ("sum += shfl_xor(sum, 16);", ""),
]  # fmt: skip
RING = [
    ("bool keep = row + step < left;", "bool keep = true;"),
    ("if (tile % 32 == 0) look_up(tile);", "if (tile == 0) look_up(tile);"),
]
RETURN = "if (head >= p.heads || first == end) return;\n"
MERGE = [
    ("wait_prerequisite_grids();", ""),
    ("wait_prerequisite_grids();  // by", RETURN + "wait_prerequisite_grids();  // by"),
    ("exp2_fast(lse - largest)", "exp2_fast(largest - lse)"),
    ("mask < 32; mask *= 2) largest", "mask < 2; mask *= 2) largest"),
]
PREFILL_TILES = [
    ("16 * m + l % 16, 2 * k + l / 16", "16 * m + l % 16, 2 * k + 1 - l / 16"),
    ("l / 16 * 8 + l % 8, 2 * k + l / 8 % 2", "l % 16, 2 * k + l / 16"),
    ("at_swizzled<D>(values, l % 16, 2 * n + l / 16)",
     "at_swizzled<D>(values, l / 16 * 8 + l % 8, 2 * n + l / 8 % 2)"),
    ("step % DEPTH * STAGE_BYTES<D>", "(step + 1) % DEPTH * STAGE_BYTES<D>"),
    ("out[m][n][2 * h + 1] *= kept;", ""),
    ("sum[m][h] = sum[m][h] * kept + added;", "sum[m][h] = sum[m][h] + added;"),
    ("now = larger(now, shfl_xor(now, 2));", ""),
    ("&weights[m][2 * k + i / 2][i % 2 * 2]", "&weights[m][2 * k + i % 2][i / 2 * 2]"),
    ("mma<T>(out[m][2 * n + 1], a[m], second)", "mma<T>(out[m][2 * n + 1], a[m], first)"),
    ("(end - begin + KEYS - 1) / KEYS}",
     "(end - begin - static_cast<int>(warp()) * TILE + KEYS - 1) / KEYS}"),
]  # fmt: skip
PREFILL = [
    ("if (8 * n + i >= seen)", "if (8 * n + i > seen)"),
    ("AT_ONCE > rows.position + 1)", "AT_ONCE > rows.position + 64)"),
    ("if (step * KEYS >= rows.end) continue;", "if (step * KEYS + 1 >= rows.end) continue;"),
    ("        wait_async<0>();\n        keys.finish", "        keys.finish"),
    ("wait_async<0>();\n        keys.finish", "wait_async<1>();\n        keys.finish"),
    ("sync_cta();  // these", "// these"),
    ("keys.fetch(step + 1);\n        if (step * KEYS >= rows.end) continue;",
     "if (step * KEYS >= rows.end) continue;\n        keys.fetch(step + 1);"),
    ("sum += shfl_xor(sum, 2);\n            float scale", "float scale"),
    ("chunk * 8, token < item.tokens);", "chunk * 8, true);"),
    ("row / p.group, head = kv_head * p.group + row % p.group",
     "row / p.group, head = kv_head + row % p.group"),
    ("row < WARP_ROWS && row < rows.count", "row < WARP_ROWS"),
    ("    sync_warp();\n    constexpr int CHUNKS", "    constexpr int CHUNKS"),
    ("first_token - l % 4 * 2;", "first_token - l % 4;"),
    ("p.scale_log2 + log2_fast(sum));\n            }", "p.scale_log2 + sum);\n            }"),
]  # fmt: skip
BULK = [
    ("(use / COUNT + 1) % 2", "use / COUNT % 2"),
    ("((chunk ^ row) % CHUNKS)", "(chunk % CHUNKS)"),
]
WGMMA_PRODUCER = [
    ("return {0, page_tokens};  // beyond", "return {0, 0};  // beyond"),
    ("if (left % TILE != 0) cut = left / TILE;", ""),
    ("if (row < left) words", "if (row <= left) words"),
    ("        fence_async();\n        sync_warp();", "        sync_warp();"),
    ("        to.kv.wait_empty(kv_uses);\n        if (cut", "        if (cut"),
    ("KV_BYTES<D> - (cut >= 0 ? TILE * D * 2 : 0)", "KV_BYTES<D>"),
    ("first_row < KEYS && number != cut", "first_row < KEYS"),
    ("walk.kv_head * p.of.group, walk.item.token", "walk.kv_head, walk.item.token"),
    ("to.q.wait_empty(use);", ""),
    ("this->round() + 1;", "this->round() + 2;"),
]
# Slips in boxes larger than a tile, which all producer warps share.
WGMMA_BOXES = [
    ("            box_tokens = TILE;\n", ""),
    ("kv.init(PRODUCER_WARPS, CONSUMER_WARPS);", "kv.init(1, CONSUMER_WARPS);"),
    ("            arrive(barrier);", "            arrive_expecting(barrier, bytes);"),
    ("left < KEYS ? p.v_tiles : p.v,", "p.v,"),
    ("own_box() / COLUMNS<D> * box_tokens;", "own_box() / COLUMNS<D> * TILE;"),
    ("column = own_box() % COLUMNS<D>;", "column = own_box() / PRODUCER_WARPS % COLUMNS<D>;"),
]
WGMMA_LAUNCH = [
    ("std::gcd(int64_t{1} * pages.tiles_per_page * TILE, int64_t{KEYS})", "int64_t{KEYS}"),
    ("of.pages.v, TILE)", "of.pages.v, tokens)"),
]
WGMMA_ROWS = [
    ("from.kv.wait_full(kv_uses + 2);", ""),
    ("from.kv.wait_full(kv_uses + 1);\n            wait_order", "wait_order"),
    ("wait_products<1>(scores);", "wait_products<2>(scores);"),
    ("wait_products<0>(softmax.out, softmax.weights);\n            from", "from"),
    ("begin_products(scores, softmax.out, softmax.weights);", ""),
    ("if (8 * n + i >= seen)", "if (8 * n + i > seen)"),
    ("+ KEYS > position + number", "+ KEYS > position + 64 + number"),
    ("softmax.rescale();", ""),
    ("sum[h] = sum[h] * kept[h] + added;", "sum[h] += added;"),
    ("k % 4 * 32", "k % 4 * 16"),
    ("column * KEYS * ROW_BYTES + offset", "column * TILE * ROW_BYTES + offset"),
    ("k * TILE * ROW_BYTES, KEYS * ROW_BYTES", "k * TILE * ROW_BYTES, ATOM_BYTES"),
    ("from.q.at(q_uses) + number * OWN_ROWS * ROW_BYTES", "from.q.at(q_uses)"),
    ("if (number == 1) pass_order();", ""),
    ("fence_async();  // rows", "// rows"),
    ("        sync_warp();\n        constexpr int CHUNKS", "        constexpr int CHUNKS"),
    ("scores[8 * k + 2 * i], scores", "scores[8 * k + 2 * (3 - i)], scores"),
    ("row < first + 16 && row < count", "row < first + 16"),
]
APPEND = [
    ("first * cosine - second * sine", "first * cosine + second * sine"),
    ("if (slot >= p.slots_there) return;", ""),
    ("if (!is_there) row = p.rows - 1;", ""),
    ("squares) / D + eps", "squares) / D"),
    ("head -= is_k ? p.heads :", "head -= !is_k ? p.heads :"),
]
SHARED = [
    ("load(p.members + item.first + row / p.group)", "load(p.members + item.first)"),
    ("p.page_table + item.pages", "p.page_table"),
    ("(item.slot + row / p.group)", "item.slot"),
    ("if (left - key < KEYS_AT_ONCE) mask_tail", "if (false) mask_tail"),
    ("8 * n + 2 * t + i % 2 >= left", "8 * n + 2 * t + i % 2 > left"),
    ("keys.stage(step) + key / TILE * RING_BYTES<D>", "keys.stage(step)"),
    ("keys.stage(step) + key", "keys.stage(step + 1) + key"),
    ("wait_async<0>();\n        keys.finish", "keys.finish"),
    ("sync_cta();  // these", "// these"),
    ("sync_cta();  // all are done with shared", "// all are done with shared"),
    ("number += p.ctas", "number += p.ctas + 1"),
    ("sum += shfl_xor(sum, 2);", ""),
    ("    commit_async();\n", ""),
    ("shfl(offset, static_cast<unsigned>(row))", "shfl(offset, 0u)"),
    ("task.q(first + l)", "task.q(l)"),
]


def decoded_wrong(library: KernelLibrary, made: shared.Case, context: torch.Tensor) -> bool:
    library.call("shared_decode", made)
    return not all(
        relative_error(got, row) < BOUND
        for got, row in zip(made.out, shared.exact(made, context), strict=True)
    )


def quantized_is_wrong(library: KernelLibrary, seed: int) -> bool:
    lengths = [1, 70, 600]
    plain = shared.alone(lengths, 3, 2, 128 if seed % 2 else 64, seed=seed)
    made = shared.quantized(plain, STORED[seed // 2 % 2])
    return decoded_wrong(library, made, torch.tensor(lengths))


def prefill_differs(library: KernelLibrary, kernel: str, made: prefill.Case) -> bool:
    try:
        prefill.check_result(made, run=lambda *arguments: library.call(kernel, arguments))
    except AssertionError:
        return True
    return False


def widened_is_wrong_by(kernel: str) -> Callable[[KernelLibrary, int], bool]:
    def is_wrong(library: KernelLibrary, seed: int) -> bool:
        dim, dtype = ((64, torch.float16), (128, torch.bfloat16))[seed % 2]
        pieces = [(150, 41), (0, 3), (700, 2)]  # the last piece uses its stages again
        plain = prefill.case(pieces, 5, 2, dim, dtype=dtype, seed=seed)
        made = prefill.quantized(plain, STORED[seed // 2 % 2])
        return prefill_differs(library, kernel, made)

    return is_wrong


def shared_quantized_is_wrong(library: KernelLibrary, seed: int) -> bool:
    requests = [shared.Request("abcdef" * 2, own) for own in (3, 40, 1, 0, 33, 5)]
    requests += [shared.Request("xy", 40), shared.Request("xy", 20), shared.Request("", 9)]
    plain, _, context = shared.case(requests, 4, 1, 128 if seed % 2 else 64, seed=seed)
    made = shared.quantized(plain, STORED[seed // 2 % 2])
    return decoded_wrong(library, made, context)


def w8a16_is_wrong(library: KernelLibrary, seed: int) -> bool:
    made = w8a16.case([5, 20, 40][seed % 3], 40, 64 * 30, seed=seed)
    library.call("w8a16", made)
    return not relative_error(made[3], w8a16.exact(made)) < BOUND


def decode_is_wrong(library: KernelLibrary, seed: int) -> bool:
    lengths = [1, 2200, 70]
    made = shared.alone(lengths, 3, 2, 64, seed=seed)
    if seed % 2 == 0:
        made = in_one_piece(lengths, made)
    return decoded_wrong(library, made, torch.tensor(lengths))


def shared_is_wrong(library: KernelLibrary, seed: int) -> bool:
    requests = [shared.Request("abcdef" * 3 + "-", own) for own in (3, 70, 1, 0, 33, 5, 6, 7, 8)]
    requests += [shared.Request("uvw", own) for own in (0, 1, 2, 0, 1)]
    requests += [shared.Request("xy", 40), shared.Request("xy", 20), shared.Request("", 9)]
    made, _, context = shared.case(requests, 4, 2, 64, seed=seed)
    return decoded_wrong(library, made, context)


def append_is_wrong(library: KernelLibrary, seed: int) -> bool:
    made = append.case([5, -1, 63], 3, 2, 64, norm=True, seed=seed)
    made.eps = 0.5
    try:
        append.check_result(lambda *arguments: library.call("append", arguments), made, BOUND)
    except AssertionError:
        return True
    return False


def prefill_is_wrong(library: KernelLibrary, seed: int) -> bool:
    # The last one: a warp of 32 rows sees one token of the second 64.
    for pieces, group in (([(150, 41), (0, 3), (5, 60)], 5), ([(190, 2)], 2), ([(49, 17)], 2)):
        made = prefill.case(pieces, group, seed=seed)
        if prefill_differs(library, "prefill", made):
            return True
    return False


def wgmma_is_wrong(library: KernelLibrary, seed: int) -> bool:
    # Enough items for queries' stages to be used again; items that end within a tile, and blocks
    # that no warp sees whole.
    for pieces, group in (([(150, 41), (0, 3), (5, 60)], 5), ([(190, 2), (60, 130)], 2)):
        made = prefill.case(pieces, group, 2, 128, seed=seed)
        if prefill_differs(library, "prefill_wgmma", made):
            return True
    return False


def boxes_are_wrong(library: KernelLibrary, seed: int) -> bool:
    """Return whether a changed kernel differs from the right one for pages of several tiles per
    box, or of one.
    """
    for page_tokens in (64, 48):
        made = prefill.case([(150, 41), (0, 3)], 5, 2, 128, page_tokens, seed=seed)
        if prefill_differs(library, "prefill_wgmma", made):
            return True
    return False


def mutant(folder: Path, source: str, there: str, instead: str) -> KernelLibrary:
    sources = folder / "cuda"
    shutil.copytree(build.source_folder(), sources)
    text = (sources / source).read_text()
    (sources / source).write_text(text.replace(there, instead))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "source_folder", lambda: sources)
        patch.setattr(build, "cache_folder", lambda: BUILT)
        return KernelLibrary(build.build(QUICK))


# Slips with keys that are cut into pieces.
PREFILL_CUT = [
    ("table += item.begin / (p.pages.tiles_per_page * TILE);", ""),
    ("end = item.end - item.begin;", "end = item.end;"),
    ("item.position - (IS_CUT ? item.begin : 0)", "item.position"),
    ("p.partial + partial_row * D + l % 4 * 2;", "p.partial + partial_row * D + l % 4;"),
    ("int64_t token = slot + (first + row) / p.group;", "int64_t token = slot;"),
]
WGMMA_CUT = [
    ("position = item.position - item.begin;", "position = item.position;"),
    ("walk.item.begin + block * KEYS", "block * KEYS"),
    ("ctas - 1 - own : own", "ctas - own : own"),
]
WGMMA_ROWS_CUT = [("first_slot + row / p.of.group", "first_slot")]
MERGE_CUT = [("largest + log2_fast(sum)", "largest")]


def cut_is_wrong(kernel: str) -> Callable[[KernelLibrary, int], bool]:
    """Return a check of whether a changed kernel differs for a chunk whose keys are cut into three
    pieces, next to one in a single piece.
    """

    def is_wrong(library: KernelLibrary, seed: int) -> bool:
        made = prefill.case([(1151, 9), (0, 3)], 5, 2, seed=seed, is_cut=True)
        return prefill_differs(library, kernel, made)

    return is_wrong


def slips() -> Iterator[Any]:
    """Yield each planted fault. Three of them always run, and the rest only in full test runs,
    because each needs a build. The first fault of a table marked `in_ci` always runs as well.
    """
    in_ci = True
    for source, pairs, is_wrong, *always in (
        ("decode/decode.cuh", DECODE, decode_is_wrong),
        ("ring.cuh", RING, decode_is_wrong),
        ("merge.cuh", MERGE, decode_is_wrong),
        ("append.cuh", APPEND, append_is_wrong, in_ci),
        ("prefill/prefill.cuh", PREFILL, prefill_is_wrong),
        ("bulk.cuh", BULK, wgmma_is_wrong),
        ("prefill/prefill_wgmma.cuh", WGMMA_PRODUCER, wgmma_is_wrong),
        ("prefill/prefill_wgmma.cuh", WGMMA_BOXES, boxes_are_wrong),
        ("prefill/prefill_wgmma.cu", WGMMA_LAUNCH, boxes_are_wrong),
        ("prefill/prefill_wgmma_rows.cuh", WGMMA_ROWS, wgmma_is_wrong),
        ("prefill/prefill_tiles.cuh", PREFILL_TILES, prefill_is_wrong),
        ("prefill/prefill.cuh", PREFILL_CUT, cut_is_wrong("prefill")),
        ("prefill/prefill_wgmma.cuh", WGMMA_CUT, cut_is_wrong("prefill_wgmma")),
        ("prefill/prefill_wgmma_rows.cuh", WGMMA_ROWS_CUT, cut_is_wrong("prefill_wgmma")),
        ("merge.cuh", MERGE_CUT, cut_is_wrong("prefill")),
        ("decode/decode_quantized.cuh", QUANTIZED, quantized_is_wrong),
        ("byte_ring.cuh", BYTE_RING, quantized_is_wrong),
        ("prefill/prefill_quantized.cuh", WIDENED, widened_is_wrong_by("prefill")),
        (
            "prefill/prefill_wgmma_quantized.cuh",
            WGMMA_WIDENED,
            widened_is_wrong_by("prefill_wgmma"),
        ),
        ("prefill/prefill_wgmma_rows.cuh", WGMMA_SCALED, widened_is_wrong_by("prefill_wgmma")),
        ("decode/shared_decode.cuh", SHARED_QUANTIZED, shared_quantized_is_wrong),
        ("widen.cuh", WIDEN, widened_is_wrong_by("prefill")),
        ("w8a16.cuh", W8A16, w8a16_is_wrong, in_ci),
        ("decode/shared_decode.cuh", SHARED, shared_is_wrong, in_ci),
    ):
        for number, pair in enumerate(pairs):
            marks = [] if always and number == 0 else [pytest.mark.full]
            yield pytest.param(source, *pair, is_wrong, marks=marks)


def test_every_planted_fault_changes_one_place() -> None:
    """Every planted fault changes exactly one place of its source. This checks all of them quickly,
    because most are built only in full test runs.
    """
    for source, there, *_ in (slip.values for slip in slips()):
        count = (build.source_folder() / source).read_text().count(there)
        assert count == 1, f"{source} has {there!r} {count} times"


@needs_compiler
@pytest.mark.parametrize(("source", "there", "instead", "is_wrong"), list(slips()))
def test_a_planted_fault_is_detected(
    tmp_path: Path,
    source: str,
    there: str,
    instead: str,
    is_wrong: Callable[[KernelLibrary, int], bool],
) -> None:
    library = mutant(tmp_path, source, there, instead)
    found = False
    for seed in SEEDS:
        library.functions.wr_emulator_seed(ctypes.c_uint64(seed))
        try:
            found = found or is_wrong(library, seed)
        except LaunchError:
            found = True
    assert found
