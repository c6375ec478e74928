// A kernel of box copies and warpgroup products with one fault each, for the emulator to find.

#include "abi.h"
#include "dev.cuh"
#include "tensor_map.h"
#include "wgmma.cuh"

namespace {

using namespace wr;

enum Fault {
    SOUND,
    NO_FULL_WAIT,
    NO_EMPTY_WAIT,
    LEFT_EARLY,
    READ_EARLY,
    ACCUMULATOR_WRITTEN,
    OPERAND_CHANGED,
    NOT_BEGUN,
    NO_FENCE,
    NO_BARRIER_AFTER_STORE,
    TOO_FEW_BYTES,
    TOO_MANY_BYTES,
    NOT_MADE,
    NO_INIT_FENCE,
    UNALIGNED,
    NOT_WAITED_FOR,
    STORED_OVER,
    SHALLOW_STRIDE,
    OTHER_WARP_LEFT,
    ORDINARY_LOAD,
    MADE_LATE,
    BEYOND_SHARED,
};

constexpr int ROUNDS = 3, KEYS = 128, ROWS = 64, THREADS = WARPGROUP + 32;
constexpr int X_BYTES = ROWS * ROW_BYTES, Y_BYTES = KEYS * ROW_BYTES;
constexpr int SHARED_BYTES = X_BYTES + Y_BYTES + 64;

struct Params {
    TensorMap x, y;  // [ROWS, 64], [ROUNDS * KEYS, 64]
    float* out;      // [ROWS, 64]
    int fault;
};

// Of warp 0 lane 0 alone: its first row of x stored anew by ordinary stores.
WR_DEV void store_row(const Params& p) {
    for (int chunk = 0; chunk < 8 && thread() == 0; chunk++) {
        auto at = reinterpret_cast<Words4*>(at_swizzled(shared(), ROWS, 0, chunk));
        store_shared(at, load_shared(at));
    }
    if (p.fault != NO_FENCE) fence_async();
    if (p.fault != NO_BARRIER_AFTER_STORE) sync_warpgroup();
}

WR_DEV void fill(const Params& p, const Pipeline<1>& y, Mbarrier* x_full) {
    if (lane() != 0) return;
    arrive_expecting(x_full, X_BYTES);
    copy_box(p.x, shared() + (p.fault == UNALIGNED ? 64 : 0), x_full, 0, 0, 0, 0);
    for (int round = 0; round < ROUNDS; round++) {
        if (p.fault != NO_EMPTY_WAIT) y.wait_empty(round);
        int wrong = p.fault == TOO_FEW_BYTES ? -Y_BYTES : p.fault == TOO_MANY_BYTES ? 128 : 0;
        arrive_expecting(y.full_barrier(round), Y_BYTES + wrong);
        char* to = y.at(round) + (p.fault == BEYOND_SHARED ? SHARED_BYTES : 0);
        copy_box(p.y, to, y.full_barrier(round), 0, round * KEYS, 0, 0);
    }
    if (p.fault == NOT_WAITED_FOR) {
        y.wait_empty(ROUNDS);
        copy_box(p.y, y.at(ROUNDS), y.full_barrier(ROUNDS), 0, 0, 0, 0);
    }
}

// out = sum over rounds of (x y') y, with x y' rounded to bf16.
WR_DEV void consume(const Params& p, const Pipeline<1>& y, Mbarrier* x_full) {
    float scores[64], sums[32] = {};
    uint32_t weights[KEYS / 16][4];
    wait_phase(x_full, 0);
    store_row(p);
    for (int round = 0; round < ROUNDS; round++) {
        if (p.fault == ORDINARY_LOAD) load_shared(reinterpret_cast<const Words4*>(y.at(round)));
        if (p.fault != NO_FULL_WAIT) y.wait_full(round);
        if (p.fault != NOT_BEGUN) begin_products(scores);
        for (int k = 0; k < 4; k++) {
            uint64_t b = deep_operand(y.at(round) + 32 * k);
            if (p.fault == SHALLOW_STRIDE) b -= uint64_t{ATOM_BYTES / 32} << 32;
            multiply<Bf16>(scores, deep_operand(shared() + 32 * k), b, k == 0);
        }
        commit_products();
        if (p.fault != READ_EARLY) wait_products<0>(scores);
        for (int k = 0; k < KEYS / 16; k++)
            for (int i = 0; i < 4; i++)
                weights[k][i] = pack<Bf16>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
        begin_products(sums);
        for (int k = 0; k < KEYS / 16; k++)
            multiply<Bf16>(sums, weights[k], wide_operand(y.at(round) + 16 * k * ROW_BYTES, 0));
        commit_products();
        if (p.fault == ACCUMULATOR_WRITTEN) sums[3] = 1;
        if (p.fault == OPERAND_CHANGED) weights[2][1] = 0;
        if (p.fault == STORED_OVER && thread() == 5)
            store_shared(reinterpret_cast<uint32_t*>(y.at(round)), 0u);
        if (p.fault == LEFT_EARLY) y.release(round);
        wait_products<0>(sums);
        if (p.fault == OTHER_WARP_LEFT) {  // four arrivals, but all of them the first warp's
            if (warp() == 0 && lane() < 4) arrive(y.empty);
        } else if (p.fault != LEFT_EARLY) {
            y.release(round);
        }
    }
    for (int i = 0; i < 32; i++) {
        int row = static_cast<int>(warp() * 16 + lane() / 4) + i / 2 % 2 * 8;
        int column = i / 4 * 8 + static_cast<int>(lane()) % 4 * 2 + i % 2;
        store(p.out + row * 64 + column, sums[i]);
    }
}

WR_KERNEL(THREADS, 1) boxes(WR_PARAMS Params p) {
    auto barriers = reinterpret_cast<Mbarrier*>(shared() + X_BYTES + Y_BYTES);
    Pipeline<1> y{shared() + X_BYTES, Y_BYTES, barriers, barriers + 1};
    if (thread() == 0) {
        if (p.fault != NOT_MADE) init_mbarrier(barriers + 2, 1);
        y.init(1, WARPGROUP / 32);
        if (p.fault != NO_INIT_FENCE) fence_async();
    }
    sync_cta();
    if (p.fault == MADE_LATE && thread() == 0) init_mbarrier(barriers + 2, 1);
    if (warp() == WARPGROUP / 32)
        fill(p, y, barriers + 2);
    else
        consume(p, y, barriers + 2);
}

}  // namespace

WR_EXPORT int wr_test_boxes(const wr_tensor* x, const wr_tensor* y, const wr_tensor* out,
                            int64_t fault, void* stream) {
    return guarded([&] {
        void* from = need_tensor(x, "x", {BF16}, {ROWS, 64});
        Boxed boxed_x{from, {64, ROWS, 1, 1}, {1, 64, 0, 0}, {64, ROWS, 1, 1}, BF16};
        from = need_tensor(y, "y", {BF16}, {ROUNDS * KEYS - 28, 64});  // zeros come after it
        Boxed boxed_y{from, {64, ROUNDS * KEYS - 28, 1, 1}, {1, 64, 0, 0}, {64, KEYS, 1, 1}, BF16};
        Params params{map_of(boxed_x), map_of(boxed_y),
                      static_cast<float*>(need_tensor(out, "out", {F32}, {ROWS, 64})),
                      static_cast<int>(fault)};
        launch(boxes, "boxes", 1, 1, THREADS, SHARED_BYTES, stream, params);
    });
}
