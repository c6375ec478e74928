#include "bindings.h"

#include "arguments.h"
#include "decision/columns.h"
#include "results.h"

#include <algorithm>
#include <optional>

namespace nb = nanobind;
using kv::arguments::integer;
using kv::arguments::number;

// These keep the GIL: they take less time than giving it away does.
namespace calls {

void drain_queues(nb::handle drained, nb::handle rate, nb::handle charged, nb::handle limit,
                  nb::handle elapsed_s) {
  const kv::arguments::Column drains(drained, "drained");
  const kv::arguments::Column rates(rate, "rate");
  const kv::arguments::Column charges(charged, "charged");
  const kv::arguments::Column limits(limit, "limit");
  const std::size_t rows = drains.span().size();
  if (rates.span().size() != rows || charges.span().size() != rows ||
      limits.span().size() != rows) {
    throw nb::value_error("drained, rate, charged and limit must have the same length");
  }
  kv::drain_queues(drains.writable("drained"), rates.span(), charges.span(), limits.span(),
                   number(elapsed_s, "elapsed_s"));
}

auto missing_tokens(nb::handle hit_tokens, nb::handle prompt_tokens) {
  const kv::arguments::Counts hits(hit_tokens, "hit_tokens");
  kv::Result<double> missing(hits.span().size());
  kv::missing_tokens(hits.span(), integer(prompt_tokens, "prompt_tokens"), missing.data());
  return missing.give();
}

// Slots that lie within columns of so many rows.
void within(std::span<const std::int64_t> slots, std::size_t rows) {
  for (const std::int64_t slot : slots) {
    if (slot < 0 || static_cast<std::size_t>(slot) >= rows) {
      throw nb::value_error("slots must lie within the columns");
    }
  }
}

auto hit_tokens(nb::handle blocks, nb::handle slots, nb::handle block_size, nb::handle most) {
  const kv::arguments::Tokens held(blocks, "blocks");  // int32 as well
  const kv::arguments::Counts rows(slots, "slots");
  within(rows.span(), held.span().size());
  kv::Result<std::int64_t> hits(rows.span().size());
  kv::hit_tokens(held.span(), rows.span(), integer(block_size, "block_size"),
                 integer(most, "most"), hits.data());
  return hits.give();
}

double median_product(nb::handle a, nb::handle b, nb::handle slots) {
  const kv::arguments::Column left(a, "a");
  const kv::arguments::Column right(b, "b");
  const kv::arguments::Counts rows(slots, "slots");
  within(rows.span(), std::min(left.span().size(), right.span().size()));
  return kv::median_product(left.span(), right.span(), rows.span());
}

auto load_tokens(nb::handle charged, nb::handle drained, nb::handle token_work,
                 nb::handle requests, nb::handle slots, nb::handle step_tokens) {
  const kv::arguments::Column charges(charged, "charged");
  const kv::arguments::Column drains(drained, "drained");
  const kv::arguments::Counts counts(requests, "requests");
  const kv::arguments::Counts rows(slots, "slots");
  std::size_t least = std::min(charges.span().size(), drains.span().size());
  least = std::min(least, counts.span().size());
  std::optional<kv::arguments::Column> work;
  if (!token_work.is_none()) {
    work.emplace(token_work, "token_work");
    least = std::min(least, work->span().size());
  }
  within(rows.span(), least);
  kv::Result<double> load(rows.span().size());
  kv::load_tokens(charges.span(), drains.span(), work ? work->span() : kv::Doubles{},
                  counts.span(), rows.span(), number(step_tokens, "step_tokens"), load.data());
  return load.give();
}

double sum_of(nb::handle column, nb::handle slots) {
  const kv::arguments::Column values(column, "column");
  const kv::arguments::Counts rows(slots, "slots");
  within(rows.span(), values.span().size());
  return kv::sum_of(values.span(), rows.span());
}

double sum_of_least(nb::handle a, double times, nb::handle b, nb::handle slots) {
  const kv::arguments::Column left(a, "a");
  const kv::arguments::Column right(b, "b");
  const kv::arguments::Counts rows(slots, "slots");
  within(rows.span(), std::min(left.span().size(), right.span().size()));
  return kv::sum_of_least(left.span(), times, right.span(), rows.span());
}

auto leading(nb::handle hit_tokens) {
  const kv::arguments::Counts hits(hit_tokens, "hit_tokens");
  if (hits.span().empty()) throw nb::value_error("hit_tokens must not be empty");
  const kv::Leading found = kv::leading(hits.span());
  return nb::make_tuple(found.row, found.tokens, found.others);
}

std::int64_t cheapest(nb::handle costs, nb::handle draw) {
  const kv::arguments::Column all(costs, "costs");
  const double drawn = number(draw, "draw");
  if (!(drawn >= 0.0 && drawn < 1.0)) throw nb::value_error("draw must be in [0, 1)");
  const std::int64_t row = kv::cheapest(all.span(), drawn);
  if (row == kv::kNoNumber) throw nb::value_error("a cost is finite or +inf");
  return row;
}

}  // namespace calls

namespace kv {

void bind_columns(nb::module_& module) {
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  module.def("drain_queues", calls::drain_queues, arg("drained"), arg("rate"), arg("charged"),
             arg("limit"), arg("elapsed_s"),
             nb::sig("def drain_queues(drained: Column, rate: Column, charged: Column, "
                     "limit: Column, elapsed_s: float) -> None"),
             "Raise each `drained` by rate x elapsed_s, to at most `charged` and `limit`.");
  module.def("missing_tokens", calls::missing_tokens, arg("hit_tokens"), arg("prompt_tokens"),
             nb::sig("def missing_tokens(hit_tokens: Ids, prompt_tokens: int) -> Column"),
             "float64[rows]: tokens each row lacks, each at 1 / (rows that hold it).");
  module.def("hit_tokens", calls::hit_tokens, arg("blocks"), arg("slots"), arg("block_size"),
             arg("most"),
             nb::sig("def hit_tokens(blocks: Hits, slots: Ids, block_size: int, most: int) -> Ids"),
             "int64[slots]: tokens of the blocks that each holds, at most so many.");
  module.def("median_product", calls::median_product, arg("a"), arg("b"), arg("slots"),
             nb::sig("def median_product(a: Column, b: Column, slots: Ids) -> float"),
             "The median of a x b over these slots; 0 of none.");
  module.def("load_tokens", calls::load_tokens, arg("charged"), arg("drained"), arg("token_work"),
             arg("requests"), arg("slots"), arg("step_tokens"),
             nb::sig("def load_tokens(charged: Column, drained: Column, "
                     "token_work: Column | None, requests: Ids, slots: Ids, step_tokens: float) "
                     "-> Column"),
             "float64[slots]: tokens queued there, and `step_tokens` for each request.");
  module.def("sum_of", calls::sum_of, arg("column"), arg("slots"),
             nb::sig("def sum_of(column: Column, slots: Ids) -> float"),
             "The sum over these slots, rounded as numpy rounds it.");
  module.def("sum_of_least", calls::sum_of_least, arg("a"), nb::arg("times"), arg("b"),
             arg("slots"),
             nb::sig("def sum_of_least(a: Column, times: float, b: Column, slots: Ids) -> float"),
             "The sum over these slots of the lesser of a x times and b.");
  module.def("leading", calls::leading, arg("hit_tokens"),
             nb::sig("def leading(hit_tokens: Ids) -> tuple[int, int, int]"),
             "(First row with the most tokens, these, the most of any other row or 0.)");
  module.def("cheapest", calls::cheapest, arg("costs"), arg("draw"),
             nb::sig("def cheapest(costs: Column, draw: float) -> int"),
             "The row of the lowest cost, drawn among equal ones; -1 where all are infinite.");
}

}  // namespace kv
