// W8A16: a few rows of 16-bit activations times INT8 weights with a scale for each output channel.
//
// Weights are the left operand, 16 channels a tile, so that up to 8 rows of activations are one
// column block and nothing is padded further. A CTA has 16 * CHANNEL_TILES channels and 8 *
// ROW_TILES rows; neighbouring CTAs have the other rows of the same weights, which L2 then has.
// Its 8 warps split the inputs (warp w has every eighth run of 64) and add their sums in order of w
// at the end. The order of a sum thus depends on the inputs alone: a row has the same bits in every
// batch.
//
// Each lane copies its own operands, 16 bytes at once, into slots that only it reads: stages of the
// pipeline need no barrier. Lane t of four has 16 neighbouring inputs of a run, 4 for each of four
// MMAs, of weights and activations alike: the order within a sum of 16 is free.
#pragma once

#include "dev.cuh"
#include "widen.cuh"

namespace wr::w8a16 {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int RUN = 64;  // inputs that a warp takes at once
constexpr int MAX_ROWS = 64;

struct Params {
    const uint16_t* x;  // [rows, inputs]
    int64_t x_row;
    const uint8_t* q;  // [channels, inputs]
    int64_t q_row;
    const float* scales;  // [channels]
    uint16_t* out;        // [rows, channels]
    int64_t out_row;
    int32_t rows, inputs, channels, row_groups;
};

// The first row and channel of a CTA.
struct Corner {
    int row, channel;
};

// 16-byte slots of a lane in one stage: two of each tile of channels, then of each 8 rows of x.
template <int CHANNEL_TILES, int ROW_TILES>
constexpr int SLOTS = 2 * (CHANNEL_TILES + ROW_TILES);
template <int CHANNEL_TILES, int ROW_TILES>
constexpr int STAGE_BYTES = SLOTS<CHANNEL_TILES, ROW_TILES> * THREADS * 16;
// As many as let two CTAs share an SM of 228 KiB, and one fit into the 99 KiB of smaller GPUs: but
// for 8 tiles, which have an SM alone.
template <int CHANNEL_TILES, int ROW_TILES>
constexpr int STAGES = CHANNEL_TILES + ROW_TILES <= 3   ? 4
                       : CHANNEL_TILES + ROW_TILES <= 4 ? 3
                                                        : 2;
// Results meet in shared memory as [warp][row][channel]; four more channels, for the banks.
template <int CHANNEL_TILES>
constexpr int RESULT_ROW = 16 * CHANNEL_TILES + 4;
template <int CHANNEL_TILES, int ROW_TILES>
constexpr int RESULT_BYTES = WARPS * 8 * ROW_TILES * RESULT_ROW<CHANNEL_TILES> * 4;
template <int CHANNEL_TILES, int ROW_TILES>
constexpr int PIPELINE_BYTES =
    STAGES<CHANNEL_TILES, ROW_TILES> * STAGE_BYTES<CHANNEL_TILES, ROW_TILES>;
template <int CHANNEL_TILES, int ROW_TILES>
constexpr int SHARED_BYTES =
    PIPELINE_BYTES<CHANNEL_TILES, ROW_TILES> > RESULT_BYTES<CHANNEL_TILES, ROW_TILES>
        ? PIPELINE_BYTES<CHANNEL_TILES, ROW_TILES>
        : RESULT_BYTES<CHANNEL_TILES, ROW_TILES>;

WR_DEV Words4* slot(int stage, int number, int slots) {
    return reinterpret_cast<Words4*>(shared()) + (stage * slots + number) * THREADS + thread();
}

// Starts the copies of the warp's run number `run` into its stage; zeros beyond rows and channels.
template <int CHANNEL_TILES, int ROW_TILES>
WR_DEV void fetch(const Params& p, const Corner& first, int run) {
    constexpr int OWN_SLOTS = SLOTS<CHANNEL_TILES, ROW_TILES>;
    int stage = run % STAGES<CHANNEL_TILES, ROW_TILES>;
    int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    int input = (run * WARPS + static_cast<int>(warp())) * RUN + 16 * t;
    if (input < p.inputs) {
        WR_UNROLL
        for (int i = 0; i < 2 * CHANNEL_TILES; i++) {
            int channel = first.channel + 8 * i + g;
            bool keep = channel < p.channels;
            copy_async(slot(stage, i, OWN_SLOTS), p.q + channel * p.q_row + input, keep);
        }
        WR_UNROLL
        for (int i = 0; i < ROW_TILES; i++) {
            int row = first.row + 8 * i + g;
            bool keep = row < p.rows;
            const uint16_t* from = p.x + row * p.x_row + input;
            int number = 2 * (CHANNEL_TILES + i);
            copy_async(slot(stage, number, OWN_SLOTS), from, keep);
            copy_async(slot(stage, number + 1, OWN_SLOTS), from + 8, keep);
        }
    }
    commit_async();
}

template <class T, int CHANNEL_TILES, int ROW_TILES>
WR_DEV void multiply_run(int stage, float (&sums)[CHANNEL_TILES][ROW_TILES][4]) {
    constexpr int OWN_SLOTS = SLOTS<CHANNEL_TILES, ROW_TILES>;
    Words4 weights[2 * CHANNEL_TILES];
    WR_UNROLL
    for (int i = 0; i < 2 * CHANNEL_TILES; i++) weights[i] = load_shared(slot(stage, i, OWN_SLOTS));
    WR_UNROLL
    for (int half = 0; half < 2; half++) {
        Words4 x[ROW_TILES];
        WR_UNROLL
        for (int n = 0; n < ROW_TILES; n++)
            x[n] = load_shared(slot(stage, 2 * (CHANNEL_TILES + n) + half, OWN_SLOTS));
        WR_UNROLL
        for (int j = 0; j < 2; j++) {
            uint32_t rows[ROW_TILES][2];
            WR_UNROLL
            for (int n = 0; n < ROW_TILES; n++)
                part(x[n].w[2 * j], x[n].w[2 * j + 1], rows[n][0], rows[n][1]);
            WR_UNROLL
            for (int m = 0; m < CHANNEL_TILES; m++) {
                uint32_t channels[4];
                int word = 2 * half + j;
                widen<T>(Int8{}, weights[2 * m].w[word], channels[0], channels[2]);
                widen<T>(Int8{}, weights[2 * m + 1].w[word], channels[1], channels[3]);
                WR_UNROLL
                for (int n = 0; n < ROW_TILES; n++) mma<T>(sums[m][n], channels, rows[n]);
            }
        }
    }
}

template <class T, int CHANNEL_TILES, int ROW_TILES>
WR_DEV void add_up(const Params& p, const Corner& first,
                   const float (&sums)[CHANNEL_TILES][ROW_TILES][4]) {
    constexpr int ROW = RESULT_ROW<CHANNEL_TILES>, CHANNELS = 16 * CHANNEL_TILES;
    constexpr int WARP_FLOATS = 8 * ROW_TILES * ROW;
    float* all = reinterpret_cast<float*>(shared());
    float* own = all + warp() * WARP_FLOATS;
    int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    WR_UNROLL
    for (int m = 0; m < CHANNEL_TILES; m++)
        WR_UNROLL
        for (int n = 0; n < ROW_TILES; n++)
            WR_UNROLL
            for (int i = 0; i < 4; i++) {
                int row = 8 * n + 2 * t + i % 2, channel = 16 * m + g + i / 2 * 8;
                store_shared(own + row * ROW + channel, sums[m][n][i]);
            }
    sync_cta();
    for (int at = static_cast<int>(thread()); at < 8 * ROW_TILES * CHANNELS; at += THREADS) {
        int row = at / CHANNELS, channel = at % CHANNELS;
        if (first.row + row >= p.rows || first.channel + channel >= p.channels) continue;
        float sum = 0;
        WR_UNROLL
        for (int w = 0; w < WARPS; w++)
            sum += load_shared(all + w * WARP_FLOATS + row * ROW + channel);
        float scale = load(p.scales + first.channel + channel) * UNIT<T>;
        uint16_t* to = p.out + (first.row + row) * p.out_row + first.channel + channel;
        store(to, static_cast<uint16_t>(pack<T>(sum * scale, 0)));
    }
}

template <class T, int CHANNEL_TILES, int ROW_TILES>
WR_KERNEL(THREADS, CHANNEL_TILES + ROW_TILES <= 6 ? 2 : 1) kernel(WR_PARAMS Params p) {
    constexpr int DEPTH = STAGES<CHANNEL_TILES, ROW_TILES>;
    int number = static_cast<int>(cta_x());
    Corner first{number % p.row_groups * 8 * ROW_TILES, number / p.row_groups * 16 * CHANNEL_TILES};
    // The same for all lanes of a warp: `inputs` is a multiple of RUN.
    int runs = (p.inputs / RUN - static_cast<int>(warp()) + WARPS - 1) / WARPS;
    float sums[CHANNEL_TILES][ROW_TILES][4] = {};
    WR_UNROLL
    for (int run = 0; run < DEPTH - 1; run++) fetch<CHANNEL_TILES, ROW_TILES>(p, first, run);
    for (int run = 0; run < runs; run++) {
        wait_async<DEPTH - 2>();  // of this lane's own copies: nobody else's are read
        fetch<CHANNEL_TILES, ROW_TILES>(p, first, run + DEPTH - 1);
        multiply_run<T, CHANNEL_TILES, ROW_TILES>(run % DEPTH, sums);
    }
    wait_async<0>();
    sync_cta();  // the stages are free for the sums
    add_up<T, CHANNEL_TILES, ROW_TILES>(p, first, sums);
}

}  // namespace wr::w8a16
