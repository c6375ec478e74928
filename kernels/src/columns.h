// Arithmetic over the columns of a pool, one row a worker, that every decision does.
#pragma once

#include <cstdint>
#include <span>

namespace kv {

using Doubles = std::span<const double>;

// Raises drained[i] by rate[i] * elapsed_s, to at most charged[i] and limit[i]; it never falls.
// All four have the same length.
void drain_queues(std::span<double> drained, Doubles rate, Doubles charged, Doubles limit,
                  double elapsed_s);

// Writes to missing[i] the prompt tokens that row i lacks, each at 1 / (rows that hold it), and at
// least the last one. `hits` and `missing` have the same length.
void missing_tokens(std::span<const std::int64_t> hits, std::int64_t prompt_tokens,
                    double* missing);

}  // namespace kv
