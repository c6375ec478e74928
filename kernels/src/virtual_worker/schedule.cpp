// What the next step computes: decodes first, then chunks of running prefills, then admissions.
#include <algorithm>

#include "virtual_worker/scheduler.h"

namespace kv::engine {

bool Scheduler::schedule(double now_s, std::vector<Read>& reads) {
  step_.decodes.clear();
  step_.chunks.clear();
  step_.preempted = false;
  step_.prefill_tokens = step_.decode_ctx_tokens = 0;
  step_.attention_pairs = 0.0;
  quiet_ = false;
  if (requests_.empty()) return false;
  schedule_decodes();
  std::int64_t budget =
      settings_.max_num_tokens - static_cast<std::int64_t>(step_.decodes.size());
  for (Request* request : running_) {
    if (budget != 0 && request->prefilling()) budget -= add_chunk(*request, budget);
  }
  const std::size_t reads_before = reads.size();
  const bool unmoved = admit(budget, now_s, reads);
  const bool rests = may_rest() || reads.size() != reads_before;
  if (rests && step_.decodes.empty() && step_.chunks.empty()) return false;
  ++totals_.steps;
  quiet_ = unmoved && step_.chunks.empty() && !step_.preempted &&
           step_.decodes.size() == running_.size();
  return true;
}

void Scheduler::schedule_decodes() {
  // The list may shrink from its end while it is walked: victims are the last in order, so a
  // request that already has its place in the step is never taken.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    if (request.prefilling()) continue;
    const std::int64_t computed = request.computed_tokens;
    const auto room = static_cast<std::int64_t>(request.blocks.size()) * block_size_;
    if (computed < room || make_room(request)) {
      step_.decodes.push_back(&request);
      step_.decode_ctx_tokens += computed + 1;
    }
  }
}

bool Scheduler::make_room(Request& request) {
  while (!blocks_.grow(request)) {
    Request* victim = running_.back();
    running_.pop_back();
    preempt(*victim);
    step_.preempted = true;
    if (victim == &request) return false;
  }
  return true;
}

void Scheduler::preempt(Request& victim) {
  blocks_.leave(victim);
  victim.running = false;
  victim.was_preempted = true;
  ++victim.preemptions;
  ++totals_.preemptions;
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), &victim, Request::before),
                  &victim);
}

std::int64_t Scheduler::add_chunk(Request& request, std::int64_t budget) {
  const std::int64_t start = request.computed_tokens;
  const std::int64_t tokens = std::min(budget, request.prefill_target - start);
  step_.chunks.push_back({&request, start, tokens});
  step_.prefill_tokens += tokens;
  step_.attention_pairs += static_cast<double>(tokens) *
                           (static_cast<double>(start) + static_cast<double>(tokens) / 2.0);
  return tokens;
}

// Starts waiting requests in order. True if what keeps the others will keep them for as long as
// nothing but decodes happens.
bool Scheduler::admit(std::int64_t budget, double now_s, std::vector<Read>& reads) {
  bool unmoved = true;
  std::size_t kept = 0;
  std::size_t place = 0;
  while (place < waiting_.size()) {
    const auto taken = static_cast<std::int64_t>(running_.size() + reading_.size());
    if (taken >= settings_.max_batch_size) break;
    Request& request = *waiting_[place];
    const std::size_t hit = blocks_.hit(request);
    const std::size_t host_hit = blocks_.host_hit(request, hit);
    const Obstacle why = obstacle(request, hit, host_hit, budget, now_s);
    // Nobody overtakes a request that waits for room, or large ones would starve.
    if (why != Obstacle::none && why != Obstacle::prefix) break;
    ++place;
    if (why == Obstacle::prefix) {
      waiting_[kept++] = &request;
      unmoved = false;  // its wait has an end in time
    } else {
      start(request, hit, host_hit, reads);
      if (request.running) budget -= add_chunk(request, budget);
    }
  }
  using Offset = std::ptrdiff_t;
  waiting_.erase(waiting_.begin() + static_cast<Offset>(kept),
                 waiting_.begin() + static_cast<Offset>(place));
  return unmoved;
}

Scheduler::Obstacle Scheduler::obstacle(const Request& request, std::size_t hit,
                                        std::size_t host_hit, std::int64_t budget,
                                        double now_s) const {
  const std::int64_t uncached_tokens =
      request.total_tokens() - static_cast<std::int64_t>(hit) * block_size_;
  const bool computes = host_hit == 0 && (!request.imports || uncached_tokens == 1);
  if (computes && budget < std::min(settings_.min_chunk_tokens, uncached_tokens)) {
    return Obstacle::tokens;
  }
  if (waits_for_prefix(request, hit, uncached_tokens, now_s)) return Obstacle::prefix;
  // An empty engine takes whatever fits: the watermark protects decodes, and there are none.
  const bool empty = running_.empty() && reading_.empty();
  const std::size_t spare_blocks = empty ? 0 : watermark_blocks_;
  if (step_.preempted || !blocks_.fits(request, hit, spare_blocks)) return Obstacle::blocks;
  return Obstacle::none;
}

bool Scheduler::waits_for_prefix(const Request& request, std::size_t hit,
                                 std::int64_t uncached_tokens, double now_s) const {
  const std::int64_t least_tokens = settings_.prefix_wait_tokens;
  if (least_tokens == 0 || now_s - request.arrival_s >= settings_.ageing_s) return false;
  const std::int64_t shared_tokens = blocks_.in_flight_tokens(request, hit);
  return shared_tokens >= least_tokens && 2 * shared_tokens >= uncached_tokens;
}

void Scheduler::start(Request& request, std::size_t hit, std::size_t host_hit,
                      std::vector<Read>& reads) {
  blocks_.start(request, hit, host_hit);
  const std::int64_t cached_tokens = request.computed_tokens;
  const std::int64_t found_tokens = static_cast<std::int64_t>(hit + host_hit) * block_size_;
  if (request.preemptions != 0) {
    totals_.recomputed_tokens += request.total_tokens() - found_tokens;
  } else if (!request.started) {
    request.started = true;
    request.cached_tokens = found_tokens;
    totals_.query_tokens += request.prompt_tokens;
    totals_.hit_tokens += cached_tokens;
    totals_.host_hit_tokens += found_tokens - cached_tokens;
  }
  request.read_target = found_tokens;
  if (request.imports) {
    request.imports = false;
    request.read_target = std::max(cached_tokens, request.total_tokens() - 1);
    reads.push_back({request.id, cached_tokens, request.total_tokens() - 1});
  } else if (host_hit != 0) {
    reads.push_back({request.id, cached_tokens, found_tokens, true});
  }
  if (cached_tokens < request.read_target) {
    request.reading = true;
    reading_.push_back(&request);
    return;
  }
  run(request);
}

void Scheduler::run(Request& request) {
  request.running = true;
  request.was_preempted = false;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &request, Request::before),
                  &request);
}

}  // namespace kv::engine
