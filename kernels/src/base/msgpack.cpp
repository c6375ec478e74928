#include "base/msgpack.h"

namespace kv::msgpack {

bool is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const std::uint8_t*>(text.data());
  const auto* end = at + text.size();
  while (at != end) {
    const std::uint8_t first = *at++;
    if (first < 0x80) continue;
    if (first < 0xC2 || first > 0xF4) return false;
    const int more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
    if (end - at < more) return false;
    // The second byte's range excludes what is too long, a surrogate, or beyond U+10FFFF.
    const std::uint8_t least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const std::uint8_t most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (*at < least || *at > most) return false;
    for (int i = 1; i < more; ++i) {
      if ((at[i] & 0xC0) != 0x80) return false;
    }
    at += more;
  }
  return true;
}

}  // namespace kv::msgpack
