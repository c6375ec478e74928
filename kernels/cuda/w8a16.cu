// The C entry of w8a16: checks, then one launch. See `w8a16.cuh` for what runs.

#include "w8a16.cuh"

#include "abi.h"

namespace wr::w8a16 {
namespace {

constexpr int64_t MAX_INPUTS = 1 << 20;
// From here on two CTAs an SM have work with 64 channels each (132 SMs), which halves what is read
// of x. Below, channels are few: more CTAs count.
constexpr int64_t WIDE_CHANNELS = 64 * 132;

template <class T, int CHANNEL_TILES, int ROW_TILES>
void launch_tiles(Params params, void* stream) {
    constexpr int CHANNELS = 16 * CHANNEL_TILES, ROWS = 8 * ROW_TILES;
    params.row_groups = (params.rows + ROWS - 1) / ROWS;
    int64_t ctas = int64_t{(params.channels + CHANNELS - 1) / CHANNELS} * params.row_groups;
    launch(kernel<T, CHANNEL_TILES, ROW_TILES>, "w8a16", ctas, 1, THREADS,
           SHARED_BYTES<CHANNEL_TILES, ROW_TILES>, stream, params);
}

template <class T>
void launch_for(const Params& params, void* stream) {
    bool is_wide = params.channels >= WIDE_CHANNELS &&
                   (params.rows <= 16 || SHARED_BYTES<4, 4> <= shared_limit());
    auto narrow = params.rows <= 8    ? launch_tiles<T, 2, 1>
                  : params.rows <= 16 ? launch_tiles<T, 2, 2>
                                      : launch_tiles<T, 2, 4>;
    auto wide = params.rows <= 8    ? launch_tiles<T, 4, 1>
                : params.rows <= 16 ? launch_tiles<T, 4, 2>
                                    : launch_tiles<T, 4, 4>;
    (is_wide ? wide : narrow)(params, stream);
}

}  // namespace
}  // namespace wr::w8a16

// out [M, N] = x [M, K] times q [N, K] (INT8) transposed, times scales [N]; M up to 64.
WR_EXPORT int wr_w8a16(const wr_tensor* x, const wr_tensor* q, const wr_tensor* scales,
                       const wr_tensor* out, void* stream) {
    return wr::guarded([&] {
        using namespace wr;
        using namespace wr::w8a16;
        need(x && q && x->dims == 2 && q->dims == 2, "x and q",
             "need [rows, inputs] and [channels, inputs]");
        int64_t rows = x->shape[0], inputs = x->shape[1], channels = q->shape[0];
        need(rows <= MAX_ROWS, "x", "has " + std::to_string(rows) + " rows, w8a16 takes up to 64");
        need(inputs >= RUN && inputs % RUN == 0 && inputs <= MAX_INPUTS, "x",
             "has " + std::to_string(inputs) + " inputs, w8a16 takes multiples of 64 up to 2^20");
        need(channels >= 1 && channels <= INT32_MAX / 2, "q", "needs 1 to 2^30 channels");
        Params params{};
        params.x = static_cast<const uint16_t*>(need_tensor(x, "x", {BF16, F16}, {rows, inputs}));
        params.q = static_cast<const uint8_t*>(need_tensor(q, "q", {I8}, {channels, inputs}));
        params.scales = static_cast<const float*>(need_tensor(scales, "scales", {F32}, {channels}));
        params.out = static_cast<uint16_t*>(need_tensor(out, "out", {x->dtype}, {rows, channels}));
        need_rows_of_16_bytes(x, "x");
        need_rows_of_16_bytes(q, "q");
        need_dense_rows(scales, "scales");
        need_dense_rows(out, "out");
        params.x_row = x->stride[0];
        params.q_row = q->stride[0];
        params.out_row = out->stride[0];
        params.rows = static_cast<int32_t>(rows);
        params.inputs = static_cast<int32_t>(inputs);
        params.channels = static_cast<int32_t>(channels);
        if (rows > 0) (x->dtype == BF16 ? launch_for<Bf16> : launch_for<Fp16>)(params, stream);
    });
}
