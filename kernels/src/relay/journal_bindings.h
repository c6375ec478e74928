// Python's side of what is remembered of streams, for relay_bindings.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_journal(nanobind::module_& module);

}  // namespace kv
