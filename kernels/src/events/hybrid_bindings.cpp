// Python's side of workers with hybrid caches: one call that limits the hits of all of them.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "events/worker_blocks.h"
#include "index/prefix_index.h"

namespace nb = nanobind;
using kv::PrefixIndex;
using kv::WorkerBlocks;
using kv::arguments::Depths;
using kv::arguments::Hashes;
using kv::arguments::in_range;

namespace {

auto arg(const char* name) { return nb::arg(name).none(); }

// Which workers' hits need a second look. Every member needs the GIL. Lifetime: process.
class HybridWorkers {
 public:
  explicit HybridWorkers(std::int64_t workers) : ends_(workers, INT64_MAX) {}
  ~HybridWorkers() {
    for (const Row& row : rows_) row.blocks->attach(nullptr);
  }
  HybridWorkers(const HybridWorkers&) = delete;
  HybridWorkers& operator=(const HybridWorkers&) = delete;

  void set(nb::handle worker, nb::object blocks) {
    const auto slot = static_cast<std::size_t>(
        in_range(worker, "worker", 0, static_cast<std::int64_t>(ends_.workers()) - 1));
    WorkerBlocks* known = blocks.is_none() ? nullptr : nb::cast<WorkerBlocks*>(blocks);
    const auto is_it = [&](const Row& row) { return row.slot == slot; };
    const auto found = std::find_if(rows_.begin(), rows_.end(), is_it);
    if (found != rows_.end()) {
      if (found->blocks == known) {
        const auto rule = known->end_rule();
        is_sorted_ = is_sorted_ && rule == found->rule;
        found->rule = rule;
        found->is_full = known->has_full_attention();
        return;
      }
      found->blocks->attach(nullptr);
      rows_.erase(found);
      is_sorted_ = false;
    }
    if (known == nullptr) return;
    if (known->worker() != slot) throw nb::value_error("blocks must be those of the worker");
    known->attach(&ends_);
    rows_.push_back(
        {slot, known, known->end_rule(), known->has_full_attention(), std::move(blocks)});
    is_sorted_ = false;
  }

  void limit(nb::handle chain, nb::handle hits, nb::handle most) {
    const Hashes hashes(chain, "chain");
    const Depths depths(hits, "hits", ends_.workers());
    const auto bound = static_cast<std::int32_t>(in_range(most, "most", 0, INT32_MAX));
    sort();
    for (const Row& row : rows_) {  // windows alone ask for no block that lies before them
      if (!row.is_full) depths.data()[row.slot] = static_cast<std::int32_t>(hashes.span().size());
    }
    for (const auto& [rule, workers] : alike_) {
      for (const std::size_t slot : workers) {
        depths.data()[slot] = std::clamp(depths.data()[slot], 0, bound);
      }
      ends_.lower_to_ends(hashes.span(), rule, workers, depths.data());
    }
    for (const Row& row : rows_) {
      if (row.rule) continue;
      std::int32_t& depth = depths.data()[row.slot];
      const auto blocks = static_cast<std::size_t>(std::clamp(depth, 0, bound));
      depth = static_cast<std::int32_t>(row.blocks->limit(hashes.span(), blocks));
    }
  }

  std::size_t size() const { return rows_.size(); }

 private:
  struct Row {
    std::size_t slot;
    WorkerBlocks* blocks;
    std::optional<PrefixIndex::EndRule> rule;  // as of the latest `set`
    bool is_full;                              // it has a group of full attention
    nb::object owner;
  };

  // Puts workers of one rule together.
  void sort() {
    if (is_sorted_) return;
    alike_.clear();
    for (const Row& row : rows_) {
      if (!row.rule) continue;
      const auto is_it = [&](const auto& one) { return one.first == *row.rule; };
      auto found = std::find_if(alike_.begin(), alike_.end(), is_it);
      if (found == alike_.end()) found = alike_.insert(alike_.end(), {*row.rule, {}});
      found->second.push_back(row.slot);
    }
    is_sorted_ = true;
  }

  PrefixIndex ends_;  // tier 0: blocks that all windows hold; tier 1: all states
  std::vector<Row> rows_;
  std::vector<std::pair<PrefixIndex::EndRule, std::vector<std::size_t>>> alike_;
  bool is_sorted_ = true;
};

void make(HybridWorkers* self, nb::handle workers) {
  new (self) HybridWorkers(in_range(workers, "workers", 1, 4096));
}

}  // namespace

void kv::bind_hybrids(nb::module_& module) {
  nb::class_<HybridWorkers>(module, "HybridWorkers", "The workers whose models have hybrid caches.")
      .def("__init__", make, arg("workers"),
           nb::sig("def __init__(self, workers: int) -> None"))
      .def("set", &HybridWorkers::set, arg("worker"), arg("blocks"),
           nb::sig("def set(self, worker: int, blocks: WorkerBlocks | None) -> None"),
           "Limit the worker's hits by these blocks, whose groups may be others since the latest "
           "call; None: not any more.")
      .def("limit", &HybridWorkers::limit, arg("chain"), arg("hits"), arg("most"),
           nb::sig("def limit(self, chain: Buffer, hits: Hits, most: int) -> None"),
           "Lower int32[workers], leading blocks of the chain that full attention has, to what "
           "each of these workers reuses, at most `most`. What is there of workers without full "
           "attention counts for nothing.")
      .def("__len__", &HybridWorkers::size, "How many there are.");
}
