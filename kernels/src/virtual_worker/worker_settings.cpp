#include "virtual_worker/worker_settings.h"

#include <array>
#include <cmath>
#include <string>

#include "arguments.h"

namespace nb = nanobind;
using kv::arguments::in_range;
using kv::arguments::number;

namespace kv {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

std::string text(nb::handle object) { return nb::str(object).c_str(); }

engine::StepTime step_time(nb::handle constants) {
  engine::StepTime time{};
  struct Field {
    const char* name;
    double* value;
  };
  const std::array<Field, 9> fields{{{"linear_s", &time.linear_s},
                                     {"pair_s", &time.pair_s},
                                     {"weights_s", &time.weights_s},
                                     {"context_s", &time.context_s},
                                     {"experts_s", &time.experts_s},
                                     {"expert_share", &time.expert_share},
                                     {"overhead_s", &time.overhead_s},
                                     {"seq_s", &time.seq_s},
                                     {"softmax_p", &time.softmax_p}}};
  if (PySequence_Check(constants.ptr()) == 0) {
    const std::string type = text(constants.type().attr("__name__"));
    throw nb::type_error(("step_time must be a sequence of 9 floats, got " + type).c_str());
  }
  const std::size_t length = nb::len(constants);
  if (length != fields.size()) {
    refuse("step_time must have 9 constants, got " + std::to_string(length));
  }
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const nb::object item = constants[i];
    const double value = number(item, fields[i].name);
    if (!(std::isfinite(value) && value >= 0.0)) {
      refuse(std::string(fields[i].name) + " must be finite and at least 0, got " + text(item));
    }
    *fields[i].value = value;
  }
  if (time.expert_share > 1.0) {
    refuse("expert_share must be at most 1, got " + text(constants[5]));
  }
  if (time.softmax_p < engine::kLeastP) {
    refuse("softmax_p must be at least 0.25, got " + text(constants[8]));
  }
  return time;
}

std::vector<engine::CacheGroup> cache_groups(nb::handle pairs) {
  constexpr std::int64_t kMostWindow = 1 << 24;
  constexpr std::int64_t kMostCost = 1 << 16;
  std::vector<engine::CacheGroup> groups;
  for (const nb::handle pair : nb::iter(pairs)) {
    if (PySequence_Check(pair.ptr()) == 0 || nb::len(pair) != 2) {
      refuse("cache_groups must be pairs of a window and a cost, got " + text(pair));
    }
    const std::int64_t window = in_range(nb::object(pair[0]), "window", 0, kMostWindow);
    const std::int64_t cost = in_range(nb::object(pair[1]), "cost", 1, kMostCost);
    if (window == 1) refuse("window must be 0, or 2 and more, got 1");
    groups.push_back({static_cast<std::uint32_t>(window), static_cast<std::uint32_t>(cost)});
  }
  return groups;
}

void check_groups(const engine::WorkerSettings& settings) {
  if (settings.cache_groups.empty()) return;
  if (settings.host_blocks != 0) {
    refuse("windows and states are not kept in host memory: host blocks must be 0");
  }
  const engine::GroupBlocks groups(settings.cache_groups, settings.block_size);
  const std::size_t most = groups.working();
  if (most >= settings.blocks) {
    refuse("windows and states of one request take " + std::to_string(most) + " blocks of " +
           std::to_string(settings.block_size) + " tokens, and the cache has " +
           std::to_string(settings.blocks));
  }
}

engine::Settings scheduler_settings(const WorkerOptions& options) {
  const auto limit = [](nb::handle value, const char* name, std::int64_t least) {
    return in_range(value, name, least, INT32_MAX);
  };
  engine::Settings settings{};
  settings.max_num_tokens = limit(options.max_num_tokens, "max_num_tokens", 1);
  settings.max_batch_size = limit(options.max_batch_size, "max_batch_size", 1);
  settings.max_model_tokens = limit(options.max_model_tokens, "max_model_tokens", 2);
  settings.min_chunk_tokens = limit(options.min_chunk_tokens, "min_chunk_tokens", 1);
  settings.watermark = number(options.watermark, "watermark");
  settings.ageing_s = positive(options.ageing_s, "ageing_s");
  settings.max_queue = limit(options.max_queue, "max_queue", 1);
  settings.prefix_wait_tokens = limit(options.prefix_wait_tokens, "prefix_wait_tokens", 0);
  if (settings.max_num_tokens < settings.max_batch_size) {
    refuse("max_num_tokens (" + text(options.max_num_tokens) +
           ") must be at least max_batch_size (" + text(options.max_batch_size) +
           "), or decodes would not fit one step");
  }
  if (!(settings.watermark >= 0.0 && settings.watermark < 1.0)) {
    refuse("watermark must be in [0, 1), got " + text(options.watermark));
  }
  if (settings.min_chunk_tokens > settings.max_num_tokens) {
    refuse("min_chunk_tokens (" + text(options.min_chunk_tokens) +
           ") must be at most max_num_tokens (" + text(options.max_num_tokens) +
           "), or a long prompt would never start");
  }
  return settings;
}

}  // namespace

double positive(nb::handle object, const char* name) {
  const double value = number(object, name);
  if (!(std::isfinite(value) && value > 0.0)) {
    refuse(std::string(name) + " must be finite and above 0, got " + text(object));
  }
  return value;
}

engine::WorkerSettings worker_settings(const WorkerOptions& options) {
  engine::WorkerSettings settings{};
  settings.scheduler = scheduler_settings(options);
  settings.step_time = step_time(options.step_time);
  const auto blocks = in_range(options.blocks, "blocks", 1, INT32_MAX);
  settings.blocks = static_cast<std::uint32_t>(blocks);
  settings.block_size = in_range(options.block_size, "block_size", 1, INT32_MAX);
  const int record_events = PyObject_IsTrue(options.record_events.ptr());
  if (record_events < 0) throw nb::python_error();
  settings.record_events = record_events == 1;
  settings.speed = positive(options.speed, "speed");
  const auto host_blocks = in_range(options.host_blocks, "host_blocks", 0, INT32_MAX);
  settings.host_blocks = static_cast<std::uint32_t>(host_blocks);
  settings.load_block_s = number(options.load_block_s, "load_block_s");
  if (!(std::isfinite(settings.load_block_s) && settings.load_block_s >= 0.0)) {
    refuse("load_block_s must be finite and at least 0, got " + text(options.load_block_s));
  }
  settings.cache_groups = cache_groups(options.cache_groups);
  check_groups(settings);
  return settings;
}

}  // namespace kv
