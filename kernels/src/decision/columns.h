// Arithmetic over the columns of a pool, one row a worker, that every decision does.
#pragma once

#include <cstdint>
#include <span>

namespace kv {

using Doubles = std::span<const double>;
using Slots = std::span<const std::int64_t>;  // rows of a column, in the order of the workers

// Raises drained[i] by rate[i] * elapsed_s, to at most charged[i] and limit[i]; it never falls.
// All four have the same length.
void drain_queues(std::span<double> drained, Doubles rate, Doubles charged, Doubles limit,
                  double elapsed_s);

// Writes to missing[i] the prompt tokens that row i lacks, each at 1 / (rows that hold it), and at
// least the last one. `hits` and `missing` have the same length.
void missing_tokens(std::span<const std::int64_t> hits, std::int64_t prompt_tokens,
                    double* missing);

// Writes to hits[i] the tokens of the blocks that the worker in slots[i] holds, at most `most`.
// No slot is beyond `blocks`.
void hit_tokens(std::span<const std::int32_t> blocks, Slots slots, std::int64_t block_size,
                std::int64_t most, std::int64_t* hits);

// The median of a[slot] * b[slot]; 0 of no slots, NaN where a product is none.
double median_product(Doubles a, Doubles b, Slots slots);

// Writes to load[i] the tokens queued in slots[i], and `step_tokens` for each of its requests.
// `token_work` is empty where a token's work is 1.
void load_tokens(Doubles charged, Doubles drained, Doubles token_work,
                 std::span<const std::int64_t> requests, Slots slots, double step_tokens,
                 double* load);

// The sum, rounded as numpy rounds it: eight sums side by side, halves of more than 128.
double pairwise_sum(Doubles values);

// That of column[slot].
double sum_of(Doubles column, Slots slots);

// That of the lesser of times * a[slot] and b[slot]; NaN where one is.
double sum_of_least(Doubles a, double times, Doubles b, Slots slots);

// The first row with the most tokens, these, and the most of any other row, 0 or more.
struct Leading {
  std::size_t row;
  std::int64_t tokens, others;
};
Leading leading(std::span<const std::int64_t> hits);

inline constexpr std::int64_t kHold = -1;      // nobody: all costs are infinite, or there are none
inline constexpr std::int64_t kNoNumber = -2;  // a cost is NaN or -inf

// The row of the lowest cost, drawn among equal ones (`policies.pick` says which are); `draw` is
// in [0, 1).
std::int64_t cheapest(Doubles costs, double draw);

}  // namespace kv
