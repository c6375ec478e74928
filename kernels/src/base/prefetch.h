// Asks for a line of memory ahead of use.
#pragma once

namespace kv {

// GCC 12 takes a function that only prefetches for one without effect and drops calls of it,
// unless it is inlined before that is found out: so must be every caller that does nothing else.
#define KV_PREFETCHES [[gnu::always_inline]] inline

KV_PREFETCHES void prefetch_line(const void* address) { __builtin_prefetch(address); }

}  // namespace kv
