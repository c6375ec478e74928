// Python's side of the default policy's costs. They keep the GIL: they take less than that does.
#include "bindings.h"

#include "arguments.h"
#include "decision/warmset.h"
#include "results.h"

#include <memory>
#include <string>
#include <vector>

namespace nb = nanobind;
namespace warmset = kv::warmset;
using kv::arguments::Column;
using kv::arguments::Counts;
using kv::arguments::Flags;

namespace {

auto arg(const char* name) { return nb::arg(name).none(); }

// The columns where they lie, which may be written to between calls. Lifetime: process.
class WarmsetCosts {
 public:
  WarmsetCosts(nb::dict columns, const warmset::Parameters& parameters) : parameters_(parameters) {
    columns_ = {
        .worker_id = counts(columns, "worker_id"),
        .charged_work = column(columns, "charged_work"),
        .drained_work = column(columns, "drained_work"),
        .token_work = column(columns, "token_work"),
        .requests = counts(columns, "requests"),
        .foreign_running = counts(columns, "foreign_running"),
        .foreign_waiting = counts(columns, "foreign_waiting"),
        .waiting_prompt_tokens = counts(columns, "waiting_prompt_tokens"),
        .report_s = column(columns, "report_s"),
        .context_tokens = column(columns, "context_tokens"),
        .own_tokens_at_report = column(columns, "own_tokens_at_report"),
        .kv_reported_tokens = column(columns, "kv_reported_tokens"),
        .kv_capacity_tokens = column(columns, "kv_capacity_tokens"),
        .cached_tokens = column(columns, "cached_tokens"),
        .prefill_tokens_per_s = column(columns, "prefill_tokens_per_s"),
        .step_s = column(columns, "step_s"),
        .private_tokens = column(columns, "private_tokens"),
        .trunk_tokens = column(columns, "trunk_tokens"),
        .cold_work = column(columns, "cold_work"),
        .unowned_tokens = column(columns, "unowned_tokens"),
    };
  }
  WarmsetCosts(const WarmsetCosts&) = delete;
  WarmsetCosts& operator=(const WarmsetCosts&) = delete;

  auto costs(const Counts& slots, const Counts& hits, const Flags& holds_trunk,
             warmset::Request request) const {
    const std::size_t rows = slots.span().size(), most = columns_.worker_id.size();
    if (rows == 0 || hits.span().size() != rows) {
      throw nb::value_error("slots and hit_tokens must have the same length, 1 or more");
    }
    if (holds_trunk.span().size() != most) {
      throw nb::value_error("holds_trunk must be as long as the columns");
    }
    for (const std::int64_t slot : slots.span()) {
      if (slot < 0 || static_cast<std::size_t>(slot) >= most) {
        throw nb::value_error("slots must lie within the columns");
      }
    }
    request.holds_trunk = holds_trunk.span();
    kv::Result<double> costs(rows);
    warmset::costs(columns_, parameters_, request, hits.span(), slots.span(), costs.data());
    return costs.give();
  }

 private:
  template <class Kind>
  auto keep(std::vector<std::unique_ptr<Kind>>& all, nb::dict columns, const char* name) {
    all.push_back(std::make_unique<Kind>(columns[name], name));
    const auto span = all.back()->span();
    if (length_ == 0) length_ = span.size();
    if (span.size() != length_) {
      throw nb::value_error((std::string(name) + " must be as long as the others").c_str());
    }
    return span;
  }
  kv::Doubles column(nb::dict columns, const char* name) {
    return keep(doubles_, columns, name);
  }
  std::span<const std::int64_t> counts(nb::dict columns, const char* name) {
    return keep(integers_, columns, name);
  }

  std::vector<std::unique_ptr<Column>> doubles_;
  std::vector<std::unique_ptr<Counts>> integers_;
  std::size_t length_ = 0;
  warmset::Columns columns_{};
  warmset::Parameters parameters_;
};

}  // namespace

// What nanobind calls.
namespace calls {

void make_warmset(WarmsetCosts* self, nb::dict columns, double gate, double stay, double running) {
  new (self) WarmsetCosts(columns, {gate, stay, running});
}

auto warmset_costs(const WarmsetCosts& self, nb::handle slots, nb::handle hit_tokens,
                   std::int64_t prompt_tokens, std::int64_t trunk_tokens, int standing,
                   std::int64_t home_id, double return_chance, double held_s,
                   std::int64_t own_slot, double own_tokens, double own_work,
                   nb::handle holds_trunk, bool own_trunk_alone, std::int64_t hot_trunk_tokens,
                   std::int64_t wanted_copies, double turnover_per_s, double cycle_s,
                   double pair_tokens, double now_s, double foreign_load_max_age_s) {
  if (standing < 0 || standing > 2) throw nb::value_error("standing is 0, 1 or 2");
  return self.costs(Counts(slots, "slots"), Counts(hit_tokens, "hit_tokens"),
                    Flags(holds_trunk, "holds_trunk"),
                    {.prompt_tokens = prompt_tokens,
                     .trunk_tokens = trunk_tokens,
                     .standing = static_cast<warmset::Standing>(standing),
                     .home_id = home_id,
                     .return_chance = return_chance,
                     .held_s = held_s,
                     .own_slot = own_slot,
                     .own_tokens = own_tokens,
                     .own_work = own_work,
                     .holds_trunk = {},
                     .own_trunk_alone = own_trunk_alone,
                     .hot_trunk_tokens = hot_trunk_tokens,
                     .wanted_copies = wanted_copies,
                     .turnover_per_s = turnover_per_s,
                     .cycle_s = cycle_s,
                     .pair_tokens = pair_tokens,
                     .now_s = now_s,
                     .foreign_load_max_age_s = foreign_load_max_age_s});
}

}  // namespace calls

void kv::bind_warmset(nb::module_& module) {
  nb::class_<WarmsetCosts>(module, "WarmsetCosts", "Costs of `policies.warmset` over columns.")
      .def("__init__", calls::make_warmset, nb::arg("columns"), nb::arg("gate"), nb::arg("stay"),
           nb::arg("running"),
           nb::sig("def __init__(self, columns: dict[str, Column | Ids], gate: float, "
                   "stay: float, running: float) -> None"))
      .def("costs", calls::warmset_costs, arg("slots"), arg("hit_tokens"),
           nb::arg("prompt_tokens"), nb::arg("trunk_tokens"), nb::arg("standing"),
           nb::arg("home_id"), nb::arg("return_chance"), nb::arg("held_s"), nb::arg("own_slot"),
           nb::arg("own_tokens"), nb::arg("own_work"), arg("holds_trunk"),
           nb::arg("own_trunk_alone"), nb::arg("hot_trunk_tokens"), nb::arg("wanted_copies"),
           nb::arg("turnover_per_s"), nb::arg("cycle_s"), nb::arg("pair_tokens"),
           nb::arg("now_s"), nb::arg("foreign_load_max_age_s"),
           nb::sig("def costs(self, slots: Ids, hit_tokens: Ids, prompt_tokens: int, "
                   "trunk_tokens: int, standing: int, home_id: int, return_chance: float, "
                   "held_s: float, own_slot: int, own_tokens: float, own_work: float, "
                   "holds_trunk: Flags, own_trunk_alone: bool, hot_trunk_tokens: int, "
                   "wanted_copies: int, turnover_per_s: float, cycle_s: float, "
                   "pair_tokens: float, now_s: float, foreign_load_max_age_s: float) -> Column"),
           "float64[slots]: seconds, +inf where the request may not go.");
}
