// The mirror as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_mirror(nanobind::module_& module);

}  // namespace kv
