#include "bindings.h"

#include <string_view>

#include "relay/head.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::tuple fields_of(const kv::relay::ReplyHead& head) {
  nb::list kept;
  for (const kv::relay::Field& field : head.fields) {
    if (!kv::relay::is_ours(field.name)) {
      kept.append(nb::make_tuple(bytes_of(field.name), bytes_of(field.value)));
    }
  }
  return nb::tuple(kept);
}

nb::tuple reply_head(const nb::bytes& text, bool head_request) {
  try {
    const auto head = kv::relay::parse_head({text.c_str(), text.size()}, head_request);
    return nb::make_tuple(head.status, bytes_of(head.reason), fields_of(head),
                          static_cast<int>(head.framing), head.length, head.reusable,
                          head.event_stream, head.coded);
  } catch (const kv::relay::Broken& broken) {
    throw nb::value_error(broken.what());
  }
}

}  // namespace

namespace kv {

void bind_reply_head(nb::module_& module) {
  module.def("reply_head", reply_head, "text"_a, "head_request"_a,
             nb::sig("def reply_head(text: bytes, head_request: bool) -> tuple[int, bytes, "
                     "tuple[tuple[bytes, bytes], ...], int, int, bool, bool, bool]"),
             "A worker's head, read strictly. Raises ValueError.");
}

}  // namespace kv
