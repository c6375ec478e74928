// Python's side of the event path, for bindings.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_events(nanobind::module_& module);

}  // namespace kv
