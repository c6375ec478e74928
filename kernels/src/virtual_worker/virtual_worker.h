// A worker on virtual time: the native twin of tests/oracles/virtual_worker.py, which says what
// each call means.
// Not thread-safe: callers hold the GIL, calls are too short to give it up.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "virtual_worker/block_pool.h"
#include "virtual_worker/changes.h"
#include "virtual_worker/scheduler.h"
#include "virtual_worker/step_time.h"

namespace kv::engine {

struct WorkerSettings {
  std::uint32_t blocks;
  std::int64_t block_size;
  std::uint32_t host_blocks;
  std::vector<CacheGroup> cache_groups;
  double load_block_s;  // of one block from the host
  StepTime step_time;
  Settings scheduler;
  bool record_events;
  double speed;
};

struct Stats {
  std::int64_t busy_ns;
  Totals totals;
  std::size_t running, waiting, used_blocks;
  std::uint64_t evicted;
  std::size_t host_blocks;
};

class VirtualWorker {
 public:
  explicit VirtualWorker(const WorkerSettings& settings);

  std::int64_t last_ns() const { return now_ns_; }  // time must not go back before it
  bool in_use(std::int64_t id) const { return engine_->scheduler.in_use(id); }

  // Takes in the steps that ended at or before `now_ns`. Every call below wants it done. Once a
  // call has thrown in the middle of a step, as it does for chains that name no prefixes, this one
  // throws for good: queues may name requests that are no more.
  void settle(std::int64_t now_ns);

  Refusal add(const NewRequest& request);  // its id must not be in use
  bool cancel(std::int64_t id);
  bool end_read(std::int64_t id, bool arrived);
  bool release(std::int64_t id);
  std::int64_t next_ns();
  std::vector<std::pair<std::int64_t, std::int64_t>> progress() const;  // id, output tokens
  Stats stats() const;
  std::int64_t queued_tokens() const { return engine_->scheduler.queued_tokens(); }
  std::size_t hit_blocks(Chain chain) const { return engine_->pool.reusable(chain); }
  void set_speed(double speed);
  void clear();
  std::vector<std::int64_t> abort();
  std::vector<BlockPool::Run> snapshot() const { return engine_->pool.snapshot(); }
  const GroupBlocks& groups() const { return engine_->pool.groups(); }
  std::vector<std::uint64_t> host_contents() const { return engine_->pool.host().contents(); }
  std::string check() const;  // what is wrong, or nothing

  // What came out since they were last emptied.
  Outputs& outputs() { return outputs_; }
  ChangeLog& changes() { return changes_; }

 private:
  struct Engine {  // what dies in `abort`
    Engine(const WorkerSettings& settings, ChangeLog& changes, Totals& totals)
        : pool(settings.blocks, settings.host_blocks,
               GroupBlocks(settings.cache_groups, settings.block_size), changes),
          scheduler(settings.scheduler, pool, settings.block_size, totals) {}
    BlockPool pool;
    Scheduler scheduler;
  };

  // A step in flight: its times, and what it reads.
  struct Flight {
    std::int64_t start_ns, end_ns, context_tokens;
  };

  // Blocks on their way from the host, one load after the other over one link.
  struct Load {
    std::int64_t id, end_ns;
  };

  void start_step(std::int64_t now_ns);
  void start_loads(std::int64_t now_ns, std::size_t reads_before);
  void end_loads(std::int64_t now_ns);
  void end_step();
  void skip_quiet(std::int64_t now_ns);
  std::int64_t quiet_steps() const;
  void plan_quiet();
  Flight after(const Flight& flight) const;

  WorkerSettings settings_;
  StepPrice price_;
  ChangeLog changes_;
  Totals totals_;
  Outputs outputs_;
  std::unique_ptr<Engine> engine_;
  std::int64_t now_ns_ = 0;
  std::int64_t busy_ns_ = 0;  // of ended steps
  std::uint64_t evicted_before_ = 0;
  bool in_flight_ = false;
  bool midway_ = false;  // between two steps: after a call it means that the call threw
  Flight flight_{};
  std::deque<Load> loads_;  // in the order of their ends
  std::int64_t link_free_ns_ = 0;
  // The last step of the quiet run that the step in flight belongs to, if `planned_` says so.
  bool planned_ = false;
  std::int64_t planned_steps_ = 0;
  Flight last_quiet_{};
};

}  // namespace kv::engine
