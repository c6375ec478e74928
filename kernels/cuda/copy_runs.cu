// The C entry of copy_runs: checks, then one launch. See `copy_runs.cuh` for what runs.

#include "copy_runs.cuh"

#include "abi.h"

// source and target int8 [bytes]; runs int64 [R, 3]: offset in source, offset in target, bytes;
// moves int64 [M, 2]: bases added to all of them, -1: nothing. What leaves either end is not
// copied.
WR_EXPORT int wr_copy_runs(const wr_tensor* source, const wr_tensor* target, const wr_tensor* runs,
                           const wr_tensor* moves, void* stream) {
    return wr::guarded([&] {
        using namespace wr;
        using namespace wr::copy_runs;
        need(source && target && runs && moves, "source, target, runs and moves", "are needed");
        auto bytes_of = [](const wr_tensor* tensor, const char* name) {
            auto data = need_tensor(tensor, name, {I8}, {-1});
            need_dense_rows(tensor, name);
            return static_cast<char*>(data);
        };
        auto rows_of = [](const wr_tensor* tensor, const char* name, int64_t fields) {
            need(tensor->dims == 2, name, "needs two dimensions");
            auto data = need_tensor(tensor, name, {I64}, {tensor->shape[0], fields});
            need(tensor->stride[1] == 1 && tensor->stride[0] == fields, name, "is not dense");
            return static_cast<const int64_t*>(data);
        };
        Params params{};
        params.source = bytes_of(source, "source");
        params.target = bytes_of(target, "target");
        params.source_bytes = source->shape[0];
        params.target_bytes = target->shape[0];
        params.runs = rows_of(runs, "runs", RUN_FIELDS);
        params.moves = rows_of(moves, "moves", MOVE_FIELDS);
        int64_t run_count = runs->shape[0], move_count = moves->shape[0];
        need(run_count <= MAX_GRID_X && move_count <= MAX_GRID_X, "runs and moves",
             "have 2^31 rows or more");
        params.run_count = static_cast<uint32_t>(run_count);
        launch(kernel, "copy_runs", run_count * move_count, 1, THREADS, 0, stream, params);
    });
}
