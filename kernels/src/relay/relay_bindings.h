// Python's side of the relay, for bindings.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_relay(nanobind::module_& module);

}  // namespace kv
