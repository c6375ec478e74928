// The seed that starts a chain; `kvkernels/seeds.py` says why there is one.
#pragma once

#include <cstdint>
#include <string_view>

namespace kv {

// 0 without adapter and salt (empty is none), else XXH3-64 of [model, adapter or nil, salt or nil]
// as msgpack in its shortest form.
std::uint64_t chain_seed(std::string_view model, std::string_view lora, std::string_view salt);

}  // namespace kv
