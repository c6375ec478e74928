#include "columns_bindings.h"

#include "arguments.h"
#include "columns.h"
#include "results.h"

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
}

}  // namespace kv
