// What each part of the core shows to Python: `bindings.cpp` calls these one after another.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_answers(nanobind::module_& module);
void bind_columns(nanobind::module_& module);
void bind_events(nanobind::module_& module);
void bind_hybrids(nanobind::module_& module);
void bind_mirror(nanobind::module_& module);
void bind_prefix_index(nanobind::module_& module);
void bind_prefix_owners(nanobind::module_& module);
void bind_reply_head(nanobind::module_& module);
void bind_request_head(nanobind::module_& module);
void bind_request_scan(nanobind::module_& module);
void bind_session_weights(nanobind::module_& module);
void bind_trunks(nanobind::module_& module);
void bind_virtual_worker(nanobind::module_& module);
void bind_warmset(nanobind::module_& module);

// Where there is a relay, `KV_RELAY`; the journal is bound with it.
void bind_relay(nanobind::module_& module);
void bind_journal(nanobind::module_& module);

}  // namespace kv
