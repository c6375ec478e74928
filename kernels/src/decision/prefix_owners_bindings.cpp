// Python's side of the prefix owners: arguments in, GIL released, work, results out.
#include "bindings.h"

#include "arguments.h"
#include "decision/prefix_owners.h"

namespace nb = nanobind;
using kv::PrefixOwners;
using kv::arguments::Hashes;
using kv::arguments::integer;
using Unlocked = nb::gil_scoped_release;

namespace {

auto arg(const char* name) { return nb::arg(name).none(); }

}  // namespace

// What nanobind calls.
namespace calls {

void make_owners(PrefixOwners* self, nb::handle max_entries) {
  new (self) PrefixOwners(integer(max_entries, "max_entries"));
}

std::size_t claim(PrefixOwners& self, nb::handle chain, nb::handle owner) {
  const Hashes hashes(chain, "chain");
  const std::int64_t user = integer(owner, "owner");
  const Unlocked unlocked;
  return self.claim(hashes.span(), user);
}

std::size_t shared(const PrefixOwners& self, nb::handle chain) {
  const Hashes hashes(chain, "chain");
  const Unlocked unlocked;
  return self.shared(hashes.span());
}

nb::tuple owner(const PrefixOwners& self, nb::handle chain) {
  const Hashes hashes(chain, "chain");
  PrefixOwners::Owned owned{};
  {
    const Unlocked unlocked;
    owned = self.owner(hashes.span());
  }
  return nb::make_tuple(owned.owner, owned.depth);
}

}  // namespace calls

void kv::bind_prefix_owners(nb::module_& module) {
  nb::class_<PrefixOwners>(module, "PrefixOwners", "Which blocks one owner uses, which several.")
      .def("__init__", calls::make_owners, arg("max_entries") = 1 << 20,
           nb::sig("def __init__(self, max_entries: int = 1048576) -> None"))
      .def("claim", calls::claim, arg("chain"), arg("owner"),
           nb::sig("def claim(self, chain: Buffer, owner: int) -> int"),
           "Mark the chain as used by `owner`; returns how many leading blocks several use.")
      .def("shared", calls::shared, arg("chain"),
           nb::sig("def shared(self, chain: Buffer) -> int"),
           "How many leading blocks several owners use.")
      .def("owner", calls::owner, arg("chain"),
           nb::sig("def owner(self, chain: Buffer) -> tuple[int, int]"),
           "(Owner of the deepest known block or -1, its depth in blocks).")
      .def("__len__", &PrefixOwners::size, nb::call_guard<Unlocked>(), "Blocks known.")
      .def_prop_ro("max_entries", &PrefixOwners::max_entries, "Most blocks known at a time.")
      .def_prop_ro("evicted", &PrefixOwners::evicted, nb::call_guard<Unlocked>(),
                   "Blocks forgotten to make room.")
      .def_prop_ro("memory_bytes", &PrefixOwners::memory_bytes,
                   "Bytes in use, the same from the first call to the last.");
}
