// Python's side of the mirror: arguments in, GIL released, work, results out.
#include "bindings.h"

#include "arguments.h"
#include "mirror/mirror.h"
#include "results.h"

namespace nb = nanobind;
using kv::Mirror;
using kv::arguments::Hashes;
using kv::arguments::integer;
using kv::arguments::uint64;
using Unlocked = nb::gil_scoped_release;

namespace {

auto arg(const char* name) { return nb::arg(name).none(); }

}  // namespace

// What nanobind calls.
namespace calls {

void make_mirror(Mirror* self, nb::handle workers, nb::handle max_blocks) {
  new (self) Mirror(integer(workers, "workers"), integer(max_blocks, "max_blocks"));
}

std::size_t resize(Mirror& self, nb::handle worker, nb::handle resident, nb::handle remembered) {
  const std::int64_t slot = integer(worker, "worker");
  const std::int64_t most = integer(resident, "resident");
  const std::int64_t all = integer(remembered, "remembered");
  const Unlocked unlocked;
  return self.resize(slot, most, all);
}

nb::tuple touch(Mirror& self, nb::handle worker, nb::handle chain) {
  const Hashes hashes(chain, "chain");
  const std::int64_t slot = integer(worker, "worker");
  Mirror::Touch touch{};
  {
    const Unlocked unlocked;
    touch = self.touch(slot, hashes.span());
  }
  nb::list runs;
  for (const auto& run : touch.met.runs) runs.append(nb::make_tuple(run.end, run.stamp));
  return nb::make_tuple(touch.met.hit_blocks, touch.stamp, runs);
}

std::size_t forget(Mirror& self, nb::handle worker, nb::handle chain, nb::handle stamp) {
  const Hashes hashes(chain, "chain");
  const std::int64_t slot = integer(worker, "worker");
  const std::uint64_t of = uint64(stamp, "stamp");
  const Unlocked unlocked;
  return self.forget(slot, hashes.span(), of);
}

std::size_t drop_colder(Mirror& self, nb::handle worker, nb::handle stamp) {
  const std::int64_t slot = integer(worker, "worker");
  const std::uint64_t last = uint64(stamp, "stamp");
  const Unlocked unlocked;
  return self.drop_colder(slot, last);
}

std::size_t revive_warmer(Mirror& self, nb::handle worker, nb::handle stamp) {
  const std::int64_t slot = integer(worker, "worker");
  const std::uint64_t last = uint64(stamp, "stamp");
  const Unlocked unlocked;
  return self.revive_warmer(slot, last);
}

std::size_t clear_mirrored(Mirror& self, nb::handle worker) {
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.clear_worker(slot);
}

auto mirrored_prefix(Mirror& self, nb::handle chain) {
  const Hashes hashes(chain, "chain");
  kv::Result<std::int32_t> hits(self.workers());
  {
    const Unlocked unlocked;
    self.longest_prefix(hashes.span(), hits.data());
  }
  return hits.give();
}

void raise_mirrored(Mirror& self, nb::handle chain, nb::handle hits) {
  const Hashes hashes(chain, "chain");
  const kv::arguments::Depths raised(hits, "hits", self.workers());
  const Unlocked unlocked;
  self.raise_prefix(hashes.span(), raised.data());
}

std::size_t held(const Mirror& self, nb::handle worker) {
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.held(slot);
}

std::size_t remembered(const Mirror& self, nb::handle worker) {
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.remembered(slot);
}

}  // namespace calls

void kv::bind_mirror(nb::module_& module) {
  nb::class_<Mirror>(module, "Mirror", "LRU caches of workers that tell nothing of theirs.")
      .def("__init__", calls::make_mirror, arg("workers"), arg("max_blocks") = 1 << 20,
           nb::sig("def __init__(self, workers: int, max_blocks: int = 1048576) -> None"))
      .def("resize", calls::resize, arg("worker"), arg("resident"), arg("remembered"),
           nb::sig("def resize(self, worker: int, resident: int, remembered: int) -> int"),
           "Set a worker's bounds; returns how many blocks are resident no more.")
      .def("touch", calls::touch, arg("worker"), arg("chain"),
           nb::sig("def touch(self, worker: int, chain: Buffer) -> Touch"),
           "Make a chain the warmest of a worker; returns what was there of it.")
      .def("forget", calls::forget, arg("worker"), arg("chain"), arg("stamp"),
           nb::sig("def forget(self, worker: int, chain: Buffer, stamp: int) -> int"),
           "Take back a touch, as far as nobody used its blocks since.")
      .def("drop_colder", calls::drop_colder, arg("worker"), arg("stamp"),
           nb::sig("def drop_colder(self, worker: int, stamp: int) -> int"),
           "Blocks last used at `stamp` or before are resident no more; returns how many.")
      .def("revive_warmer", calls::revive_warmer, arg("worker"), arg("stamp"),
           nb::sig("def revive_warmer(self, worker: int, stamp: int) -> int"),
           "Blocks last used after `stamp` are resident after all; returns how many.")
      .def("clear_worker", calls::clear_mirrored, arg("worker"),
           nb::sig("def clear_worker(self, worker: int) -> int"),
           "Forget everything of `worker` but its bounds; returns how many blocks it held.")
      .def("longest_prefix", calls::mirrored_prefix, arg("chain"),
           nb::sig("def longest_prefix(self, chain: Buffer) -> Hits"),
           "int32[workers]: how many leading blocks of the chain are resident on each.")
      .def("raise_prefix", calls::raise_mirrored, arg("chain"), arg("hits"),
           nb::sig("def raise_prefix(self, chain: Buffer, hits: Hits) -> None"),
           "Raise int32[workers] to how many leading blocks are resident on each.")
      .def("held", calls::held, arg("worker"), nb::sig("def held(self, worker: int) -> int"),
           "Blocks resident on `worker`.")
      .def("remembered", calls::remembered, arg("worker"),
           nb::sig("def remembered(self, worker: int) -> int"),
           "Blocks remembered of `worker`, resident ones among them.")
      .def("__len__", &Mirror::size, nb::call_guard<Unlocked>(),
           "Distinct blocks resident on at least one worker.")
      .def_prop_ro("workers", &Mirror::workers, "Worker slots, numbered from 0.")
      .def_prop_ro("max_blocks", &Mirror::max_blocks,
                   "Most blocks remembered of all workers together.")
      .def_prop_ro("memory_bytes", &Mirror::memory_bytes, nb::call_guard<Unlocked>(),
                   "Bytes in use, the allocated but empty slots included.");
}
