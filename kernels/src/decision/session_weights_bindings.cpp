// Python's side of the weights of sessions. They keep the GIL, for Python writes to the same table.
#include "bindings.h"

#include "arguments.h"
#include "decision/session_weights.h"
#include "results.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
namespace sessions = kv::sessions;
using kv::arguments::Column;
using kv::arguments::Counts;

namespace {

auto given(const std::vector<std::int64_t>& values) {
  kv::Result<std::int64_t> result(values.size());
  std::copy(values.begin(), values.end(), result.data());
  return result.give();
}

// The table where it lies. Lifetime: process.
class SessionWeights {
 public:
  SessionWeights(nb::dict columns, const sessions::Limits& limits)
      : serial_(columns["serial"], "serial"), inflight_(columns["inflight"], "inflight"),
        home_(columns["home"], "home"), bin_(columns["bin"], "bin"),
        idle_s_(columns["idle_s"], "idle_s"),
        private_tokens_(columns["private_tokens"], "private_tokens"),
        cold_work_(columns["cold_work"], "cold_work"), weight_(columns["weight"], "weight"),
        limits_(limits) {
    table_ = {
        .serial = serial_.span(),
        .inflight = inflight_.span(),
        .home = home_.span(),
        .idle_s = idle_s_.span(),
        .private_tokens = private_tokens_.span(),
        .cold_work = cold_work_.span(),
        .bin = bin_.writable("bin"),
        .weight = weight_.writable("weight"),
    };
    const std::size_t rows = table_.serial.size();
    for (const std::size_t other :
         {table_.inflight.size(), table_.home.size(), table_.idle_s.size(),
          table_.private_tokens.size(), table_.cold_work.size(), table_.bin.size(),
          table_.weight.size()}) {
      if (other != rows) throw nb::value_error("the columns must have the same length");
    }
  }
  SessionWeights(const SessionWeights&) = delete;
  SessionWeights& operator=(const SessionWeights&) = delete;

  auto enter_bins(std::size_t used, double now_s, const Column& edges_s) const {
    check_used(used);
    if (edges_s.span().empty()) throw nb::value_error("edges_s must not be empty");
    std::vector<std::int64_t> before, now;
    const std::size_t idle =
        sessions::enter_bins(table_, used, now_s, edges_s.span(), before, now);
    return nb::make_tuple(idle, given(before), given(now));
  }

  auto weigh(std::size_t used, double now_s, const Column& edges_s, const Column& away,
             const Column& speeds, const Column& capacities) const {
    check_used(used);
    if (edges_s.span().empty() || away.span().size() != edges_s.span().size()) {
      throw nb::value_error("edges_s and away must have the same length, 1 or more");
    }
    check_homes(used, std::min(speeds.span().size(), capacities.span().size()));
    std::vector<std::int64_t> unlikely, over;
    sessions::weigh(table_, used, now_s, {edges_s.span(), away.span()}, speeds.span(),
                    capacities.span(), limits_, unlikely, over);
    return nb::make_tuple(given(unlikely), given(over));
  }

  void sum_up(std::size_t used, const Column& private_tokens, const Column& cold_work) const {
    check_used(used);
    check_homes(used, std::min(private_tokens.span().size(), cold_work.span().size()));
    sessions::sum_up(table_, used, private_tokens.writable("private_tokens"),
                     cold_work.writable("cold_work"));
  }

 private:
  void check_used(std::size_t used) const {
    if (used > table_.serial.size()) throw nb::value_error("used must lie within the table");
  }
  void check_homes(std::size_t used, std::size_t slots) const {
    for (const std::int64_t slot : table_.home.first(used)) {
      if (slot >= static_cast<std::int64_t>(slots)) {
        throw nb::value_error("a home must lie within the columns of workers");
      }
    }
  }

  Counts serial_, inflight_, home_, bin_;
  Column idle_s_, private_tokens_, cold_work_, weight_;
  sessions::Table table_{};
  sessions::Limits limits_;
};

}  // namespace

// What nanobind calls.
namespace calls {

void make_session_weights(SessionWeights* self, nb::dict columns, double least_chance,
                          double forget_s, double unknown_s) {
  new (self) SessionWeights(columns, {least_chance, forget_s, unknown_s});
}

auto enter_bins(const SessionWeights& self, std::size_t used, double now_s, nb::handle edges_s) {
  return self.enter_bins(used, now_s, Column(edges_s, "edges_s"));
}

auto weigh(const SessionWeights& self, std::size_t used, double now_s, nb::handle edges_s,
           nb::handle away, nb::handle speeds, nb::handle capacities) {
  return self.weigh(used, now_s, Column(edges_s, "edges_s"), Column(away, "away"),
                    Column(speeds, "speeds"), Column(capacities, "capacities"));
}

void sum_up(const SessionWeights& self, std::size_t used, nb::handle private_tokens,
            nb::handle cold_work) {
  self.sum_up(used, Column(private_tokens, "private_tokens"), Column(cold_work, "cold_work"));
}

}  // namespace calls

void kv::bind_session_weights(nb::module_& module) {
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  nb::class_<SessionWeights>(module, "SessionWeights", "Weighs sessions by chances of return.")
      .def("__init__", calls::make_session_weights, nb::arg("columns"), nb::arg("least_chance"),
           nb::arg("forget_s"), nb::arg("unknown_s"),
           nb::sig("def __init__(self, columns: dict[str, Column | Ids], least_chance: float, "
                   "forget_s: float, unknown_s: float) -> None"))
      .def("enter_bins", calls::enter_bins, nb::arg("used"), nb::arg("now_s"), arg("edges_s"),
           nb::sig("def enter_bins(self, used: int, now_s: float, edges_s: Column) "
                   "-> tuple[int, Ids, Ids]"),
           "(Idle sessions, bins before and now of those that moved on.)")
      .def("weigh", calls::weigh, nb::arg("used"), nb::arg("now_s"), arg("edges_s"), arg("away"),
           arg("speeds"), arg("capacities"),
           nb::sig("def weigh(self, used: int, now_s: float, edges_s: Column, away: Column, "
                   "speeds: Column, capacities: Column) -> tuple[Ids, Ids]"),
           "(Rows of those not likely to return, rows of those away for too long.)")
      .def("sum_up", calls::sum_up, nb::arg("used"), arg("private_tokens"), arg("cold_work"),
           nb::sig("def sum_up(self, used: int, private_tokens: Column, cold_work: Column) "
                   "-> None"),
           "Write by worker slot what the sessions at home want, each by its weight.");
}
