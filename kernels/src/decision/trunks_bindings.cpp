// Python's side of the hot trunks. They keep the GIL: they take less than giving it away does.
#include "bindings.h"

#include "arguments.h"
#include "decision/trunks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

namespace nb = nanobind;
using kv::Trunk;
using kv::Trunks;
using kv::arguments::Hashes;
using kv::arguments::in_range;
using kv::arguments::integer;
using kv::arguments::number;

namespace {

constexpr std::int64_t kHeadsMost = 1 << 20;
constexpr std::int64_t kWorkersMost = std::int64_t{1} << 30;

auto arg(const char* name) { return nb::arg(name).none(); }

}  // namespace

// What nanobind calls.
namespace calls {

void make_trunks(Trunks* self, nb::handle heads) {
  new (self) Trunks(static_cast<std::size_t>(in_range(heads, "heads", 1, kHeadsMost)));
}

void pool(Trunks& self, nb::handle workers, nb::handle prefill_tokens_per_s, nb::handle answer_s,
          nb::handle capacity_tokens, nb::handle now_s) {
  self.pool({.workers = in_range(workers, "workers", 0, kWorkersMost),
             .prefill_tokens_per_s = number(prefill_tokens_per_s, "prefill_tokens_per_s"),
             .answer_s = number(answer_s, "answer_s"),
             .capacity_tokens = number(capacity_tokens, "capacity_tokens")},
            number(now_s, "now_s"));
}

void arrival(Trunks& self, nb::handle chain, nb::handle block_size, nb::handle prompt_tokens,
             nb::handle shared_blocks, nb::handle known_blocks, nb::handle now_s) {
  const Hashes hashes(chain, "chain");
  const auto most = static_cast<std::int64_t>(hashes.span().size());
  self.arrival(hashes.span(), in_range(block_size, "block_size", 1, 1 << 30),
               integer(prompt_tokens, "prompt_tokens"),
               in_range(shared_blocks, "shared_blocks", 0, most),
               in_range(known_blocks, "known_blocks", 0, most), number(now_s, "now_s"));
}

std::optional<Trunk> trunk_of(Trunks& self, nb::handle chain) {
  const Hashes hashes(chain, "chain");
  return self.of(hashes.span());
}

std::vector<Trunk> table(Trunks& self) { return self.table(); }

}  // namespace calls

void kv::bind_trunks(nb::module_& module) {
  nb::class_<Trunk>(module, "Trunk", "A head of prompts, as it stood when it was asked for.")
      .def_ro("last_hash", &Trunk::last_hash, "Chain hash of its last block.")
      .def_ro("tokens", &Trunk::tokens, "Its length.")
      .def_ro("rate_per_s", &Trunk::rate_per_s, "Arrivals that begin with it; a lower bound.")
      .def_ro("share", &Trunk::share, "Of all arrivals, 0..1.")
      .def_ro("demand", &Trunk::demand,
              "Seconds of work they bring per second, the trunk itself not counted.")
      .def_ro("backlog_s", &Trunk::backlog_s, "Seconds of work that its copies have not got done.")
      .def_ro("wanted_copies", &Trunk::wanted_copies, "Workers that should hold it, at least 1.");
  nb::class_<Trunks>(module, "Trunks", "The heads of prompts that weigh most.")
      .def("__init__", calls::make_trunks, arg("heads") = 256,
           nb::sig("def __init__(self, heads: int = 256) -> None"))
      .def("pool", calls::pool, arg("workers"), arg("prefill_tokens_per_s"), arg("answer_s"),
           arg("capacity_tokens"), arg("now_s"),
           nb::sig("def pool(self, workers: int, prefill_tokens_per_s: float, answer_s: float, "
                   "capacity_tokens: float, now_s: float) -> None"),
           "What the workers can do now.")
      .def("arrival", calls::arrival, arg("chain"), arg("block_size"), arg("prompt_tokens"),
           arg("shared_blocks"), arg("known_blocks"), arg("now_s"),
           nb::sig("def arrival(self, chain: Buffer, block_size: int, prompt_tokens: int, "
                   "shared_blocks: int, known_blocks: int, now_s: float) -> None"),
           "A request came in.")
      .def("of", calls::trunk_of, arg("chain"),
           nb::sig("def of(self, chain: Buffer) -> Trunk | None"),
           "The trunk a prompt begins with: the longest that wants copies, else the longest.")
      .def("table", calls::table, nb::sig("def table(self) -> list[Trunk]"),
           "All heads kept, the greatest demand first.")
      .def("__len__", &Trunks::size, "Heads kept.")
      .def_prop_ro("replaced", &Trunks::replaced, "Heads that gave way to another.");
}
