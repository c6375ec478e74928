// One worker's blocks as bytes and back: `tests/oracles/worker_blocks.py` has the layout.
#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "base/chain.h"
#include "events/worker_blocks.h"

namespace kv {
namespace {

constexpr std::string_view kMagic = "kvwb";
constexpr std::uint32_t kVersion = 5;

std::uint64_t hash_text(std::string_view text) {
  return hash_bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

class Writer {
 public:
  template <class Value>
  void put(Value value) {
    static_assert(std::is_integral_v<Value>);
    const std::size_t at = bytes.size();
    bytes.resize(at + sizeof value);
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }

  template <class Value>
  void put_all(const std::vector<Value>& values) {
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
  }

  std::string bytes;
};

class Parts {
 public:
  explicit Parts(std::string_view data) : data_(data) {}

  std::string_view take(std::uint64_t size) {
    if (size > data_.size()) refuse("it ends early");
    const std::string_view taken = data_.substr(0, size);
    data_.remove_prefix(size);
    return taken;
  }

  template <class Value>
  Value get() {
    Value value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  template <class Value>
  std::vector<Value> get_all(std::uint64_t count) {
    if (count > data_.size() / sizeof(Value)) refuse("it ends early");
    std::vector<Value> values(count);
    const std::string_view bytes = take(count * sizeof(Value));
    if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  bool empty() const { return data_.empty(); }

  [[noreturn]] static void refuse(const std::string& why) {
    throw std::invalid_argument("dump of blocks: " + why);
  }

 private:
  std::string_view data_;
};

// How the blocks of a parked run are told; dumps without ids beyond int32 are as they ever were.
enum class Told : std::uint8_t { tokens, chain, wide };

void put_run(Writer& out, const Run& run) {
  const Told told = run.chain ? Told::chain : run.wide.empty() ? Told::tokens : Told::wide;
  out.put(run.parent.value());
  out.put(run.tier);
  out.put(static_cast<std::uint8_t>(told));
  out.put(static_cast<std::uint8_t>(!run.extras.empty()));
  out.put(static_cast<std::uint32_t>(run.names.size()));
  out.put(static_cast<std::uint32_t>(run.unit));
  out.put_all(run.names);
  if (told == Told::chain) {
    out.put_all(*run.chain);
  } else if (told == Told::wide) {
    out.put_all(run.wide);
  } else {
    out.put_all(run.tokens);
  }
  for (const std::string& extra : run.extras) {
    out.put(static_cast<std::uint32_t>(extra.size()));
    out.bytes += extra;
  }
}

Run get_run(Parts& parts, std::uint32_t block_size) {
  Run run;
  run.parent = parts.get<std::uint64_t>();
  run.tier = parts.get<std::uint8_t>();
  const auto told = parts.get<std::uint8_t>();
  const auto has_extras = parts.get<std::uint8_t>();
  const auto blocks = parts.get<std::uint32_t>();
  run.unit = parts.get<std::uint32_t>();
  const bool is_unit = run.unit == 1 ||
                       (run.unit > 1 && run.unit <= EventBatch::kMaxBlockSize && run.tier > 0 &&
                        has_extras == 0 && told != static_cast<std::uint8_t>(Told::chain));
  if (run.tier >= WorkerBlocks::kTiers || told > static_cast<std::uint8_t>(Told::wide) ||
      has_extras > 1 || blocks == 0 || !is_unit) {
    Parts::refuse("a parked run is malformed");
  }
  run.names = parts.get_all<std::uint64_t>(blocks);
  const std::uint64_t tokens = std::uint64_t{blocks} * run.unit * block_size;
  if (told == static_cast<std::uint8_t>(Told::chain)) {
    run.chain = parts.get_all<std::uint64_t>(blocks);
  } else if (told == static_cast<std::uint8_t>(Told::wide)) {
    run.wide = parts.get_all<std::int64_t>(tokens);
  } else {
    run.tokens = parts.get_all<std::int32_t>(tokens);
  }
  for (std::uint32_t i = 0; has_extras != 0 && i < blocks; ++i) {
    run.extras.emplace_back(parts.take(parts.get<std::uint32_t>()));
  }
  return run;
}

// Of one tier after the other, ascending by name.
void put_copies(Writer& out, const Copies& copies) {
  for (const CopiesInTier& of_tier : copies) {
    const std::map<std::uint64_t, std::uint32_t> sorted(of_tier.begin(), of_tier.end());
    out.put(static_cast<std::uint64_t>(sorted.size()));
    for (const auto& [name, count] : sorted) {
      out.put(name);
      out.put(count);
    }
  }
}

Copies get_copies(Parts& parts, const std::vector<std::uint64_t>& names,
                  const std::vector<std::uint8_t>& tiers) {
  Copies copies;
  for (std::size_t tier = 0; tier < copies.size(); ++tier) {
    for (auto left = parts.get<std::uint64_t>(); left > 0; --left) {
      const auto name = parts.get<std::uint64_t>();
      const auto count = parts.get<std::uint32_t>();
      const auto at = std::lower_bound(names.begin(), names.end(), name);
      const bool held = at != names.end() && *at == name &&
                        (tiers[at - names.begin()] >> tier & 1) != 0;
      if (!held || count == 0 || !copies[tier].emplace(name, count).second) {
        Parts::refuse("its copies are malformed");
      }
    }
  }
  return copies;
}

void get_parked(Parts& parts, std::uint32_t block_size, ParkedBlocks& parked) {
  for (auto runs = parts.get<std::uint32_t>(); runs > 0; --runs) {
    if (!parked.park(get_run(parts, block_size))) Parts::refuse("more is parked than may be");
  }
  for (auto dead = parts.get<std::uint32_t>(); dead > 0; --dead) {
    const auto name = parts.get<std::uint64_t>();
    const auto tier = parts.get<std::uint8_t>();
    parked.evict(std::span(&name, 1), tier);
    if (!parked.dead().contains({name, tier})) Parts::refuse("a dead block was not parked");
  }
}

// Ascending by name.
void put_chunks(Writer& out, const Chunks& chunks) {
  const std::map<std::uint64_t, std::vector<std::uint64_t>> sorted(chunks.begin(), chunks.end());
  out.put(static_cast<std::uint64_t>(sorted.size()));
  for (const auto& [name, inner] : sorted) {
    out.put(name);
    out.put(static_cast<std::uint32_t>(inner.size()));
    out.put_all(inner);
  }
}

// `names`: those of the dump, ascending.
Chunks get_chunks(Parts& parts, const std::vector<std::uint64_t>& names) {
  Chunks chunks;
  for (auto left = parts.get<std::uint64_t>(); left > 0; --left) {
    const auto name = parts.get<std::uint64_t>();
    const auto inner = parts.get<std::uint32_t>();
    const bool is_known = std::binary_search(names.begin(), names.end(), name);
    if (!is_known || inner == 0 || inner >= EventBatch::kMaxBlockSize ||
        !chunks.emplace(name, parts.get_all<std::uint64_t>(inner)).second) {
      Parts::refuse("its chunks are malformed");
    }
  }
  return chunks;
}

// Their blocks ascending by name, each with how many copies there are.
void put_groups(Writer& out, const CacheGroups& groups) {
  out.put(static_cast<std::uint32_t>(groups.groups().size()));
  for (const CacheGroups::Group& group : groups.groups()) {
    std::map<std::uint64_t, std::uint64_t> sorted;
    group.held.each([&](const BlockNames::Known& known) {
      sorted.emplace(known.name(), known.chain());
    });
    out.put(group.number);
    out.put(static_cast<std::uint8_t>(group.kind));
    out.put(group.window);
    out.put(group.block_size);
    out.put(static_cast<std::uint64_t>(sorted.size()));
    for (const auto& [name, copies] : sorted) {
      out.put(name);
      out.put(copies);
    }
  }
}

CacheGroups get_groups(Parts& parts) {
  CacheGroups groups;
  for (auto left = parts.get<std::uint32_t>(); left > 0; --left) {
    const auto number = parts.get<std::uint32_t>();
    const auto kind = static_cast<CacheKind>(parts.get<std::uint8_t>());
    const auto window = parts.get<std::uint32_t>();
    const auto block_size = parts.get<std::uint32_t>();
    CacheGroups::Group group{number, kind, window, block_size, {}};
    const bool is_kind = kind == CacheKind::state ? window == 0
                                                  : kind == CacheKind::window && window > 0;
    if (!is_kind || number > EventBatch::kMaxRank || block_size > EventBatch::kMaxBlockSize ||
        groups.groups().size() == CacheGroups::kMostGroups) {
      Parts::refuse("its groups are malformed");
    }
    for (auto names = parts.get<std::uint64_t>(); names > 0; --names) {
      const auto name = parts.get<std::uint64_t>();
      const auto copies = parts.get<std::uint64_t>();
      if (copies == 0 || group.held.find(name)) Parts::refuse("its groups are malformed");
      group.held.at(name).set(copies, 1);
    }
    for (const CacheGroups::Group& other : groups.groups()) {
      if (other.number == number) Parts::refuse("its groups are malformed");
    }
    groups.put(std::move(group));
  }
  if (groups.held() > CacheGroups::kMostHeld) Parts::refuse("its groups hold too much");
  return groups;
}

}  // namespace

FrozenBlocks WorkerBlocks::frozen() const {
  const std::lock_guard lock(mutex_);
  return {block_size_, model_, names_, copies_, parked_, group_, full_attention_,
          is_placed_, groups_, chunks_};
}

std::string FrozenBlocks::dump() const {
  std::vector<std::uint64_t> sorted;
  sorted.reserve(names.size());
  names.each([&](const BlockNames::Known& known) { sorted.push_back(known.name()); });
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::uint64_t> chains;
  std::vector<std::uint8_t> tiers;
  chains.reserve(sorted.size());
  tiers.reserve(sorted.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (i + 16 < sorted.size()) names.prefetch(sorted[i + 16]);
    const BlockNames::Known known = names.find(sorted[i]);
    chains.push_back(known.chain());
    tiers.push_back(known.tiers());
  }
  Writer out;
  out.bytes.reserve(64 + 17 * sorted.size());
  out.bytes = kMagic;
  out.put(kVersion);
  out.put(block_size);
  out.put(hash_text(model));
  out.put(group);
  out.put(static_cast<std::uint8_t>(full_attention));
  out.put(static_cast<std::uint8_t>(is_placed));
  out.put(static_cast<std::uint64_t>(sorted.size()));
  out.put_all(sorted);
  out.put_all(chains);
  out.put_all(tiers);
  put_copies(out, copies);
  std::uint32_t runs = 0;
  for (const auto& [parent, waiting] : parked.runs()) {
    runs += static_cast<std::uint32_t>(waiting.size());
  }
  out.put(runs);
  for (const auto& [parent, waiting] : parked.runs()) {
    for (const Run& run : waiting) put_run(out, run);
  }
  out.put(static_cast<std::uint32_t>(parked.dead().size()));
  for (const auto& [name, tier] : parked.dead()) {
    out.put(name);
    out.put(tier);
  }
  put_groups(out, groups);
  put_chunks(out, chunks);
  out.put(hash_text(out.bytes));
  return std::move(out.bytes);
}

void WorkerBlocks::load(std::string_view data) {
  const std::lock_guard lock(mutex_);
  Parts parts(data);
  if (parts.take(kMagic.size()) != kMagic || parts.get<std::uint32_t>() != kVersion) {
    Parts::refuse("not one of version " + std::to_string(kVersion));
  }
  constexpr std::size_t kSum = sizeof(std::uint64_t);
  if (data.size() < kMagic.size() + sizeof kVersion + kSum) Parts::refuse("it ends early");
  const std::size_t body = data.size() - kSum;
  if (Parts(data.substr(body)).get<std::uint64_t>() != hash_text(data.substr(0, body))) {
    Parts::refuse("its bytes were changed");
  }
  parts = Parts(data.substr(0, body).substr(kMagic.size() + sizeof kVersion));
  if (parts.get<std::uint32_t>() != block_size_ ||
      parts.get<std::uint64_t>() != hash_text(model_)) {
    Parts::refuse("it is of another model or block size");
  }
  const auto group = parts.get<std::uint32_t>();
  const auto full_attention = parts.get<std::uint8_t>();
  const auto is_placed = parts.get<std::uint8_t>();
  const auto count = parts.get<std::uint64_t>();
  const auto names = parts.get_all<std::uint64_t>(count);
  const auto chains = parts.get_all<std::uint64_t>(count);
  const auto tiers = parts.get_all<std::uint8_t>(count);
  const auto legal = [](std::uint8_t held) { return held >= 1 && held < 1U << kTiers; };
  if (group > EventBatch::kMaxRank || full_attention + is_placed > 1 ||
      std::adjacent_find(names.begin(), names.end(), std::greater_equal<>()) != names.end() ||
      !std::all_of(tiers.begin(), tiers.end(), legal)) {
    Parts::refuse("its names are malformed");
  }
  Copies copies = get_copies(parts, names, tiers);
  ParkedBlocks parked(parked_.limit());
  get_parked(parts, block_size_, parked);
  CacheGroups groups = get_groups(parts);
  Chunks chunks = get_chunks(parts, names);
  if (full_attention != 0 && !groups.empty() && !chunks.empty()) {
    Parts::refuse("its chunks are malformed");
  }
  if (!parts.empty()) Parts::refuse("more bytes follow it");
  forget();
  group_ = group;
  full_attention_ = full_attention != 0;
  is_placed_ = is_placed != 0;
  parked_ = std::move(parked);
  copies_ = std::move(copies);
  groups_ = std::move(groups);
  chunks_ = std::move(chunks);
  for (std::size_t i = 0; i < names.size(); ++i) {
    names_.at(names[i]).set(chains[i], tiers[i]);
  }
  name_chains();
  for (std::uint8_t tier = 0; tier < kTiers; ++tier) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if ((tiers[i] >> tier & 1) != 0) tell(Told::stored, tier, chains[i]);
    }
    tell_all();
  }
}

}  // namespace kv
