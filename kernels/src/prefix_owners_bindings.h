// Python's side of the prefix owners.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_prefix_owners(nanobind::module_& module);

}  // namespace kv
