#include "virtual_worker/scheduler.h"

#include <algorithm>
#include <cmath>

namespace kv::engine {
namespace {

void put(std::vector<Request*>& queue, Request* request) {
  if (queue.empty() || Request::before(queue.back(), request)) {  // nearly always
    queue.push_back(request);
    return;
  }
  queue.insert(std::upper_bound(queue.begin(), queue.end(), request, Request::before), request);
}

void drop(std::vector<Request*>& queue, Request* request) {
  queue.erase(std::lower_bound(queue.begin(), queue.end(), request, Request::before));
}

}  // namespace

Scheduler::Scheduler(const Settings& settings, BlockPool& pool, std::int64_t block_size,
                     Totals& totals)
    : settings_(settings),
      pool_(pool),
      block_size_(block_size),
      totals_(totals),
      blocks_(pool, block_size),
      max_sequence_tokens_(std::min(
          settings.max_model_tokens,
          (pool.blocks() - static_cast<std::int64_t>(pool.groups().working())) * block_size)),
      watermark_blocks_(static_cast<std::size_t>(std::ceil(settings.watermark * pool.blocks()))) {}

std::int64_t Scheduler::queued_tokens() const {
  std::int64_t tokens = 0;
  for (const Request* request : reading_) tokens += request->total_tokens() - request->read_target;
  for (const Request* request : waiting_) {
    if (request->imports) {
      ++tokens;
      continue;
    }
    const std::size_t hit = blocks_.hit(*request);
    const auto found = static_cast<std::int64_t>(hit + blocks_.host_hit(*request, hit));
    tokens += request->total_tokens() - found * block_size_;
  }
  for (const Request* request : running_) {
    tokens += std::max<std::int64_t>(0, request->prefill_target - request->computed_tokens);
  }
  return tokens;
}

std::vector<std::int64_t> Scheduler::unfinished() const {
  std::vector<const Request*> requests;
  for (const auto& entry : requests_) requests.push_back(entry.second.get());
  std::sort(requests.begin(), requests.end(),
            [](const Request* left, const Request* right) { return left->serial < right->serial; });
  std::vector<std::int64_t> ids;
  for (const Request* request : requests) ids.push_back(request->id);
  return ids;
}

Refusal Scheduler::hopeless(const NewRequest& request) const {
  if (request.prompt_tokens == 0) return Refusal::empty_prompt;
  if (request.max_output_tokens < 1) return Refusal::no_output;
  if (request.prompt_tokens + 1 > settings_.max_model_tokens) return Refusal::too_long;
  if (request.prompt_tokens + 1 > max_sequence_tokens_) return Refusal::kv_capacity;
  return Refusal::none;
}

Refusal Scheduler::add(const NewRequest& fresh, double now_s) {
  const Refusal refusal = hopeless(fresh);
  if (refusal != Refusal::none) return refusal;
  if (static_cast<std::int64_t>(waiting_.size()) >= settings_.max_queue) return Refusal::queue_full;
  auto request = std::make_unique<Request>();
  request->id = fresh.id;
  request->prompt_tokens = fresh.prompt_tokens;
  request->imports = fresh.imports;
  request->exports = fresh.exports;
  request->arrival_s = now_s;
  request->token_limit =
      std::min(fresh.prompt_tokens + fresh.max_output_tokens, max_sequence_tokens_);
  const auto most = static_cast<std::size_t>(request->token_limit / block_size_);
  const Chain names = fresh.chain.first(std::min(fresh.chain.size(), most));
  request->names.assign(names.begin(), names.end());
  request->extend_chain(static_cast<std::size_t>(fresh.prompt_tokens / block_size_));
  request->aged_s = static_cast<double>(fresh.priority) * settings_.ageing_s + now_s;
  request->serial = serial_++;
  // What waits behind one that cannot start changes nothing until that one can.
  if (waiting_.empty() || Request::before(request.get(), waiting_.front())) quiet_ = false;
  put(waiting_, requests_.emplace(fresh.id, std::move(request)).first->second.get());
  return Refusal::none;
}

bool Scheduler::cancel(std::int64_t id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return false;
  Request* request = found->second.get();
  quiet_ = false;
  std::erase(step_.decodes, request);
  std::erase_if(step_.chunks, [request](const Chunk& chunk) { return chunk.request == request; });
  finish(*request);
  return true;
}

bool Scheduler::end_read(std::int64_t id, bool arrived) {
  const auto found = requests_.find(id);
  if (found == requests_.end() || !found->second->reading) return false;
  Request* request = found->second.get();
  quiet_ = false;
  std::erase(reading_, request);
  request->reading = false;
  if (arrived) {
    blocks_.end_load(*request);
    request->computed_tokens = request->read_target;
    blocks_.publish(*request);
    run(*request);
  } else {
    blocks_.leave(*request);
    put(waiting_, request);
  }
  return true;
}

bool Scheduler::release(std::int64_t id) {
  const auto found = exports_.find(id);
  if (found == exports_.end()) return false;
  quiet_ = false;
  pool_.release(found->second);
  exports_.erase(found);
  return true;
}

void Scheduler::complete(Outputs& outputs) {
  for (Request* request : step_.decodes) {
    const auto room = static_cast<std::int64_t>(request->blocks.size()) * block_size_;
    if (++request->computed_tokens == room) blocks_.publish(*request);
    take_token(*request, outputs);
  }
  for (const Chunk& chunk : step_.chunks) {
    Request& request = *chunk.request;
    request.computed_tokens = chunk.start + chunk.tokens;
    blocks_.publish(request);
    if (!request.prefilling()) take_token(request, outputs);
  }
}

std::int64_t Scheduler::quiet_steps() const {
  if (!quiet_) return 0;
  constexpr std::int64_t kMost = 4096;  // bounds the sum of their lengths
  std::int64_t steps = kMost;
  for (const Request* request : step_.decodes) {
    const auto room = static_cast<std::int64_t>(request->blocks.size()) * block_size_;
    const std::int64_t to_publish = room - request->computed_tokens;
    const std::int64_t to_finish = request->token_limit - 1 - request->computed_tokens;
    steps = std::min({steps, to_publish - 1, to_finish - 1});
  }
  return std::max<std::int64_t>(steps, 0);
}

void Scheduler::skip(std::int64_t steps) {
  for (Request* request : step_.decodes) {
    request->computed_tokens += steps;
    request->output_tokens += steps;
  }
  step_.decode_ctx_tokens += steps * static_cast<std::int64_t>(step_.decodes.size());
  totals_.steps += steps;
}

void Scheduler::take_token(Request& request, Outputs& outputs) {
  if (++request.output_tokens == 1) {
    outputs.first.push_back(request.id);
    outputs.first_hit_tokens.push_back(request.cached_tokens);
  }
  if (request.computed_tokens + 1 >= request.token_limit) {
    outputs.finished.push_back(request.id);
    if (request.exports) keep(request);
    finish(request);
  }
}

// The prompt's blocks are held beyond its end.
void Scheduler::keep(Request& request) {
  release(request.id);  // of an earlier attempt
  const std::int64_t blocks = (request.prompt_tokens + block_size_ - 1) / block_size_;
  const auto end = request.blocks.begin() + static_cast<std::ptrdiff_t>(blocks);
  exports_[request.id].assign(request.blocks.begin(), end);
  request.blocks.erase(request.blocks.begin(), end);
}

void Scheduler::finish(Request& request) {
  if (request.running || request.reading) blocks_.leave(request);
  if (request.reading) {
    std::erase(reading_, &request);
  } else {
    drop(request.running ? running_ : waiting_, &request);
  }
  requests_.erase(request.id);
}

std::string Scheduler::check() const {
  if (running_.size() + waiting() != requests_.size()) return "a request was lost";
  if (!std::is_sorted(running_.begin(), running_.end(), Request::before) ||
      !std::is_sorted(waiting_.begin(), waiting_.end(), Request::before)) {
    return "a queue is out of order";
  }
  std::vector<BlockId> held;
  for (const auto* requests : {&running_, &reading_}) {
    for (const Request* request : *requests) {
      held.insert(held.end(), request->blocks.begin(), request->blocks.end());
      held.insert(held.end(), request->group_blocks.begin(), request->group_blocks.end());
    }
  }
  for (const auto& entry : exports_) {
    held.insert(held.end(), entry.second.begin(), entry.second.end());
  }
  std::sort(held.begin(), held.end());
  const auto last = std::unique(held.begin(), held.end());
  if (last - held.begin() != static_cast<std::ptrdiff_t>(pool_.used())) {
    return "blocks are held by nobody";
  }
  return "";
}

}  // namespace kv::engine
