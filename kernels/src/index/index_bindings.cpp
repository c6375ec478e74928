#include "bindings.h"

#include <memory>
#include <string>

#include "arguments.h"
#include "index/prefix_index.h"
#include "results.h"

namespace nb = nanobind;
using kv::PrefixIndex;
using kv::arguments::Hashes;
using kv::arguments::integer;
using Unlocked = nb::gil_scoped_release;

namespace {

constexpr std::int64_t kUnbounded = std::int64_t{1} << 62;

// None reaches our own checks, which name the argument; nanobind would list signatures instead.
auto arg(const char* name) { return nb::arg(name).none(); }

void make(PrefixIndex* self, nb::handle workers, nb::handle max_entries, nb::handle max_bytes) {
  new (self) PrefixIndex(integer(workers, "workers"), integer(max_entries, "max_entries"),
                         integer(max_bytes, "max_bytes"));
}

int tier_of(nb::handle tier) {
  return static_cast<int>(kv::arguments::in_range(tier, "tier", 0, kv::kTiers - 1));
}

// The members that take (worker, hashes, tier) and count blocks.
template <auto member>
std::size_t count(PrefixIndex& self, nb::handle worker, nb::handle hashes, nb::handle tier) {
  const Hashes buffer(hashes, "hashes");
  const std::int64_t slot = integer(worker, "worker");
  const int of_tier = tier_of(tier);
  const Unlocked unlocked;
  return (self.*member)(slot, buffer.span(), of_tier);
}

std::size_t clear_worker(PrefixIndex& self, nb::handle worker) {
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.clear_worker(slot);
}

std::size_t held(const PrefixIndex& self, nb::handle worker, nb::handle tier) {
  const std::int64_t slot = integer(worker, "worker");
  const int of_tier = tier_of(tier);
  const Unlocked unlocked;
  return self.held(slot, of_tier);
}

std::size_t evicted_of(const PrefixIndex& self, nb::handle worker) {
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.evicted_of(slot);
}

auto longest_prefix(const PrefixIndex& self, nb::handle hashes) {
  const Hashes buffer(hashes, "hashes");
  kv::Result<std::int32_t> hits(self.workers());
  {
    const Unlocked unlocked;
    self.longest_prefix(buffer.span(), hits.data());
  }
  return hits.give();
}

void raise_prefix(const PrefixIndex& self, nb::handle hashes, nb::handle hits) {
  const Hashes buffer(hashes, "hashes");
  const kv::arguments::Depths raised(hits, "hits", self.workers());
  const Unlocked unlocked;
  self.raise_prefix(buffer.span(), raised.data());
}

auto longest_prefix_tiers(const PrefixIndex& self, nb::handle hashes) {
  const Hashes buffer(hashes, "hashes");
  kv::Result<std::int32_t> hits(kv::kTiers * self.workers());
  {
    const Unlocked unlocked;
    self.longest_prefix_tiers(buffer.span(), hits.data());
  }
  return hits.give_rows(kv::kTiers);
}

nb::bytes dump(const PrefixIndex& self) {
  std::string bytes;
  {
    const Unlocked unlocked;
    bytes = self.dump();
  }
  return nb::bytes(bytes.data(), bytes.size());
}

PrefixIndex* load(nb::handle data) {
  const kv::arguments::Bytes buffer(data, "data");
  const Unlocked unlocked;
  return PrefixIndex::load(buffer.span()).release();
}

}  // namespace

void kv::bind_prefix_index(nb::module_& module) {
  nb::class_<PrefixIndex>(module, "PrefixIndex", "Exact membership of (worker, block, tier).")
      .def("__init__", make, arg("workers"), arg("max_entries") = 1 << 20,
           arg("max_bytes") = kUnbounded,
           nb::sig("def __init__(self, workers: int, max_entries: int = 1048576, "
                   "max_bytes: int = 4611686018427387904) -> None"))
      .def("store", count<&PrefixIndex::store>, arg("worker"), arg("hashes"), arg("tier") = 0,
           nb::sig("def store(self, worker: int, hashes: Buffer, tier: int = 0) -> int"),
           "Say that `worker` holds these blocks; returns how many it did not hold before.")
      .def("remove", count<&PrefixIndex::remove>, arg("worker"), arg("hashes"), arg("tier") = 0,
           nb::sig("def remove(self, worker: int, hashes: Buffer, tier: int = 0) -> int"),
           "Say that `worker` dropped these blocks; returns how many it held.")
      .def("clear_worker", clear_worker, arg("worker"),
           nb::sig("def clear_worker(self, worker: int) -> int"),
           "Forget everything of `worker`, in all tiers; returns how many blocks it held.")
      .def("longest_prefix", longest_prefix, arg("hashes"),
           nb::sig("def longest_prefix(self, hashes: Buffer) -> Hits"),
           "int32[workers]: how many leading blocks of the chain each worker holds on the gpu.")
      .def("raise_prefix", raise_prefix, arg("hashes"), arg("hits"),
           nb::sig("def raise_prefix(self, hashes: Buffer, hits: Hits) -> None"),
           "Raise int32[workers] to how many leading blocks of the chain each holds on the gpu.")
      .def("longest_prefix_tiers", longest_prefix_tiers, arg("hashes"),
           nb::sig("def longest_prefix_tiers(self, hashes: Buffer) -> Hits"),
           "int32[3, workers]: the same, row t counting tiers 0..t.")
      .def("held", held, arg("worker"), arg("tier") = 0,
           nb::sig("def held(self, worker: int, tier: int = 0) -> int"),
           "How many blocks `worker` holds in the tier.")
      .def("evicted_of", evicted_of, arg("worker"),
           nb::sig("def evicted_of(self, worker: int) -> int"),
           "Blocks of `worker` forgotten because of the bounds since it was cleared last.")
      .def("contains", count<&PrefixIndex::contains>, arg("worker"), arg("hashes"),
           arg("tier") = 0,
           nb::sig("def contains(self, worker: int, hashes: Buffer, tier: int = 0) -> int"),
           "How many of these blocks `worker` holds in the tier.")
      .def("dump", dump, nb::sig("def dump(self) -> bytes"), "Everything, for `load`.")
      .def_static("load", load, arg("data"), nb::sig("def load(data: Bytes) -> PrefixIndex"),
                  nb::rv_policy::take_ownership, "The index that was dumped.")
      .def("__len__", &PrefixIndex::size, nb::call_guard<Unlocked>(),
           "Distinct (block, tier) held by at least one worker.")
      .def_prop_ro("workers", &PrefixIndex::workers, "Worker slots, numbered from 0.")
      .def_prop_ro("max_entries", &PrefixIndex::max_entries, "Most entries kept.")
      .def_prop_ro("max_bytes", &PrefixIndex::max_bytes, "Most memory used.")
      .def_prop_ro("tiers", &PrefixIndex::tiers, nb::call_guard<Unlocked>(),
                   "1 + the highest tier that holds anything, at least 1.")
      .def_prop_ro("evicted", &PrefixIndex::evicted, nb::call_guard<Unlocked>(),
                   "Entries forgotten because of the bounds.")
      .def_prop_ro("memory_bytes", &PrefixIndex::memory_bytes, nb::call_guard<Unlocked>(),
                   "Bytes in use, the allocated but empty slots included.");
}
