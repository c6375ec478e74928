// What Python sees of the C++ core: a table of contents. Arguments are checked in arguments.h,
// the work is done elsewhere, with the GIL released. `kvkernels/_native.pyi` says the same in
// Python's words, `kvkernels/twins.py` does the same in plain Python; tests compare all three.
#include <nanobind/nanobind.h>

#include "arguments.h"
#include "chain.h"
#include "prefix_index.h"
#include "results.h"
#include "worker_bindings.h"

namespace nb = nanobind;
using kv::PrefixIndex;
using kv::arguments::Hashes;
using kv::arguments::Tokens;
using kv::arguments::integer;
using Unlocked = nb::gil_scoped_release;

namespace {

// None reaches our own checks, which name the argument; nanobind would list signatures instead.
auto arg(const char* name) { return nb::arg(name).none(); }

}  // namespace

// What nanobind calls: arguments in, GIL released, work, result out.
namespace calls {

auto chain_hashes(nb::handle tokens, nb::handle block_size, nb::handle seed) {
  const std::int64_t size = integer(block_size, "block_size");
  const std::uint64_t parent = kv::arguments::uint64(seed, "seed");
  const Tokens buffer(tokens, "tokens");
  const std::size_t blocks = kv::arguments::full_blocks(buffer.span().size(), size);
  kv::Result<std::uint64_t> chain(blocks);
  {
    const Unlocked unlocked;
    kv::chain_hashes(buffer.span().data(), static_cast<std::size_t>(size), blocks, parent,
                     chain.data());
  }
  return chain.give();
}

void make_index(PrefixIndex* self, nb::handle workers, nb::handle max_entries) {
  new (self) PrefixIndex(integer(workers, "workers"), integer(max_entries, "max_entries"));
}

std::size_t store(PrefixIndex& self, nb::handle worker, nb::handle hashes) {
  const Hashes buffer(hashes, "hashes");
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.store(slot, buffer.span());
}

std::size_t remove(PrefixIndex& self, nb::handle worker, nb::handle hashes) {
  const Hashes buffer(hashes, "hashes");
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.remove(slot, buffer.span());
}

std::size_t clear_worker(PrefixIndex& self, nb::handle worker) {
  const std::int64_t slot = integer(worker, "worker");
  const Unlocked unlocked;
  return self.clear_worker(slot);
}

auto longest_prefix(PrefixIndex& self, nb::handle hashes) {
  const Hashes buffer(hashes, "hashes");
  kv::Result<std::int32_t> hits(self.workers());
  {
    const Unlocked unlocked;
    self.longest_prefix(buffer.span(), hits.data());
  }
  return hits.give();
}

}  // namespace calls

NB_MODULE(_native, module) {
  module.doc() = "Native chain hashes, prefix index, virtual worker; the stub says where to read.";

  module.def("chain_hashes", calls::chain_hashes, arg("tokens"), arg("block_size"), arg("seed") = 0,
             nb::sig("def chain_hashes(tokens: Buffer, block_size: int, seed: int = 0) -> Hashes"),
             "Chain hashes of the full blocks of `tokens` (int32), first block first.");

  nb::class_<PrefixIndex>(module, "PrefixIndex", "Exact membership of (worker, block).")
      .def("__init__", calls::make_index, arg("workers"), arg("max_entries") = 1 << 20,
           nb::sig("def __init__(self, workers: int, max_entries: int = 1048576) -> None"))
      .def("store", calls::store, arg("worker"), arg("hashes"),
           nb::sig("def store(self, worker: int, hashes: Buffer) -> int"),
           "Say that `worker` holds these blocks; returns how many it did not hold before.")
      .def("remove", calls::remove, arg("worker"), arg("hashes"),
           nb::sig("def remove(self, worker: int, hashes: Buffer) -> int"),
           "Say that `worker` dropped these blocks; returns how many it held.")
      .def("clear_worker", calls::clear_worker, arg("worker"),
           nb::sig("def clear_worker(self, worker: int) -> int"),
           "Forget everything of `worker`; returns how many blocks it held.")
      .def("longest_prefix", calls::longest_prefix, arg("hashes"),
           nb::sig("def longest_prefix(self, hashes: Buffer) -> Hits"),
           "int32[workers]: how many leading blocks of the chain each worker holds.")
      .def("__len__", &PrefixIndex::size, nb::call_guard<Unlocked>(),
           "Distinct blocks held by at least one worker.")
      .def_prop_ro("workers", &PrefixIndex::workers, "Worker slots, numbered from 0.")
      .def_prop_ro("max_entries", &PrefixIndex::max_entries, "Most distinct blocks kept.")
      .def_prop_ro("evicted", &PrefixIndex::evicted, nb::call_guard<Unlocked>(),
                   "Blocks forgotten because of `max_entries`.")
      .def_prop_ro("memory_bytes", &PrefixIndex::memory_bytes, nb::call_guard<Unlocked>(),
                   "Bytes in use, the allocated but empty slots included.");

  kv::bind_virtual_worker(module);
}
