// What Python sees of the reading of heads.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_request_head(nanobind::module_& module);

}  // namespace kv
