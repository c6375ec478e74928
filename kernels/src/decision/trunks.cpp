#include "decision/trunks.h"

#include <algorithm>
#include <cmath>

namespace kv {

namespace {

constexpr std::int64_t kLeastTokens = 256;  // a shorter head is soon computed again
constexpr double kFadeS = 10.0;        // time constant of the counts
constexpr double kFadesMax = 60.0;     // time constants before the counts are scaled anew
constexpr double kUtilization = 0.8;   // of a worker by the demand on its copy
constexpr double kMemoryShare = 0.2;   // of the pool's KV memory for all copies of one trunk

}  // namespace

void Trunks::pool(const PoolPace& pace, double now_s) {
  pace_ = pace;
  scaled(now_s);
}

void Trunks::arrival(std::span<const std::uint64_t> chain, std::int64_t block_size,
                     std::int64_t prompt_tokens, std::int64_t shared_blocks,
                     std::int64_t known_blocks, double now_s) {
  const double scale = scaled(now_s);
  arrivals_ += scale;
  std::vector<std::size_t> begun = begun_with(chain);
  const std::int64_t tokens = shared_blocks * block_size;
  const bool known = std::any_of(begun.begin(), begun.end(),
                                 [&](std::size_t row) { return heads_[row].tokens == tokens; });
  if (tokens >= kLeastTokens && !known) {
    const auto blocks = static_cast<std::size_t>(shared_blocks);
    begun.push_back(enter(chain[blocks - 1], blocks, tokens, now_s));
  }
  const std::int64_t fresh = prompt_tokens - known_blocks * block_size;
  for (const std::size_t row : begun) {
    Head& head = heads_[row];
    const std::int64_t beyond =
        std::max<std::int64_t>(std::min(fresh, prompt_tokens - head.tokens), 1);
    const double work_s =
        static_cast<double>(beyond) / pace_.prefill_tokens_per_s + pace_.answer_s;
    const double backlog_s = backlog(head, scale, now_s);
    head.count += scale;
    head.work_s += work_s * scale;
    head.backlog_s = backlog_s + work_s;
    head.drained_at_s = now_s;
  }
}

std::optional<Trunk> Trunks::of(std::span<const std::uint64_t> chain) {
  std::vector<std::size_t> begun = begun_with(chain);
  std::stable_sort(begun.begin(), begun.end(), [&](std::size_t a, std::size_t b) {
    return heads_[a].tokens > heads_[b].tokens;
  });
  const double scale = scaled(now_s_);
  std::optional<Trunk> longest;
  for (const std::size_t row : begun) {
    const Trunk found = trunk(heads_[row], scale);
    if (found.wanted_copies > 1) return found;
    if (!longest) longest = found;
  }
  return longest;
}

std::vector<Trunk> Trunks::table() {
  const double scale = scaled(now_s_);
  std::vector<Trunk> rows;
  rows.reserve(heads_.size());
  for (const Head& head : heads_) rows.push_back(trunk(head, scale));
  std::sort(rows.begin(), rows.end(), [](const Trunk& a, const Trunk& b) {
    if (a.demand != b.demand) return a.demand > b.demand;
    if (a.tokens != b.tokens) return a.tokens > b.tokens;
    return a.last_hash < b.last_hash;
  });
  return rows;
}

// Rows of the heads that the chain begins with, which is looked at where heads end; in order.
std::vector<std::size_t> Trunks::begun_with(std::span<const std::uint64_t> chain) const {
  std::vector<std::size_t> begun;
  for (const auto& [place, heads] : ends_) {
    if (place >= chain.size()) break;
    if (const auto found = row_.find(chain[place]); found != row_.end()) {
      begun.push_back(found->second);
    }
  }
  std::sort(begun.begin(), begun.end());
  begun.erase(std::unique(begun.begin(), begun.end()), begun.end());
  return begun;
}

// A row for a new head: an unused one, or the lightest's, with its count as the error.
std::size_t Trunks::enter(std::uint64_t last_hash, std::size_t blocks, std::int64_t tokens,
                          double now_s) {
  std::size_t row = heads_.size();
  if (row < most_) {
    heads_.emplace_back();
  } else {
    const auto lightest =
        std::min_element(heads_.begin(), heads_.end(),
                         [](const Head& a, const Head& b) { return a.count < b.count; });
    row = static_cast<std::size_t>(lightest - heads_.begin());
    row_.erase(lightest->last_hash);
    ends_at(lightest->last_at, -1);
    ++replaced_;
  }
  const double count = heads_[row].count;
  heads_[row] = {.last_hash = last_hash,
                 .last_at = blocks - 1,
                 .tokens = tokens,
                 .count = count,
                 .error = count,
                 .drained_at_s = now_s};
  row_[last_hash] = row;
  ends_at(blocks - 1, 1);
  return row;
}

// So many heads more end at this place.
void Trunks::ends_at(std::size_t place, std::int64_t more) {
  const auto at = std::lower_bound(ends_.begin(), ends_.end(), place,
                                   [](const auto& end, std::size_t p) { return end.first < p; });
  if (at == ends_.end() || at->first != place) {
    ends_.insert(at, {place, more});
  } else if ((at->second += more) == 0) {
    ends_.erase(at);
  }
}

Trunk Trunks::trunk(const Head& head, double scale) const {
  const double recent = (head.count - head.error) / scale;
  const double demand = head.work_s / scale / kFadeS;
  const double backlog_s = backlog(head, scale, now_s_);
  return {.last_hash = head.last_hash,
          .tokens = head.tokens,
          .rate_per_s = recent / kFadeS,
          .share = std::min(recent * scale / arrivals_, 1.0),
          .demand = demand,
          .backlog_s = backlog_s,
          .wanted_copies = wanted(head.tokens, recent, demand, backlog_s)};
}

// How many workers should hold a trunk: so many as keep up with the demand. And as long as one
// more saves those who wait more time in all than computing the trunk takes a worker: n requests
// that wait for half of a backlog B over r copies save n * B / (2 * r * (r + 1)). But none that is
// not used again before the counts fade, nor more than memory has room for.
std::int64_t Trunks::wanted(std::int64_t tokens, double recent, double demand,
                            double backlog_s) const {
  const double size = static_cast<double>(tokens);
  const double trunk_s = size / pace_.prefill_tokens_per_s;
  const double waiting = demand != 0.0 ? backlog_s * recent / (demand * kFadeS) : 0.0;
  const double worth = waiting * backlog_s / (2 * trunk_s);  // r * (r + 1) of the last that pays
  const double copies =
      std::ceil(std::max(demand / kUtilization, std::sqrt(worth + 0.25) - 0.5));
  const double room = std::min({kMemoryShare * pace_.capacity_tokens / size,
                                static_cast<double>(pace_.workers), recent});
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(copies, std::trunc(room))));
}

// Seconds of work left, had the copies wanted last done one second of it each second.
double Trunks::backlog(const Head& head, double scale, double now_s) const {
  const double left_s = head.backlog_s, elapsed_s = now_s - head.drained_at_s;
  if (left_s == 0.0 || elapsed_s == 0.0) return left_s;
  const double recent = (head.count - head.error) / scale;
  const double demand = head.work_s / scale / kFadeS;
  const auto copies = static_cast<double>(wanted(head.tokens, recent, demand, left_s));
  return std::max(left_s - copies * elapsed_s, 0.0);
}

// What one arrival of now counts; long since the first, all counts are scaled down.
double Trunks::scaled(double now_s) {
  if (!since_s_) since_s_ = now_s;
  now_s_ = now_s;
  const double fades = (now_s - *since_s_) / kFadeS;
  if (fades <= kFadesMax) return std::exp(fades);
  const double factor = std::exp(-std::min(fades, 700.0));
  for (Head& head : heads_) {
    head.count *= factor;
    head.error *= factor;
    head.work_s *= factor;
  }
  arrivals_ *= factor;
  since_s_ = now_s;
  return 1.0;
}

}  // namespace kv
