// The virtual worker as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_virtual_worker(nanobind::module_& module);

}  // namespace kv
