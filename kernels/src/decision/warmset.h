// The costs of the default policy over the columns of a pool, in one pass: the native twin of
// policies/warmset.py, which says what each term means. Results are equal to the last bit.
#pragma once

#include "decision/columns.h"

#include <cstdint>
#include <span>
#include <vector>

namespace kv::warmset {

// The workers' columns (router/core/workers/columns.py), one row a slot.
struct Columns {
  std::span<const std::int64_t> worker_id;
  Doubles charged_work, drained_work, token_work;
  std::span<const std::int64_t> requests, foreign_running, foreign_waiting;
  std::span<const std::int64_t> waiting_prompt_tokens;
  Doubles report_s, context_tokens, own_tokens_at_report, kv_reported_tokens;
  Doubles kv_capacity_tokens, cached_tokens, prefill_tokens_per_s, step_s;
  // Sums over the sessions at home on the worker, and over blocks of no known session.
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
  double return_chance, held_s;  // held_s: +inf if the request would be refused now
  // What its own session adds to the sums of the worker in `own_slot`, its home; -1: it has none.
  std::int64_t own_slot;
  double own_tokens, own_work;
  // By slot: sessions with its trunk are at home there.
  std::span<const bool> holds_trunk;
  bool own_trunk_alone;  // in `own_slot` its own session is the only one of these
  std::int64_t hot_trunk_tokens, wanted_copies;  // 0, 0: the prompt begins with no hot trunk
  double turnover_per_s, cycle_s, pair_tokens;
  // Requests of other clients count where their report is at most this old; -inf: nowhere.
  double now_s, foreign_load_max_age_s;
};

// Writes one cost a row, in seconds, +inf where the worker is closed to the request. `hits`,
// `slots` and `costs` have the same length, above 0, and no slot is beyond the columns.
void costs(const Columns& columns, const Parameters& parameters, const Request& request,
           std::span<const std::int64_t> hits, Slots slots, double* costs);

}  // namespace kv::warmset
