// What Python sees of the reading of requests.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_request_scan(nanobind::module_& module);

}  // namespace kv
