#include "virtual_worker/virtual_worker.h"

#include <algorithm>
#include <stdexcept>

namespace kv::engine {

VirtualWorker::VirtualWorker(const WorkerSettings& settings)
    : settings_(settings),
      price_(settings.step_time, settings.speed),
      changes_(settings.record_events),
      engine_(std::make_unique<Engine>(settings_, changes_, totals_)) {}

void VirtualWorker::settle(std::int64_t now_ns) {
  if (midway_) throw std::logic_error("the worker broke in an earlier call; make a new one");
  now_ns_ = now_ns;
  while (true) {
    if (in_flight_) {
      if (flight_.end_ns > now_ns) return;
      skip_quiet(now_ns);
      if (flight_.end_ns <= now_ns) end_step();
    } else {  // idle, until what is loaded has come
      if (loads_.empty() || loads_.front().end_ns > now_ns) return;
      start_step(loads_.front().end_ns);
    }
  }
}

Refusal VirtualWorker::add(const NewRequest& request) {
  const Refusal refusal = engine_->scheduler.add(request, static_cast<double>(now_ns_) / 1e9);
  planned_ = false;
  if (refusal == Refusal::none && !in_flight_) start_step(now_ns_);
  return refusal;
}

bool VirtualWorker::cancel(std::int64_t id) {
  planned_ = false;
  std::erase_if(outputs_.reads, [id](const Read& read) { return read.id == id; });
  std::erase_if(loads_, [id](const Load& load) { return load.id == id; });
  const bool cancelled = engine_->scheduler.cancel(id);
  // It read, and others may have waited for its blocks.
  if (cancelled && !in_flight_) start_step(now_ns_);
  return cancelled;
}

bool VirtualWorker::end_read(std::int64_t id, bool arrived) {
  planned_ = false;
  const auto is_its = [id](const Load& load) { return load.id == id; };
  if (std::any_of(loads_.begin(), loads_.end(), is_its)) return false;
  const bool ended = engine_->scheduler.end_read(id, arrived);
  changes_.tell();
  if (ended && !in_flight_) start_step(now_ns_);
  return ended;
}

bool VirtualWorker::release(std::int64_t id) {
  planned_ = false;
  const bool released = engine_->scheduler.release(id);
  if (released && !in_flight_) start_step(now_ns_);
  return released;
}

std::int64_t VirtualWorker::next_ns() {
  const bool told = !outputs_.first.empty() || !outputs_.finished.empty() ||
                    !outputs_.reads.empty() || changes_.has_told();
  if (told) return now_ns_;
  if (midway_) return -1;
  if (!in_flight_) return loads_.empty() ? -1 : loads_.front().end_ns;
  plan_quiet();
  return last_quiet_.end_ns;
}

std::vector<std::pair<std::int64_t, std::int64_t>> VirtualWorker::progress() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> tokens;
  for (const Request* request : engine_->scheduler.running()) {
    if (request->output_tokens != 0) tokens.emplace_back(request->id, request->output_tokens);
  }
  return tokens;
}

Stats VirtualWorker::stats() const {
  const Scheduler& scheduler = engine_->scheduler;
  const std::int64_t in_flight_ns = in_flight_ ? now_ns_ - flight_.start_ns : 0;
  return {busy_ns_ + in_flight_ns,     totals_,
          scheduler.running().size(),  scheduler.waiting(),
          engine_->pool.used(),        evicted_before_ + engine_->pool.evicted(),
          engine_->pool.host().size()};
}

void VirtualWorker::set_speed(double speed) {
  settings_.speed = speed;
  price_.set_speed(speed);
  planned_ = false;
}

void VirtualWorker::clear() {
  engine_->pool.clear();
  engine_->scheduler.forget_quiet();
  planned_ = false;
  changes_.tell();
}

std::vector<std::int64_t> VirtualWorker::abort() {
  std::vector<std::int64_t> unfinished = engine_->scheduler.unfinished();
  if (in_flight_) busy_ns_ += now_ns_ - flight_.start_ns;
  evicted_before_ += engine_->pool.evicted();
  in_flight_ = planned_ = false;
  changes_.drop_untold();
  outputs_.reads.clear();
  loads_.clear();
  link_free_ns_ = 0;
  engine_ = std::make_unique<Engine>(settings_, changes_, totals_);
  return unfinished;
}

std::string VirtualWorker::check() const {
  if (midway_) return "the worker broke in an earlier call";
  const std::string wrong = engine_->pool.check();
  if (!wrong.empty()) return wrong;
  const Scheduler& scheduler = engine_->scheduler;
  if (!in_flight_ && !scheduler.empty() && !scheduler.may_rest()) return "requests, but no step";
  return scheduler.check();
}

// The reads of the host among those that were told last: nobody else sees them.
void VirtualWorker::start_loads(std::int64_t now_ns, std::size_t reads_before) {
  auto& reads = outputs_.reads;
  auto kept = reads.begin() + static_cast<std::ptrdiff_t>(reads_before);
  for (auto read = kept; read != reads.end(); ++read) {
    if (!read->from_host) {
      *kept++ = *read;
      continue;
    }
    const std::int64_t blocks = (read->stop - read->start) / settings_.block_size;
    const double seconds = settings_.load_block_s * static_cast<double>(blocks);
    link_free_ns_ = std::max(link_free_ns_, now_ns) + price_.whole_ns(seconds);
    loads_.push_back({read->id, link_free_ns_});
  }
  reads.erase(kept, reads.end());
}

// What has come by `now_ns` may run in the next step.
void VirtualWorker::end_loads(std::int64_t now_ns) {
  if (loads_.empty() || loads_.front().end_ns > now_ns) return;
  do {
    engine_->scheduler.end_read(loads_.front().id, true);
    loads_.pop_front();
  } while (!loads_.empty() && loads_.front().end_ns <= now_ns);
  changes_.tell();
}

void VirtualWorker::start_step(std::int64_t now_ns) {
  planned_ = false;
  midway_ = true;
  end_loads(now_ns);
  const std::size_t reads_before = outputs_.reads.size();
  in_flight_ = engine_->scheduler.schedule(static_cast<double>(now_ns) / 1e9, outputs_.reads);
  start_loads(now_ns, reads_before);
  midway_ = false;
  if (!in_flight_) return;
  const Step& step = engine_->scheduler.step();
  const auto decodes = static_cast<std::int64_t>(step.decodes.size());
  const auto chunks = static_cast<std::int64_t>(step.chunks.size());
  midway_ = decodes + chunks == 0;
  if (midway_) throw std::logic_error("a step that computes nothing");
  price_.set_batch(step.prefill_tokens + decodes, decodes + chunks, step.attention_pairs);
  const std::int64_t length_ns = price_.step_ns(step.decode_ctx_tokens);
  flight_ = {now_ns, now_ns + length_ns, step.decode_ctx_tokens};
}

void VirtualWorker::end_step() {
  const std::int64_t end_ns = flight_.end_ns;
  busy_ns_ += end_ns - flight_.start_ns;
  midway_ = true;
  engine_->scheduler.complete(outputs_);
  changes_.tell();
  start_step(end_ns);
}

// The step after one of a quiet run.
VirtualWorker::Flight VirtualWorker::after(const Flight& flight) const {
  const auto decodes = static_cast<std::int64_t>(engine_->scheduler.step().decodes.size());
  const std::int64_t context_tokens = flight.context_tokens + decodes;
  return {flight.end_ns, flight.end_ns + price_.step_ns(context_tokens), context_tokens};
}

// What the schedule of the step in flight evicted is told at its end, and what is loaded runs after
// one: that is no quiet end.
std::int64_t VirtualWorker::quiet_steps() const {
  return changes_.has_untold() || !loads_.empty() ? 0 : engine_->scheduler.quiet_steps();
}

void VirtualWorker::plan_quiet() {
  if (planned_) return;
  planned_steps_ = quiet_steps();
  last_quiet_ = flight_;
  for (std::int64_t i = 0; i < planned_steps_; ++i) last_quiet_ = after(last_quiet_);
  planned_ = true;
}

// As far as `now_ns` into the quiet run, in one go.
void VirtualWorker::skip_quiet(std::int64_t now_ns) {
  const bool all = planned_ && last_quiet_.start_ns <= now_ns;
  std::int64_t most = planned_steps_;
  if (!planned_) most = quiet_steps();
  std::int64_t steps = 0;
  Flight flight = flight_;
  if (all) {
    flight = last_quiet_;
    steps = planned_steps_;
  } else {
    for (; steps < most && flight.end_ns <= now_ns; ++steps) flight = after(flight);
  }
  if (steps == 0) return;
  busy_ns_ += flight.start_ns - flight_.start_ns;
  engine_->scheduler.skip(steps);
  flight_ = flight;
  planned_steps_ -= steps;  // the run ends where it did
}

}  // namespace kv::engine
