// The prefix index as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_prefix_index(nanobind::module_& module);

}  // namespace kv
