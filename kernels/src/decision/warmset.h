// The costs of the default policy (policies/warmset.py, which says what they mean and is what
// tests hold this to, to the last bit), over the columns of a pool in one pass.
#pragma once

#include "decision/columns.h"

#include <cstdint>
#include <span>
#include <vector>

namespace kv::warmset {

// What policies are given of the workers, each a column with one row a slot.
struct Columns {
  std::span<const std::int64_t> worker_id;
  Doubles charged_work, drained_work, token_work;
  std::span<const std::int64_t> requests, foreign_running, foreign_waiting;
  Doubles report_s, context_tokens, own_tokens_at_report, kv_reported_tokens;
  Doubles kv_capacity_tokens, cached_tokens, prefill_tokens_per_s, step_s;
  // Of the sessions at home there, and of blocks that nobody known owns.
  Doubles private_tokens, trunk_tokens, cold_work, unowned_tokens;
};

// The policy's parameters.
struct Parameters {
  double gate, stay, running;
};

enum class Standing : std::uint8_t { kNew, kCold, kWarm };

// One request, and what a decision sees of the pool beyond the columns.
struct Request {
  std::int64_t prompt_tokens, trunk_tokens;
  Standing standing;
  std::int64_t home_id;
  double return_chance, held_s;  // held: +inf where it is asked for the last time
  // What its own session adds to the sums of the worker where it is at home; -1: nowhere.
  std::int64_t own_slot;
  double own_tokens, own_work;
  // Where sessions with its trunk are at home, by slot; but not for itself alone in `own_slot`.
  std::span<const bool> holds_trunk;
  bool own_trunk_alone;
  std::int64_t hot_trunk_tokens, wanted_copies;  // 0, 0: there is none
  double turnover_per_s, cycle_s, pair_tokens;
  // Others' requests count where they were reported since then; +inf: nowhere.
  double now_s, believed_s;
};

// Writes one cost a row, in seconds, +inf where the request may not go. `hits`, `slots` and `costs`
// have the same length, above 0, and no slot is beyond the columns.
void costs(const Columns& columns, const Parameters& parameters, const Request& request,
           std::span<const std::int64_t> hits, Slots slots, double* costs);

}  // namespace kv::warmset
