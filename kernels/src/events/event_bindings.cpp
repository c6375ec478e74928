// Python's side of the event path: batches of KV events, and one worker's blocks.
#include "bindings.h"

#include <memory>
#include <string>

#include "arguments.h"
#include "events/event_batch.h"
#include "events/worker_blocks.h"
#include "results.h"

namespace nb = nanobind;
using kv::Event;
using kv::EventBatch;
using kv::PrefixIndex;
using kv::WorkerBlocks;
using kv::arguments::Hashes;
using kv::arguments::AnyTokens;
using kv::arguments::in_range;
using kv::arguments::integer;
using Unlocked = nb::gil_scoped_release;

namespace {

auto arg(const char* name) { return nb::arg(name).none(); }

// A borrowed buffer of bytes. Lifetime: request (one call).
class Bytes {
 public:
  Bytes(nb::handle object, const char* name) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    PyErr_Clear();
    const std::string type = nb::str(object.type().attr("__name__")).c_str();
    throw nb::type_error((std::string(name) + " must be a buffer of bytes, got " + type).c_str());
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::span<const std::uint8_t> span() const {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }
  std::string_view text() const {
    return {static_cast<const char*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

template <class T>
nb::object array_of(std::span<const T> values) {
  kv::Result<T> array(values.size());
  std::copy(values.begin(), values.end(), array.data());
  return nb::cast(array.give());
}

nb::object text_or_none(bool is, std::string_view text) {
  return is ? nb::str(text.data(), text.size()) : nb::object(nb::none());
}

nb::object cache_or_none(kv::CacheKind kind) {
  const std::string_view name = kv::kCacheNames[static_cast<std::size_t>(kind)];
  return text_or_none(!name.empty(), name);
}

nb::object group_or_none(const Event& event) {
  return event.group < 0 ? nb::object(nb::none()) : nb::object(nb::int_(event.group));
}

nb::tuple extras_of(const EventBatch& batch, const Event& event) {
  nb::list extras;
  for (std::size_t i = 0; event.has_extras && i < event.names; ++i) {
    const std::string_view extra = batch.extra(event, i);
    extras.append(nb::bytes(extra.data(), extra.size()));
  }
  return nb::tuple(extras);
}

nb::object tokens_of(const EventBatch& batch, const Event& event) {
  return event.is_wide ? array_of(batch.wide_tokens(event)) : array_of(batch.tokens(event));
}

nb::dict skips_of(const EventBatch& batch) {
  nb::dict skips;
  for (std::size_t i = 0; i < kv::kSkipNames.size(); ++i) {
    const std::string_view name = kv::kSkipNames[i];
    if (batch.skips()[i] != 0) skips[nb::str(name.data(), name.size())] = batch.skips()[i];
  }
  return skips;
}

nb::dict skips_of(const WorkerBlocks& blocks) {
  const WorkerBlocks::Counters counters = blocks.counters();
  nb::dict skips;
  if (counters.other_group != 0) skips["other_group"] = counters.other_group;
  if (counters.other_block_size != 0) skips["other_block_size"] = counters.other_block_size;
  if (counters.unknown_names != 0) skips["unknown_names"] = counters.unknown_names;
  if (counters.no_room != 0) skips["no_room"] = counters.no_room;
  if (counters.masked != 0) skips["masked"] = counters.masked;
  if (counters.chunk_size != 0) skips["chunk_size"] = counters.chunk_size;
  return skips;
}

nb::dict media_of(const EventBatch& batch) {
  nb::dict media;
  for (const auto& [name, count] : batch.unknown_media()) {
    media[nb::str(name.data(), name.size())] = count;
  }
  return media;
}

nb::list other_sizes_of(const WorkerBlocks& blocks) {
  nb::list sizes;
  for (const WorkerBlocks::OtherSize& one : blocks.other_sizes()) {
    sizes.append(nb::make_tuple(one.block_size, one.whole, one.partial));
  }
  return sizes;
}

nb::list groups_of(const WorkerBlocks& blocks) {
  nb::list groups;
  for (const kv::CacheGroups::Facts& one : blocks.groups()) {
    groups.append(nb::make_tuple(one.number, cache_or_none(one.kind), one.window, one.block_size,
                                 one.held));
  }
  return groups;
}

nb::tuple stored_tuple(const EventBatch& batch, const Event& event) {
  const nb::object parent = event.has_parent ? nb::object(nb::int_(event.parent)) : nb::none();
  return nb::make_tuple("stored", array_of(batch.names(event)), parent,
                        tokens_of(batch, event), event.block_size, event.tier,
                        text_or_none(event.has_lora, batch.lora(event)),
                        text_or_none(event.has_salt, batch.salt(event)), extras_of(batch, event),
                        group_or_none(event), cache_or_none(event.cache), event.window,
                        event.masked);
}

std::uint8_t tier_of(nb::handle tier) {
  return static_cast<std::uint8_t>(in_range(tier, "tier", 0, WorkerBlocks::kTiers - 1));
}

std::optional<std::uint64_t> parent_of(nb::handle parent) {
  if (parent.is_none()) return std::nullopt;
  return kv::arguments::uint64(parent, "parent");
}

nb::builtin_exception wrong_count(const char* what, std::size_t wanted, const char* kind,
                                  std::size_t got) {
  return nb::value_error((std::string(what) + " must be " + std::to_string(wanted) + kind +
                          ", not " + std::to_string(got))
                             .c_str());
}

}  // namespace

// What nanobind calls.
namespace calls {

void make_batch(EventBatch* self, nb::handle payload) {
  const Bytes bytes(payload, "payload");
  const Unlocked unlocked;
  new (self) EventBatch(bytes.span());
}

nb::list listed(const EventBatch& self) {
  nb::list events;
  for (const Event& event : self.events()) {
    if (event.kind == Event::Kind::stored) {
      events.append(stored_tuple(self, event));
    } else if (event.kind == Event::Kind::removed) {
      events.append(nb::make_tuple("removed", array_of(self.names(event)), event.tier,
                                   group_or_none(event)));
    } else {
      events.append(nb::make_tuple("cleared"));
    }
  }
  return events;
}

void make_blocks(WorkerBlocks* self, PrefixIndex& index, nb::handle worker, nb::handle block_size,
                 const nb::str& model, nb::handle max_parked, bool counts_copies) {
  const std::int64_t slot = integer(worker, "worker");
  const auto size = in_range(block_size, "block_size", 1, EventBatch::kMaxBlockSize);
  const auto parked = in_range(max_parked, "max_parked", 0, INT32_MAX);
  Py_ssize_t bytes = 0;
  const char* name = PyUnicode_AsUTF8AndSize(model.ptr(), &bytes);
  if (name == nullptr) throw nb::python_error();
  new (self) WorkerBlocks(index, slot, static_cast<std::uint32_t>(size),
                          {name, static_cast<std::size_t>(bytes)},
                          static_cast<std::size_t>(parked), counts_copies);
}

nb::object array_or_none(const std::vector<std::uint64_t>& hashes) {
  return hashes.empty() ? nb::none() : array_of(std::span<const std::uint64_t>(hashes));
}

nb::object apply(WorkerBlocks& self, const EventBatch& batch, nb::handle names,
                 nb::handle chain) {
  std::optional<Hashes> placed;
  std::optional<Hashes> places;
  WorkerBlocks::Placed known;
  if (!names.is_none() || !chain.is_none()) {
    known = {placed.emplace(names, "names").span(), places.emplace(chain, "chain").span()};
    if (known.names.size() != known.chain.size()) {
      throw wrong_count("chain", known.names.size(), " hashes, one a name", known.chain.size());
    }
  }
  std::vector<std::uint64_t> left;
  {
    const Unlocked unlocked;
    left = self.apply(batch, known);
  }
  return array_or_none(left);
}

void store(WorkerBlocks& self, nb::handle names, nb::handle parent, nb::handle chain,
           nb::handle tier) {
  const Hashes blocks(names, "names");
  const Hashes hashes(chain, "chain");
  WorkerBlocks::Stored run{blocks.span(), parent_of(parent), tier_of(tier), hashes.span(), {}, {}};
  if (hashes.span().size() != blocks.span().size()) {
    throw wrong_count("chain", blocks.span().size(), " hashes, one a name", hashes.span().size());
  }
  const Unlocked unlocked;
  self.store(run);
}

void store_tokens(WorkerBlocks& self, nb::handle names, nb::handle parent, nb::handle tokens,
                  nb::handle seed, nb::handle tier, const nb::sequence& extras) {
  const Hashes blocks(names, "names");
  const AnyTokens ids(tokens, "tokens");
  std::vector<nb::bytes> kept;
  std::vector<std::string_view> parts;
  for (nb::handle extra : extras) kept.push_back(nb::cast<nb::bytes>(extra));
  for (const nb::bytes& extra : kept) parts.emplace_back(extra.c_str(), extra.size());
  WorkerBlocks::Stored run{blocks.span(), parent_of(parent), tier_of(tier), std::nullopt,
                           ids.narrow(), parts, ids.wide()};
  const std::uint64_t start = kv::arguments::uint64(seed, "seed");
  const std::size_t count = blocks.span().size();
  const std::size_t wanted = count * self.block_size();
  if (run.tier > 0 && parts.empty() && wanted > 0 && ids.size() % wanted == 0) {
    run.unit = std::max<std::size_t>(ids.size() / wanted, 1);
  }
  if (ids.size() != 0 && ids.size() != wanted * run.unit) {
    throw wrong_count("tokens", wanted, " or none at all", ids.size());
  }
  if (!parts.empty() && parts.size() != count) {
    throw wrong_count("extras", count, " or none at all", parts.size());
  }
  const Unlocked unlocked;
  self.store_tokens(run, start);
}

nb::object remove_blocks(WorkerBlocks& self, nb::handle names, nb::handle tier) {
  const Hashes blocks(names, "names");
  const std::uint8_t from = tier_of(tier);
  std::vector<std::uint64_t> left;
  {
    const Unlocked unlocked;
    left = self.remove(blocks.span(), from);
  }
  return array_or_none(left);
}

std::size_t limit(const WorkerBlocks& self, nb::handle chain, nb::handle blocks) {
  const Hashes hashes(chain, "chain");
  const auto most = in_range(blocks, "blocks", 0, INT32_MAX);
  return self.limit(hashes.span(), static_cast<std::size_t>(most));
}

nb::object chains(const WorkerBlocks& self, nb::handle tier) {
  const std::uint8_t wanted = tier_of(tier);
  std::vector<std::uint64_t> held;
  {
    const Unlocked unlocked;
    held = self.chains(wanted);
  }
  return array_of(std::span<const std::uint64_t>(held));
}

template <class Blocks>
nb::bytes dump(const Blocks& self) {
  std::string bytes;
  {
    const Unlocked unlocked;
    bytes = self.dump();
  }
  return nb::bytes(bytes.data(), bytes.size());
}

void load(WorkerBlocks& self, nb::handle data) {
  const Bytes bytes(data, "data");
  const Unlocked unlocked;
  self.load(bytes.text());
}

}  // namespace calls

void kv::bind_events(nb::module_& module) {
  nb::class_<EventBatch>(module, "EventBatch", "One decoded batch of KV events.")
      .def("__init__", calls::make_batch, arg("payload"),
           nb::sig("def __init__(self, payload: Buffer) -> None"))
      .def("listed", calls::listed, nb::sig("def listed(self) -> list[tuple[Any, ...]]"),
           "The events, in order, as tuples.")
      .def("skips", [](const EventBatch& self) { return skips_of(self); },
           nb::sig("def skips(self) -> dict[str, int]"), "`skipped`, by why.")
      .def("unknown_media", media_of, nb::sig("def unknown_media(self) -> dict[str, int]"),
           "Of those skipped for an unknown medium: how many, by its name.")
      .def("__len__", [](const EventBatch& self) { return self.events().size(); },
           "Events that can be used.")
      .def_prop_ro("ts_s", &EventBatch::ts_s, "The publisher's wall clock, seconds.")
      .def_prop_ro("rank", &EventBatch::rank, "Data-parallel rank.")
      .def_prop_ro("skipped", &EventBatch::skipped, "Events that cannot be used.")
      .def_prop_ro("blocks", &EventBatch::blocks, "Blocks stored.")
      .def_prop_ro("windows_alone", &EventBatch::windows_alone,
                   "It tells blocks of windows or states, and none of full attention.");

  const auto counter = [](auto member) {
    return [member](const WorkerBlocks& self) { return self.counters().*member; };
  };
  using Counters = WorkerBlocks::Counters;
  nb::class_<FrozenBlocks>(module, "FrozenBlocks", "One worker's blocks as of a moment.")
      .def("dump", calls::dump<FrozenBlocks>, nb::sig("def dump(self) -> bytes"),
           "What `WorkerBlocks.dump` gave at that moment.");
  nb::class_<WorkerBlocks>(module, "WorkerBlocks", "One worker's blocks, told to the index.")
      .def("__init__", calls::make_blocks, nb::arg("index"), arg("worker"), arg("block_size"),
           nb::arg("model"), arg("max_parked") = 65536,
           nb::arg("counts_copies") = false, nb::keep_alive<1, 2>(),
           nb::sig("def __init__(self, index: PrefixIndex, worker: int, block_size: int, "
                   "model: str, max_parked: int = 65536, counts_copies: bool = False) -> None"))
      .def("apply", calls::apply, nb::arg("batch"), nb::arg("names") = nb::none(),
           nb::arg("chain") = nb::none(),
           nb::sig("def apply(self, batch: EventBatch, names: Buffer | None = None, "
                   "chain: Buffer | None = None) -> Hashes | None"),
           "All events of a batch, in order; uint64: the chain hashes that left tier 0 by it. "
           "`names` and `chain` say what blocks of windows alone stand for.")
      .def("store", calls::store, arg("names"), arg("parent"), arg("chain"), arg("tier") = 0,
           nb::sig("def store(self, names: Buffer, parent: int | None, chain: Buffer, "
                   "tier: int = 0) -> None"),
           "Blocks whose chain hashes are known, in order.")
      .def("store_tokens", calls::store_tokens, arg("names"), arg("parent"), arg("tokens"),
           arg("seed"), arg("tier") = 0, nb::arg("extras") = nb::make_tuple(),
           nb::sig("def store_tokens(self, names: Buffer, parent: int | None, tokens: Buffer, "
                   "seed: int, tier: int = 0, extras: Sequence[bytes] = ()) -> None"),
           "Blocks told by their tokens, in order.")
      .def("remove", calls::remove_blocks, arg("names"), arg("tier") = 0,
           nb::sig("def remove(self, names: Buffer, tier: int = 0) -> Hashes | None"),
           "These blocks left a tier; returns as `apply`.")
      .def("clear", &WorkerBlocks::clear, nb::call_guard<Unlocked>(),
           nb::sig("def clear(self) -> None"), "Forget all, in the index too.")
      .def("chains", calls::chains, arg("tier") = 0,
           nb::sig("def chains(self, tier: int = 0) -> Hashes"),
           "uint64, ascending: the chain hashes held in a tier.")
      .def("dump", calls::dump<WorkerBlocks>, nb::sig("def dump(self) -> bytes"),
           "All of it, as bytes.")
      .def("frozen", &WorkerBlocks::frozen, nb::call_guard<Unlocked>(),
           nb::sig("def frozen(self) -> FrozenBlocks"),
           "All of it as it is now, for a thread to dump: a copy, made at once.")
      .def("load", calls::load, arg("data"), nb::sig("def load(self, data: Buffer) -> None"),
           "Replace everything by what `dump` gave, in the index too.")
      .def("skips", [](const WorkerBlocks& self) { return skips_of(self); },
           nb::sig("def skips(self) -> dict[str, int]"), "`skipped_events`, by why.")
      .def("limit", calls::limit, arg("chain"), arg("blocks"),
           nb::sig("def limit(self, chain: Buffer, blocks: int) -> int"),
           "How many of the chain's first `blocks` blocks, which full attention has, are reused.")
      .def("groups", groups_of,
           nb::sig("def groups(self) -> list[tuple[int, str, int, int, int]]"),
           "Cache groups with windows or states: (number, kind, window, block size, blocks held).")
      .def_prop_ro("is_hybrid", &WorkerBlocks::is_hybrid,
                   "It has such groups beside full attention, or alone in known places.")
      .def_prop_ro("has_full_attention", &WorkerBlocks::has_full_attention,
                   "Some event told of a cache group of full attention.")
      .def("other_sizes", other_sizes_of,
           nb::sig("def other_sizes(self) -> list[tuple[int, int, int]]"),
           "As `own_size`, of other sizes: (size, whole ones, perhaps unfinished ones).")
      .def("__len__", &WorkerBlocks::size, nb::call_guard<Unlocked>(), "Names known in any tier.")
      .def_prop_ro("parked", &WorkerBlocks::parked, nb::call_guard<Unlocked>(),
                   "Blocks waiting for their parent.")
      .def_prop_ro("memory_bytes", &WorkerBlocks::memory_bytes, nb::call_guard<Unlocked>(),
                   "Bytes in use, the empty slots included.")
      .def_prop_ro("stored_blocks", counter(&Counters::stored_blocks),
                   nb::call_guard<Unlocked>(), "In tier 0; only grows.")
      .def_prop_ro("removed_blocks", counter(&Counters::removed_blocks),
                   nb::call_guard<Unlocked>(), "In tier 0; only grows.")
      .def_prop_ro("clears", counter(&Counters::clears),
                   nb::call_guard<Unlocked>(), "Clear events in batches; only grows.")
      .def_prop_ro("orphans", counter(&Counters::orphans),
                   nb::call_guard<Unlocked>(), "Blocks ever parked; only grows.")
      .def_prop_ro("own_size", counter(&Counters::own_size), nb::call_guard<Unlocked>(),
                   "Events that tell blocks of tier 0 by tokens, of this size; only grows.")
      .def_prop_ro("other_size", counter(&Counters::other_block_size), nb::call_guard<Unlocked>(),
                   "Events skipped for their block size; only grows.")
      .def_prop_ro("skipped_events",
                   [](const WorkerBlocks& self) { return self.counters().skipped_events(); },
                   nb::call_guard<Unlocked>(), "Events that changed nothing; only grows.");
}
