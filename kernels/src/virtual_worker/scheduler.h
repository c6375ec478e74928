// In-flight batching: engine/scheduler/scheduler.py without its counters of reasons. Steps can be
// skipped while nothing can happen but one more token for each running request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "virtual_worker/request_blocks.h"

namespace kv::engine {

struct Settings {
  std::int64_t max_num_tokens, max_batch_size, max_model_tokens, min_chunk_tokens;
  double watermark, ageing_s;
  std::int64_t max_queue, prefix_wait_tokens;
};

enum class Refusal { none, empty_prompt, no_output, too_long, kv_capacity, queue_full };

struct NewRequest {
  std::int64_t id;
  Chain chain;
  std::int64_t prompt_tokens, max_output_tokens, priority;
  bool imports = false;  // all but its last prompt token's KV comes from another worker
  bool exports = false;  // its prompt's blocks are held when it has ended, until `release`
};

// Tokens `start`..`stop` of a request whose KV another worker has, or the host.
struct Read {
  std::int64_t id, start, stop;
  bool from_host = false;
};

// What completed steps gave, in order.
struct Outputs {
  std::vector<std::int64_t> first;  // requests that got their first token
  std::vector<std::int64_t> first_hit_tokens;
  std::vector<std::int64_t> finished;
  std::vector<Read> reads;
};

struct Chunk {
  Request* request;
  std::int64_t start, tokens;
};

// One batch. Lifetime: from `schedule` to `complete`; requests cancelled meanwhile leave it.
struct Step {
  std::vector<Request*> decodes;
  std::vector<Chunk> chunks;
  bool preempted = false;
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_ctx_tokens = 0;
  double attention_pairs = 0.0;
};

struct Totals {
  std::int64_t steps = 0, preemptions = 0, recomputed_tokens = 0, query_tokens = 0, hit_tokens = 0,
               host_hit_tokens = 0;
};

class Scheduler {
 public:
  Scheduler(const Settings& settings, BlockPool& pool, std::int64_t block_size, Totals& totals);

  bool in_use(std::int64_t id) const { return requests_.contains(id); }
  bool empty() const { return requests_.empty(); }
  // What it has may all wait for other workers.
  bool may_rest() const { return !reading_.empty() || !exports_.empty(); }
  const std::vector<Request*>& running() const { return running_; }
  std::size_t waiting() const { return waiting_.size() + reading_.size(); }
  std::int64_t queued_tokens() const;
  std::vector<std::int64_t> unfinished() const;  // ids, oldest first

  Refusal add(const NewRequest& request, double now_s);  // its id must not be in use
  bool cancel(std::int64_t id);

  // The read of a request has ended: its prompt's KV is there, or it waits for its turn again and
  // computes it here. False for one that does not read.
  bool end_read(std::int64_t id, bool arrived);
  // Nobody reads the prompt of an ended request any more; false if nobody could.
  bool release(std::int64_t id);

  // The next step, or false when there is no request at all, or all of them wait for KV, or for
  // blocks that other workers read. What is to be read is put into `reads`.
  bool schedule(double now_s, std::vector<Read>& reads);
  const Step& step() const { return step_; }
  void complete(Outputs& outputs);

  // How many times `complete` and `schedule` would from here on only give each running request
  // a token that nobody outside sees; 0 when the step in flight is not of that kind.
  std::int64_t quiet_steps() const;
  // Does so `steps` times, at most as many as `quiet_steps` said.
  void skip(std::int64_t steps);
  // The cache was cleared.
  void forget_quiet() { quiet_ = false; }

  std::string check() const;  // what is wrong, or nothing

 private:
  enum class Obstacle { none, batch, tokens, prefix, blocks };

  Refusal hopeless(const NewRequest& request) const;
  void schedule_decodes();
  bool make_room(Request& request);
  void preempt(Request& victim);
  std::int64_t add_chunk(Request& request, std::int64_t budget);
  bool admit(std::int64_t budget, double now_s, std::vector<Read>& reads);
  Obstacle obstacle(const Request& request, std::size_t hit, std::size_t host_hit,
                    std::int64_t budget, double now_s) const;
  bool waits_for_prefix(const Request& request, std::size_t hit, std::int64_t uncached_tokens,
                        double now_s) const;
  void start(Request& request, std::size_t hit, std::size_t host_hit, std::vector<Read>& reads);
  void run(Request& request);
  void keep(Request& request);
  void take_token(Request& request, Outputs& outputs);
  void finish(Request& request);

  Settings settings_;
  BlockPool& pool_;
  std::int64_t block_size_;
  Totals& totals_;
  RequestBlocks blocks_;
  std::int64_t max_sequence_tokens_;
  std::size_t watermark_blocks_;
  std::unordered_map<std::int64_t, std::unique_ptr<Request>> requests_;  // unfinished
  std::vector<Request*> waiting_;  // both in their order
  std::vector<Request*> running_;
  std::vector<Request*> reading_;
  std::unordered_map<std::int64_t, std::vector<BlockId>> exports_;  // prompts of ended requests
  std::uint64_t serial_ = 0;
  Step step_;
  bool quiet_ = false;
};

}  // namespace kv::engine
