#include <string>

#include "base/chain.h"

namespace kv {
namespace {

// A msgpack string in its shortest form, or nil.
void pack(std::string& out, std::string_view text) {
  const std::size_t size = text.size();
  if (size < 32) {
    out += static_cast<char>(0xA0 | size);
  } else if (size < 1U << 8) {
    out += '\xD9';
  } else if (size < 1U << 16) {
    out += '\xDA';
  } else {
    out += '\xDB';
  }
  const int bytes = size < 32 ? 0 : size < 1U << 8 ? 1 : size < 1U << 16 ? 2 : 4;
  for (int i = bytes; i-- > 0;) out += static_cast<char>(size >> (8 * i) & 0xFF);
  out += text;
}

void pack_or_nil(std::string& out, std::string_view text) {
  if (text.empty()) {
    out += '\xC0';
  } else {
    pack(out, text);
  }
}

}  // namespace

std::uint64_t chain_seed(std::string_view model, std::string_view lora, std::string_view salt) {
  if (lora.empty() && salt.empty()) return 0;
  std::string packed = "\x93";
  pack(packed, model);
  pack_or_nil(packed, lora);
  pack_or_nil(packed, salt);
  return hash_bytes(reinterpret_cast<const std::uint8_t*>(packed.data()), packed.size());
}

}  // namespace kv
