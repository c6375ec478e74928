// Kernels with one fault each, for the emulator to find, and the numbers of `numbers.h` by table.

#include "abi.h"
#include "dev.cuh"

namespace {

struct Params {
    uint32_t* data;
    int fault;
};

// Reverses 64 words by two warps through shared memory, a stage of it copied asynchronously.
WR_KERNEL(64, 1) reverse(WR_PARAMS Params p) {
    using namespace wr;
    enum {
        SOUND,
        NO_WAIT,
        NO_BARRIER,
        HALF_BARRIER,
        DIVERGED,
        BEYOND,
        UNALIGNED,
        BEYOND_SHARED,
        LEFT_EARLY,
        WARP_BARRIER,
        OVERWRITTEN,
        OVERWRITTEN_IN_WARP
    };
    unsigned t = thread();
    uint32_t* words = reinterpret_cast<uint32_t*>(shared());
    if (t % 4 == 0) copy_async(words + t, p.data + t + (p.fault == UNALIGNED), true);
    commit_async();
    if (p.fault != NO_WAIT) wait_async<0>();
    if (p.fault == LEFT_EARLY && t == 63) return;
    if (p.fault == DIVERGED && t % 2) sync_warp();
    shfl(t, 0);
    if (p.fault == WARP_BARRIER)
        sync_warp();
    else if (p.fault != NO_BARRIER)
        sync_cta();
    uint32_t value = load_shared(words + 63 - t + (p.fault == BEYOND_SHARED));
    if (p.fault == OVERWRITTEN && t < 32) store_shared(words + t, value);
    if (p.fault == OVERWRITTEN_IN_WARP && t < 16) store_shared(words + 32 + t, value);
    if (p.fault != HALF_BARRIER || t < 32) sync_cta();
    if (p.fault != HALF_BARRIER) store_shared(words + t, value);
    store(p.data + t + (p.fault == BEYOND), value);
}

struct Chain {
    uint32_t *written, *out;
    int fault;
};

WR_KERNEL(64, 1) write_words(WR_PARAMS Chain p) {
    wr::store(p.written + wr::thread(), wr::thread() + 1);
}

// Begins while `write_words` ends, and reads what it has written.
WR_KERNEL(64, 1) read_words(WR_PARAMS Chain p) {
    using namespace wr;
    enum { SOUND, NO_WAIT, READ_EARLY, STORED_EARLY, ENDED_EARLY };
    unsigned t = thread();
    if (p.fault == ENDED_EARLY && t > 32) return;
    if (p.fault == READ_EARLY && t == 7) load(p.written + t);
    if (p.fault == STORED_EARLY && t == 7) store(p.out + t, 0u);
    if (p.fault != NO_WAIT) wait_prerequisite_grids();
    if (t > 32) return;
    store(p.out + t, load(p.written + t));
}

}  // namespace

// fault 5: nothing is launched before.
WR_EXPORT int wr_test_chain(const wr_tensor* written, const wr_tensor* out, int64_t fault,
                            void* stream) {
    return wr::guarded([&] {
        auto data = [](const wr_tensor* of, const char* name) {
            return static_cast<uint32_t*>(wr::need_tensor(of, name, {wr::I32}, {64}));
        };
        Chain params{data(written, "written"), data(out, "out"), static_cast<int>(fault)};
        if (fault != 5) wr::launch(write_words, "write", 1, 1, 64, 0, stream, params);
        wr::launch(read_words, "read", 1, 1, 64, 0, stream, params, /*is_dependent=*/true);
    });
}

WR_EXPORT int wr_test_reverse(const wr_tensor* data, int64_t fault, void* stream) {
    return wr::guarded([&] {
        Params params{};
        params.data = static_cast<uint32_t*>(wr::need_tensor(data, "data", {wr::I32}, {64}));
        params.fault = static_cast<int>(fault);
        wr::launch(reverse, "reverse", 1, 1, 64, 256, stream, params);
    });
}

// to: 0 bf16, 1 fp16, 2 e4m3, of float bits; 3, 4, 5 back to float bits.
WR_EXPORT uint32_t wr_test_number(uint32_t bits, int to) {
    float value = wr::float_of(bits);
    switch (to) {
        case 0: return wr::to_bf16(value);
        case 1: return wr::to_fp16(value);
        case 2: return wr::to_e4m3(value);
        case 3: return wr::bits_of(wr::from_bf16(static_cast<uint16_t>(bits)));
        case 4: return wr::bits_of(wr::from_fp16(static_cast<uint16_t>(bits)));
        default: return wr::bits_of(wr::from_e4m3(static_cast<uint8_t>(bits)));
    }
}
