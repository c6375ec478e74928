// Python's side of the virtual worker: arguments in, time settled, work, results out.
#include "bindings.h"

#include <string>

#include "arguments.h"
#include "results.h"
#include "virtual_worker/virtual_worker.h"
#include "virtual_worker/worker_settings.h"

namespace nb = nanobind;
using kv::arguments::Hashes;
using kv::arguments::in_range;
using kv::engine::VirtualWorker;

namespace {

auto arg(const char* name) { return nb::arg(name).none(); }

// Time comes last among the arguments and is checked last: before it nothing has changed.
VirtualWorker& settled(VirtualWorker& self, nb::handle now) {
  constexpr std::int64_t kMostNs = std::int64_t{1} << 62;
  const std::int64_t now_ns = in_range(now, "now_ns", 0, kMostNs);
  if (now_ns < self.last_ns()) {
    const std::string what = "now_ns must not go back: got " + std::to_string(now_ns) + " after " +
                             std::to_string(self.last_ns());
    throw nb::value_error(what.c_str());
  }
  self.settle(now_ns);
  return self;
}

nb::list ids_of(const std::vector<std::int64_t>& ids) {
  nb::list list;
  for (const std::int64_t id : ids) list.append(id);
  return list;
}

nb::object array_of(std::span<const std::uint64_t> hashes) {
  kv::Result<std::uint64_t> array(hashes.size());
  std::copy(hashes.begin(), hashes.end(), array.data());
  return nb::cast(array.give());
}

nb::object hash_or_none(bool is, std::uint64_t hash) { return is ? nb::cast(hash) : nb::none(); }

const char* code(kv::engine::Refusal refusal) {
  using kv::engine::Refusal;
  switch (refusal) {
    case Refusal::empty_prompt: return "empty_prompt";
    case Refusal::no_output: return "no_output";
    case Refusal::too_long: return "too_long";
    case Refusal::kv_capacity: return "kv_capacity";
    case Refusal::queue_full: return "queue_full";
    case Refusal::none: break;
  }
  return "";
}

}  // namespace

// What nanobind calls.
namespace calls {

void make_worker(VirtualWorker* self, nb::handle blocks, nb::handle block_size,
                 nb::handle step_time, nb::handle max_num_tokens, nb::handle max_batch_size,
                 nb::handle max_model_tokens, nb::handle min_chunk_tokens, nb::handle watermark,
                 nb::handle ageing_s, nb::handle max_queue, nb::handle prefix_wait_tokens,
                 nb::handle record_events, nb::handle speed, nb::handle host_blocks,
                 nb::handle load_block_s, nb::handle cache_groups) {
  new (self) VirtualWorker(kv::worker_settings(
      {blocks, block_size, step_time, max_num_tokens, max_batch_size, max_model_tokens,
       min_chunk_tokens, watermark, ageing_s, max_queue, prefix_wait_tokens, record_events,
       speed, host_blocks, load_block_s, cache_groups}));
}

const char* add(VirtualWorker& self, nb::handle request_id, nb::handle chain,
                nb::handle prompt_tokens, nb::handle max_output_tokens, nb::handle priority,
                nb::handle now_ns, bool imports, bool exports) {
  const std::int64_t id = in_range(request_id, "request_id", 0, INT64_MAX);
  const Hashes names(chain, "chain");
  const kv::engine::NewRequest request{
      id, names.span(), in_range(prompt_tokens, "prompt_tokens", 0, INT32_MAX),
      in_range(max_output_tokens, "max_output_tokens", -INT32_MAX, INT32_MAX),
      in_range(priority, "priority", -INT32_MAX, INT32_MAX), imports, exports};
  settled(self, now_ns);
  if (self.in_use(id)) {
    throw nb::value_error(("request id " + std::to_string(id) + " is in use").c_str());
  }
  return code(self.add(request));
}

bool cancel(VirtualWorker& self, nb::handle request_id, nb::handle now_ns) {
  const std::int64_t id = in_range(request_id, "request_id", 0, INT64_MAX);
  return settled(self, now_ns).cancel(id);
}

nb::list take_reads(VirtualWorker& self, nb::handle now_ns) {
  auto& reads = settled(self, now_ns).outputs().reads;
  nb::list list;
  for (const auto& read : reads) list.append(nb::make_tuple(read.id, read.start, read.stop));
  reads.clear();
  return list;
}

bool end_read(VirtualWorker& self, nb::handle request_id, bool arrived, nb::handle now_ns) {
  const std::int64_t id = in_range(request_id, "request_id", 0, INT64_MAX);
  return settled(self, now_ns).end_read(id, arrived);
}

bool release(VirtualWorker& self, nb::handle request_id, nb::handle now_ns) {
  const std::int64_t id = in_range(request_id, "request_id", 0, INT64_MAX);
  return settled(self, now_ns).release(id);
}

nb::tuple advance(VirtualWorker& self, nb::handle now_ns) {
  auto& outputs = settled(self, now_ns).outputs();
  nb::list changes;
  self.changes().take([&changes](const kv::engine::Change& change, auto hashes) {
    changes.append(nb::make_tuple(static_cast<int>(change.kind),
                                  hash_or_none(change.has_parent, change.parent),
                                  array_of(hashes)));
  });
  auto ended = nb::make_tuple(ids_of(outputs.first), ids_of(outputs.first_hit_tokens),
                              ids_of(outputs.finished), changes);
  outputs.first.clear();
  outputs.first_hit_tokens.clear();
  outputs.finished.clear();
  return ended;
}

nb::tuple progress(VirtualWorker& self, nb::handle now_ns) {
  const auto all = settled(self, now_ns).progress();
  kv::Result<std::int64_t> ids(all.size());
  kv::Result<std::int32_t> tokens(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    ids.data()[i] = all[i].first;
    tokens.data()[i] = static_cast<std::int32_t>(all[i].second);
  }
  return nb::make_tuple(ids.give(), tokens.give());
}

nb::object stats(VirtualWorker& self, nb::handle now_ns) {
  const kv::engine::Stats stats = settled(self, now_ns).stats();
  const kv::engine::Totals& totals = stats.totals;
  return nb::module_::import_("kvkernels.virtual_stats")
      .attr("WorkerStats")(stats.busy_ns, totals.steps, stats.running, stats.waiting,
                           stats.used_blocks, stats.evicted, totals.preemptions,
                           totals.recomputed_tokens, totals.query_tokens, totals.hit_tokens,
                           stats.host_blocks, totals.host_hit_tokens);
}

std::int64_t queued_tokens(VirtualWorker& self, nb::handle now_ns) {
  return settled(self, now_ns).queued_tokens();
}

std::size_t hit_blocks(VirtualWorker& self, nb::handle chain) {
  return self.hit_blocks(Hashes(chain, "chain").span());
}

void set_speed(VirtualWorker& self, nb::handle speed, nb::handle now_ns) {
  const double value = kv::positive(speed, "speed");
  settled(self, now_ns).set_speed(value);
}

void clear(VirtualWorker& self, nb::handle now_ns) { settled(self, now_ns).clear(); }

nb::list abort(VirtualWorker& self, nb::handle now_ns) {
  return ids_of(settled(self, now_ns).abort());
}

nb::list snapshot(VirtualWorker& self, nb::handle now_ns) {
  nb::list runs;
  for (const auto& run : settled(self, now_ns).snapshot()) {
    runs.append(nb::make_tuple(hash_or_none(run.has_parent, run.parent), array_of(run.hashes)));
  }
  return runs;
}

nb::object host_blocks(VirtualWorker& self, nb::handle now_ns) {
  return array_of(settled(self, now_ns).host_contents());
}

nb::list group_blocks(VirtualWorker& self, nb::handle now_ns) {
  const kv::engine::GroupBlocks& groups = settled(self, now_ns).groups();
  std::vector<std::vector<std::uint64_t>> hashes(groups.size());
  for (const auto& kept : groups.kept()) hashes[kept.group].push_back(kept.hash);
  nb::list list;
  for (const auto& one : hashes) list.append(array_of(one));
  return list;
}

void check(VirtualWorker& self) {
  const std::string wrong = self.check();
  if (wrong.empty()) return;
  PyErr_SetString(PyExc_AssertionError, wrong.c_str());
  throw nb::python_error();
}

}  // namespace calls

void kv::bind_virtual_worker(nb::module_& module) {
  nb::class_<VirtualWorker>(module, "VirtualWorker",
                            "A worker on virtual time; tests/oracles/virtual_worker.py says what "
                            "each call means.")
      .def("__init__", calls::make_worker, nb::kw_only(), arg("blocks"), arg("block_size"),
           arg("step_time"), arg("max_num_tokens") = 8192, arg("max_batch_size") = 256,
           arg("max_model_tokens") = 131072, arg("min_chunk_tokens") = 16,
           arg("watermark") = 0.01, arg("ageing_s") = 10.0, arg("max_queue") = 4096,
           arg("prefix_wait_tokens") = 256, arg("record_events") = true, arg("speed") = 1.0,
           arg("host_blocks") = 0, arg("load_block_s") = 0.0,
           arg("cache_groups") = nb::make_tuple(),
           nb::sig("def __init__(self, *, blocks: int, block_size: int, "
                   "step_time: Sequence[float], max_num_tokens: int = 8192, "
                   "max_batch_size: int = 256, max_model_tokens: int = 131072, "
                   "min_chunk_tokens: int = 16, watermark: float = 0.01, "
                   "ageing_s: float = 10.0, max_queue: int = 4096, "
                   "prefix_wait_tokens: int = 256, record_events: bool = True, "
                   "speed: float = 1.0, host_blocks: int = 0, load_block_s: float = 0.0, "
                   "cache_groups: Sequence[tuple[int, int]] = ()) -> None"))
      .def("add", calls::add, arg("request_id"), arg("chain"), arg("prompt_tokens"),
           arg("max_output_tokens"), arg("priority"), arg("now_ns"), nb::arg("imports") = false,
           nb::arg("exports") = false,
           nb::sig("def add(self, request_id: int, chain: Hashes, prompt_tokens: int, "
                   "max_output_tokens: int, priority: int, now_ns: int, imports: bool = False, "
                   "exports: bool = False) -> str"),
           "Queue a request; \"\" or the code of its refusal.")
      .def("cancel", calls::cancel, arg("request_id"), arg("now_ns"),
           nb::sig("def cancel(self, request_id: int, now_ns: int) -> bool"),
           "Forget a request; False if it is finished or was never added.")
      .def("take_reads", calls::take_reads, arg("now_ns"),
           nb::sig("def take_reads(self, now_ns: int) -> list[tuple[int, int, int]]"),
           "Requests whose prompt's KV is to be read from another worker now, and which tokens.")
      .def("end_read", calls::end_read, arg("request_id"), nb::arg("arrived"), arg("now_ns"),
           nb::sig("def end_read(self, request_id: int, arrived: bool, now_ns: int) -> bool"),
           "A read has ended, well or not; False for a request that does not read.")
      .def("release", calls::release, arg("request_id"), arg("now_ns"),
           nb::sig("def release(self, request_id: int, now_ns: int) -> bool"),
           "Nobody reads the prompt of an ended request any more; False if nobody could.")
      .def("next_ns", &VirtualWorker::next_ns, nb::sig("def next_ns(self) -> int"),
           "When to call `advance` next; -1: not before something else is asked.")
      .def("advance", calls::advance, arg("now_ns"),
           nb::sig("def advance(self, now_ns: int) -> Ended"),
           "What came out since the last call.")
      .def("progress", calls::progress, arg("now_ns"),
           nb::sig("def progress(self, now_ns: int) -> tuple[Ids, Hits]"),
           "Ids and output tokens so far of running requests past their first token.")
      .def("stats", calls::stats, arg("now_ns"),
           nb::sig("def stats(self, now_ns: int) -> WorkerStats"),
           "Counters and gauges at `now_ns`.")
      .def("queued_tokens", calls::queued_tokens, arg("now_ns"),
           nb::sig("def queued_tokens(self, now_ns: int) -> int"),
           "Tokens left for prefills; looks at every request.")
      .def("hit_blocks", calls::hit_blocks, arg("chain"),
           nb::sig("def hit_blocks(self, chain: Hashes) -> int"),
           "Leading blocks of `chain` that are visible.")
      .def("set_speed", calls::set_speed, arg("speed"), arg("now_ns"),
           nb::sig("def set_speed(self, speed: float, now_ns: int) -> None"),
           "Divide the length of later steps by `speed`.")
      .def("clear", calls::clear, arg("now_ns"),
           nb::sig("def clear(self, now_ns: int) -> None"), "Reset the cache.")
      .def("abort", calls::abort, arg("now_ns"),
           nb::sig("def abort(self, now_ns: int) -> list[int]"),
           "The process died: ids of unfinished requests.")
      .def("snapshot", calls::snapshot, arg("now_ns"),
           nb::sig("def snapshot(self, now_ns: int) -> list[Run]"),
           "The visible contents as runs, parents first.")
      .def("host_blocks", calls::host_blocks, arg("now_ns"),
           nb::sig("def host_blocks(self, now_ns: int) -> Hashes"),
           "Chain hashes of the blocks that the host has, parents first where both are there.")
      .def("group_blocks", calls::group_blocks, arg("now_ns"),
           nb::sig("def group_blocks(self, now_ns: int) -> list[Hashes]"),
           "Of each group of windows or states, the chain hashes of what it keeps, oldest first.")
      .def("check", calls::check, nb::sig("def check(self) -> None"),
           "AssertionError when an invariant is broken.");
}
