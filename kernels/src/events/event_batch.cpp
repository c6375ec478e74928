#include "events/event_batch.h"

#include <algorithm>
#include <bit>

#include "base/msgpack.h"
#include "events/event_batch_reader.h"

namespace kv {
namespace {

using msgpack::Header;
using msgpack::Kind;
using msgpack::Malformed;

double time_of(const Header& header) {
  if (header.kind == Kind::real) return std::bit_cast<double>(header.value);
  if (header.kind != Kind::integer) throw Malformed("the time must be a number");
  return header.negative ? static_cast<double>(static_cast<std::int64_t>(header.value))
                         : static_cast<double>(header.value);
}

std::uint32_t rank_of(const Header& header) {
  if (header.kind == Kind::nil) return 0;
  if (!header.within(0, EventBatch::kMaxRank)) {
    throw Malformed("the rank must be 0.." + std::to_string(EventBatch::kMaxRank) + " or nil");
  }
  return static_cast<std::uint32_t>(header.value);
}

}  // namespace

EventBatch::EventBatch(std::span<const std::uint8_t> payload) {
  if (payload.size() > kMaxPayloadBytes) {
    throw std::invalid_argument("event batch: " + std::to_string(payload.size()) +
                                " bytes, at most " + std::to_string(kMaxPayloadBytes));
  }
  msgpack::Reader reader(payload);
  EventReader events(*this, reader);
  try {
    const Header envelope = reader.header();
    if (envelope.kind != Kind::array || envelope.size < 2) {
      throw Malformed("must be an array [time, events, rank]");
    }
    ts_s_ = time_of(reader.header());
    const Header list = reader.header();
    if (list.kind != Kind::array || list.size > kMaxEvents) {
      throw Malformed("the events must be an array of at most " + std::to_string(kMaxEvents));
    }
    events_.reserve(std::min(list.size, payload.size() / 16));  // the least an event takes
    tokens_.reserve(std::min(kMaxTokens, payload.size() / 4));  // about what they take
    names_.reserve(std::min(kMaxBlocks, payload.size() / 64));
    for (std::size_t i = 0; i < list.size; ++i) events.read();
    if (envelope.size > 2) rank_ = rank_of(reader.header());
    for (std::size_t i = 3; i < envelope.size; ++i) reader.skip();
    if (reader.left() > 0) throw Malformed("more bytes follow it");
  } catch (const Malformed& error) {
    throw std::invalid_argument(std::string("event batch: ") + error.what());
  }
}

}  // namespace kv
