// What each idle session counts at home: the chance that it returns soon enough for its memory to
// pay (router/core/sessions/sessions.py and return_hazard.py say why; tests hold this to numpy).
#pragma once

#include "decision/columns.h"

#include <cstdint>
#include <span>
#include <vector>

namespace kv::sessions {

// The table of sessions, one row each; a session is idle while it has no request in flight.
struct Table {
  std::span<const std::int64_t> serial, inflight, home;  // serial 0: nobody's row; home -1: none
  Doubles idle_s, private_tokens, cold_work;
  std::span<std::int64_t> bin;  // of idle time, as counted for the hazard; -1: not yet
  std::span<double> weight;
};

// By how long it has been idle: where bins begin, and the log of the share still away there.
struct Hazard {
  Doubles edges_s, away;
};

struct Limits {
  double least_chance;  // below it a session wants no memory
  double forget_s;      // longest idle time to remember; no horizon is longer
  double unknown_s;     // horizon where the worker's memory is unknown
};

// Puts each idle session of the first `used` rows into the bin of its idle time, appends to
// `before` and `now` the bins of those that moved, and returns how many are idle.
std::size_t enter_bins(const Table& table, std::size_t used, double now_s, Doubles edges_s,
                       std::vector<std::int64_t>& before, std::vector<std::int64_t>& now);

// Weighs each idle session that is at home, and appends the rows of those that are not likely
// enough to return, and of those that have been away for too long. `speeds` and `capacities` are
// by worker slot, which no home is beyond.
void weigh(const Table& table, std::size_t used, double now_s, const Hazard& hazard,
           Doubles speeds, Doubles capacities, const Limits& limits,
           std::vector<std::int64_t>& unlikely, std::vector<std::int64_t>& over);

// Writes to both, by worker slot, what the sessions at home there want, each by its weight.
void sum_up(const Table& table, std::size_t used, std::span<double> private_tokens,
            std::span<double> cold_work);

}  // namespace kv::sessions
