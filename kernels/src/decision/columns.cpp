#include "decision/columns.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

namespace kv {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kTie = 1e-9;  // costs this close, relative to the best or absolute, are equal

}  // namespace

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

void hit_tokens(std::span<const std::int32_t> blocks, Slots slots, std::int64_t block_size,
                std::int64_t most, std::int64_t* hits) {
  for (std::size_t row = 0; row < slots.size(); ++row) {
    hits[row] = std::min(blocks[static_cast<std::size_t>(slots[row])] * block_size, most);
  }
}

double median_product(Doubles a, Doubles b, Slots slots) {
  const std::size_t rows = slots.size();
  if (rows == 0) return 0.0;
  std::vector<double> products(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    const auto slot = static_cast<std::size_t>(slots[row]);
    products[row] = a[slot] * b[slot];
    if (std::isnan(products[row])) return products[row];  // it has no place in an order
  }
  const auto middle = products.begin() + static_cast<std::ptrdiff_t>(rows / 2);
  std::nth_element(products.begin(), middle, products.end());
  const double below = rows % 2 == 1 ? *middle : *std::max_element(products.begin(), middle);
  return (*middle + below) / 2;
}

void load_tokens(Doubles charged, Doubles drained, Doubles token_work,
                 std::span<const std::int64_t> requests, Slots slots, double step_tokens,
                 double* load) {
  for (std::size_t row = 0; row < slots.size(); ++row) {
    const auto slot = static_cast<std::size_t>(slots[row]);
    double queued = charged[slot] - drained[slot];
    if (!token_work.empty()) queued /= token_work[slot];
    load[row] = queued + static_cast<double>(requests[slot]) * step_tokens;
  }
}

std::int64_t cheapest(Doubles costs, double draw) {
  double best = kInfinite;
  for (const double cost : costs) {
    if (!(cost > -kInfinite)) return kNoNumber;
    best = std::min(best, cost);
  }
  if (best == kInfinite) return kHold;
  const double most = best + kTie * std::max(1.0, std::abs(best));
  const auto equal = [&](double cost) { return cost <= most; };
  auto left = static_cast<std::int64_t>(
      draw * static_cast<double>(std::count_if(costs.begin(), costs.end(), equal)));
  std::size_t row = 0;
  while (!equal(costs[row]) || left-- > 0) ++row;
  return static_cast<std::int64_t>(row);
}

double pairwise_sum(Doubles values) {
  const std::size_t size = values.size();
  if (size < 8) {
    double total = 0.0;
    for (const double value : values) total += value;
    return total;
  }
  if (size <= 128) {
    std::array<double, 8> totals{};
    std::copy_n(values.begin(), 8, totals.begin());
    std::size_t at = 8;
    for (; at + 8 <= size; at += 8) {
      for (std::size_t lane = 0; lane < 8; ++lane) totals[lane] += values[at + lane];
    }
    double total = ((totals[0] + totals[1]) + (totals[2] + totals[3])) +
                   ((totals[4] + totals[5]) + (totals[6] + totals[7]));
    for (; at < size; ++at) total += values[at];
    return total;
  }
  const std::size_t half = size / 2 - size / 2 % 8;
  return pairwise_sum(values.first(half)) + pairwise_sum(values.subspan(half));
}

double sum_of(Doubles column, Slots slots) {
  std::vector<double> values(slots.size());
  std::transform(slots.begin(), slots.end(), values.begin(),
                 [&](std::int64_t slot) { return column[static_cast<std::size_t>(slot)]; });
  return pairwise_sum(values);
}

double sum_of_least(Doubles a, double times, Doubles b, Slots slots) {
  std::vector<double> values(slots.size());
  std::transform(slots.begin(), slots.end(), values.begin(), [&](std::int64_t slot) {
    const auto at = static_cast<std::size_t>(slot);
    const double left = a[at] * times;
    return left <= b[at] || std::isnan(left) ? left : b[at];
  });
  return pairwise_sum(values);
}

Leading leading(std::span<const std::int64_t> hits) {
  const auto most = std::max_element(hits.begin(), hits.end());
  std::int64_t others = 0;
  for (auto hit = hits.begin(); hit != hits.end(); ++hit) {
    if (hit != most) others = std::max(others, *hit);
  }
  return {static_cast<std::size_t>(most - hits.begin()), *most, others};
}

}  // namespace kv
