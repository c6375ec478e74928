// What Python sees of the arithmetic over columns.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_columns(nanobind::module_& module);

}  // namespace kv
