#include "columns.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace kv {

void drain_queues(std::span<double> drained, Doubles rate, Doubles charged, Doubles limit,
                  double elapsed_s) {
  for (std::size_t i = 0; i < drained.size(); ++i) {
    const double reached = rate[i] * elapsed_s + drained[i];
    drained[i] = std::max(std::min(std::min(reached, charged[i]), limit[i]), drained[i]);
  }
}

void missing_tokens(std::span<const std::int64_t> hits, std::int64_t prompt_tokens,
                    double* missing) {
  const std::size_t rows = hits.size();
  if (rows == 0) return;
  const auto hit = [&](std::size_t row) { return std::min(hits[row], prompt_tokens - 1); };
  std::vector<std::uint32_t> order(rows);
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return hits[a] < hits[b]; });
  // Between the hits of neighbours in this order, the tokens are held by all further rows.
  double priced = 0.0;
  std::int64_t depth = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t next = hit(order[i]);
    priced += static_cast<double>(next - depth) / static_cast<double>(rows - i);
    depth = next;
    missing[order[i]] = priced;
  }
  const auto beyond = static_cast<double>(prompt_tokens - depth);
  for (std::size_t row = 0; row < rows; ++row) missing[row] = (priced - missing[row]) + beyond;
}

}  // namespace kv
