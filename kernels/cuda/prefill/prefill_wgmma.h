// The host's side of `prefill_wgmma.cuh`, for `prefill.cu`, which has checked the arguments.
#pragma once

#include <string>

#include "byte_ring.cuh"
#include "prefill/prefill.cuh"

namespace wr::prefill_wgmma {

// What a launch has to know beyond a CTA's parameters.
struct Extents {
    int64_t tokens, head_dim, pages, items;
    int32_t dtype, stored;  // of q, and of pages
};

// Why it is not for this device or these tensors, by name; empty where it is.
std::string unsupported(const prefill::ParamsOver<Pages>& params, const Extents& extents);
std::string unsupported(const prefill::ParamsOver<BytePages>& params, const Extents& extents);

// One launch. Raises what `launch` does.
void run(const prefill::ParamsOver<Pages>& params, const Extents& extents, void* stream);
void run(const prefill::ParamsOver<BytePages>& params, const Extents& extents, void* stream);

}  // namespace wr::prefill_wgmma
